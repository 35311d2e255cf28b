"""What cannot be told sample by sample is refused, by name, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vsgd.torch.per_sample import Recorder, SampleError


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


X = torch.linspace(-1, 1, 20).view(5, 4)


def hooks_of(model):
    found = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    return sum(found) + sum(len(p._backward_hooks or ()) for p in model.parameters())


class SharedPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(9, 4), nn.Embedding(3, 4)

    def forward(self, words):
        return self.table(words) + self.positions(torch.tensor([2, 1, 0]))


class Detour(nn.Module):
    """Hands its weight to a function that torch cannot be watched in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        self.aside = (self.weight * x).sum()
        return self.linear(x)


def batch_norm():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    return model, lambda: model(X).sum().backward()


def penalty():
    model = mlp()
    return model, lambda: (model(X).sum() + model[0].weight.square().sum()).backward()


def no_backward():
    model = mlp()
    return model, lambda: model(X).sum()


def no_model():
    return mlp(), lambda: None


def shared_positions():
    model = SharedPositions()
    return model, lambda: model(torch.ones(5, 3, dtype=torch.long)).sum().backward()


def no_batch():
    model = mlp()
    return model, lambda: model(X[0]).sum().backward()


def positions_first():
    model = nn.TransformerEncoderLayer(4, 2, 6, batch_first=False)
    return model, lambda: model(torch.randn(3, 5, 4)).sum().backward()


def as_many_positions_as_samples():
    model = nn.LSTM(4, 2)
    return model, lambda: model(torch.randn(5, 5, 4))[0].sum().backward()


def two_backwards():
    model = mlp()

    def run():
        loss = model(X).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    return model, run


def two_passes():
    model = mlp()

    def run():
        model(X).sum().backward()
        model(-X).sum().backward()

    return model, run


def two_forwards_two_backwards():
    model = mlp()

    def run():
        losses = [model(X).sum(), model(-X).sum()]
        for loss in losses:
            loss.backward()

    return model, run


def packed():
    model = nn.GRU(4, 2, batch_first=True)
    sequence = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 5, 4), torch.tensor([5, 4, 2]), batch_first=True)
    return model, lambda: model(sequence)[0].data.sum().backward()


def side_channel():
    model = Detour()
    return model, lambda: (model(X).sum() + model.aside).backward()


def hidden_use():
    model = mlp()

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            return None, grad.t() @ ctx.saved_tensors[0]

    return model, lambda: (model[2](Hidden.apply(X, model[0].weight))).sum().backward()


def changed_gradient():
    model = mlp()
    model[2].weight.register_hook(lambda grad: 2 * grad)
    return model, lambda: model(X).sum().backward()


CASES = {
    batch_norm: "'1' .BatchNorm1d. normalizes over the batch.*eval mode",
    penalty: "'0.weight' goes into .*outside any module call.*weight decay",
    no_backward: "no gradient arrived",
    no_model: "no gradient arrived",
    shared_positions: "'positions.weight' saw a batch of 3, but 'table.weight' one of 5.*expanded",
    no_batch: "no axis for the samples",
    positions_first: "batch_first=True",
    as_many_positions_as_samples: "batch_first=True",
    two_backwards: "backward ran twice",
    two_passes: "one forward and one backward",
    two_forwards_two_backwards: "backward ran twice",
    packed: "PackedSequence",
    side_channel: "'weight' do not add up to its gradient",
    hidden_use: "'0.weight' goes into",
    changed_gradient: "'2.weight' do not add up to its gradient",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_refused_by_name_and_nothing_left_behind(case):
    model, run = case()
    before = hooks_of(model)
    with pytest.raises(SampleError, match=CASES[case]), Recorder(model).record():
        run()
    assert hooks_of(model) == before
    assert torch.overrides._len_torch_function_stack() == 0


def test_exception_of_the_closure_passes_through():
    model = mlp()
    with pytest.raises(ZeroDivisionError), Recorder(model).record():
        raise ZeroDivisionError(model(X))
    assert hooks_of(model) == 0
    assert torch.overrides._len_torch_function_stack() == 0


def test_recordings_of_different_batches():
    model = mlp()
    recorder = Recorder(model)
    recordings = []
    for x in (X, X[:3]):
        with recorder.record() as recording:
            model(x).sum().backward()
        recordings.append(recording)
    with pytest.raises(SampleError, match="5 and 3 samples"):
        recorder.sums(*recordings)


def test_unfinished_recording_and_unknown_reduction():
    model = mlp()
    recorder = Recorder(model)
    with recorder.record() as here:
        model(X).sum().backward()
        with pytest.raises(SampleError, match="not complete"):
            recorder.sums(here)
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        recorder.sums(here, reduction="none")


def test_complex_parameters():
    with pytest.raises(SampleError, match="'weight' is complex"):
        Recorder(nn.Linear(2, 2, dtype=torch.complex64))


def test_changed_shapes_are_checked_again():
    model = mlp()
    recorder = Recorder(model)
    with recorder.record():
        model(X).sum().backward()
    model[2].weight.register_hook(lambda grad: 2 * grad)
    with recorder.record():
        model(X).sum().backward()
    with pytest.raises(SampleError, match=r"'2.weight' do not add up"), recorder.record():
        model(X[:2]).sum().backward()


def test_captures_are_freed():
    model = mlp()
    recorder = Recorder(model)
    array = X.numpy().copy()
    memory = weakref.ref(array)  # alive as long as any tensor on it is
    x = torch.from_numpy(array)
    with recorder.record() as here:
        loss = model(x).sum()
        loss.backward()
    del array, x
    gc.collect()
    assert memory() is not None
    del here
    gc.collect()
    assert memory() is None, "the graph of the loss keeps the recording alive"
    assert loss.grad_fn is not None


def test_user_may_clip_and_zero_gradients_in_the_closure():
    model = mlp()
    recorder = Recorder(model)
    with recorder.record() as here:
        F.mse_loss(model(X), X[:, :2]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model.zero_grad()
    assert len(recorder.sums(here)) == 4
