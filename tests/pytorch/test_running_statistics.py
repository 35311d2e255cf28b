"""The running statistics of BatchNorm are those of the weights that are evaluated, the averages of the iterates."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vsgd import NETWORKS, PAPER
from vsgd.torch import VSGD, batchnorm, is_probing
from vsgd.torch.replay import saving_state

FIRST, SECOND = [k for k in range(1000) if batchnorm.is_due(k)][:2]
"""Steps in which the closure is evaluated at the averaged weights."""


def network(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8, momentum=momentum)
    return nn.Sequential(nn.Linear(5, 8), norm, nn.ReLU(), nn.Linear(8, 1)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 5, generator=generator, dtype=torch.float64)
    return x, x[:, :1].abs() + 0.3 * torch.randn(16, 1, generator=generator, dtype=torch.float64)


def closure_of(model, opt, step, called=None, loss_of=F.mse_loss):
    x, y = batch(step)

    def closure():
        opt.zero_grad()
        if called is not None:
            called.append(copy.deepcopy(model))
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    return closure


def train(model, opt, steps):
    for step in steps:
        opt.step(closure_of(model, opt, step))


def statistics(model) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def layer_of(saving) -> batchnorm.Layer:
    (layer,) = batchnorm.moved_layers([saving])
    return layer


def inputs(kind: type[nn.Module], weights: str, seed: int) -> torch.Tensor:
    """What comes to a layer of six channels at the iterates or at the averaged weights, of the same rows."""
    shape = {nn.BatchNorm1d: (12, 6), nn.BatchNorm2d: (4, 6, 3, 3), nn.InstanceNorm1d: (4, 6, 9)}[kind]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    offset = x.mean() - x.mean([k for k in range(x.dim()) if k != 1], keepdim=True)
    return 2 * (x + offset) - x.mean() + 1 if weights == "iterates" else 0.5 * (x + offset) + 0.5 * x.mean() - 3


@pytest.mark.parametrize(
    ("kind", "momentum", "calls"),
    [
        *itertools.product((nn.BatchNorm1d, nn.BatchNorm2d), (0.1, None), (1, 3)),
        (nn.InstanceNorm1d, 0.1, 1),  # it neither keeps plain means nor counts its calls
    ],
)
def test_corrected_statistics_are_those_of_a_layer_that_met_the_averaged_weights(kind, momentum, calls):
    norm, twin = (kind(6, momentum=momentum, track_running_stats=True, eps=1e-12).double() for _ in range(2))
    for each in (norm, twin):
        each(inputs(kind, "averaged", 0))
    both = []
    for weights in ("iterates", "averaged"):
        with saving_state() as saved:
            copy.deepcopy(norm)(inputs(kind, weights, 1))
        both.append(batchnorm.layer_moments(saved))
    (iterate,), (average,) = (each.values() for each in both)
    assert iterate.values == (0 if momentum is None else inputs(kind, "iterates", 1).numel() / 6)
    correction = batchnorm.measure_correction(iterate, average, norm.eps)._replace(trust=torch.tensor(0.0))
    with saving_state() as saved:
        for seed in range(2, 2 + calls):
            norm(inputs(kind, "iterates", seed))
    batchnorm.correct(layer_of(saved), correction, None)
    for seed in range(2, 2 + calls):
        twin(inputs(kind, "averaged", seed))
    torch.testing.assert_close(statistics(norm), statistics(twin))


def test_the_more_values_the_more_a_minibatch_at_the_averaged_weights_counts():
    trusts = []
    for rows in (10, 1000, 100_000):
        norm = nn.BatchNorm1d(3)
        with saving_state() as saved:
            norm(torch.randn(rows, 3))
        (found,) = batchnorm.layer_moments(saved).values()
        trusts.append(float(batchnorm.measure_correction(found, found, norm.eps).trust))
    assert trusts == pytest.approx([0.01, 0.5, 0.99], rel=0.02)


def test_trusted_statistics_are_what_was_seen_at_the_averaged_weights():
    norm = nn.BatchNorm1d(6).double()
    before = statistics(norm)
    with saving_state() as saved:
        norm(inputs(nn.BatchNorm1d, "iterates", 0))
    layer, (iterate,) = layer_of(saved), batchnorm.layer_moments(saved).values()
    x = inputs(nn.BatchNorm1d, "averaged", 0)
    average = batchnorm.LayerMoments(x.mean(0), x.var(0), len(x))
    correction = batchnorm.measure_correction(iterate, average, norm.eps)._replace(trust=torch.tensor(1.0))
    batchnorm.correct(layer, correction, average)
    torch.testing.assert_close((norm.running_mean, norm.running_var), average[:2])
    batchnorm.correct(layer, correction, None)
    torch.testing.assert_close((norm.running_mean, norm.running_var), (before["running_mean"], before["running_var"]))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_a_part_that_is_not_called_keeps_its_statistics(kind):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(5, 8)
            self.norms = nn.ModuleList(kind(8, track_running_stats=True) for _ in range(2))
            self.out = nn.Linear(8, 1)

        def forward(self, x, head):
            hidden = self.body(x)
            wide = hidden if kind is nn.BatchNorm1d else hidden.T[None]
            normed = self.norms[head](wide)
            return self.out((normed if kind is nn.BatchNorm1d else normed[0].T).relu())

    torch.manual_seed(0)
    model = TwoHeads().double()
    opt = VSGD(model.parameters())

    def learn(step, head):
        x, y = batch(step)
        opt.minimize(lambda: F.mse_loss(model(x, head), y))

    measured = 3 * batchnorm.INTERVAL  # an odd number
    for step in range(measured + 1):
        learn(step, step % 2)
    assert len(opt.state_dict()["statistics"]) == 2
    before = statistics(model.norms[1])
    for step in range(measured + 1, measured + 2 * batchnorm.INTERVAL):
        learn(step, 0)
    assert same(statistics(model.norms[1]), before)


def test_a_layer_may_be_called_by_keyword():
    model = network()
    model.forward = lambda x: model[3](model[2](model[1](input=model[0](x))))
    opt = VSGD(model.parameters())
    train(model, opt, range(FIRST + 1))
    (correction,) = opt.state_dict()["statistics"].values()
    assert correction[2] == 0, "how many values came is not known"


def test_some_steps_evaluate_the_averaged_weights():
    model = network()
    opt = VSGD(model.parameters())
    for step in range(SECOND + 1):
        before, called = copy.deepcopy(model), []
        opt.step(closure_of(model, opt, step, called))
        at_average = torch.equal(called[-1][0].weight, before[0].weight)
        assert step < 5 or at_average == (step in (FIRST, SECOND)), step
    assert model[1].num_batches_tracked == SECOND + 1


@pytest.mark.parametrize("algorithm", [NETWORKS._replace(average_iterates=False), PAPER], ids=["no average", "paper"])
def test_without_averages_every_step_moves_them(algorithm):
    model = network()
    opt = VSGD(model.parameters(), algorithm=algorithm)
    train(model, opt, range(FIRST + 2))
    assert model[1].num_batches_tracked == FIRST + 2


def test_the_loss_with_running_statistics_is_close_to_that_with_statistics_of_the_training_set():
    """On average over networks, since the ratio of a single one depends on chance."""
    ratios = []
    for seed in range(4):
        model = network()
        torch.manual_seed(seed)
        model.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
        train(model, VSGD(model.parameters()), range(301))
        x, y = (torch.cat(parts) for parts in zip(*map(batch, range(1000, 1100)), strict=True))
        by_running = F.mse_loss(model.eval()(x), y).item()
        torch.optim.swa_utils.update_bn([batch(step)[0] for step in range(20)], model.train())
        ratios.append(by_running / F.mse_loss(model.eval()(x), y).item())
    assert sum(ratios) / len(ratios) < 1.08


def test_the_extra_evaluation_leaves_gradients_and_training_alone():
    plain, other = network(), network()
    other[1] = nn.BatchNorm1d(8, track_running_stats=False).double()
    opts = [VSGD(model.parameters()) for model in (plain, other)]
    for step in range(SECOND + 1):
        for model, opt in zip((plain, other), opts, strict=True):
            opt.step(closure_of(model, opt, step))
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)


def test_loggers_can_tell_it_from_the_first_evaluation():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(FIRST))
    flags = []

    def loss_of(output, target):
        flags.append(is_probing())
        return F.mse_loss(output, target)

    opt.step(closure_of(model, opt, FIRST, loss_of=loss_of))
    assert flags == [False, *[True] * (len(flags) - 1)]
    assert len(flags) > 1
    assert not is_probing()


def test_an_error_in_it_leaves_everything_as_it_was():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(FIRST))
    before = copy.deepcopy(model)

    def loss_of(output, target):
        if torch.equal(model[0].weight, before[0].weight):
            raise MemoryError("no memory is left")
        return F.mse_loss(output, target)

    with pytest.raises(MemoryError):
        opt.step(closure_of(model, opt, FIRST, loss_of=loss_of))
    assert same(dict(model.named_parameters()), dict(before.named_parameters()))
    assert same(statistics(model), statistics(before))


def test_infinite_values_at_the_averaged_weights_are_not_taken_in():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(FIRST))
    before = copy.deepcopy(model)

    def overflow(layer, inputs, output):
        return output * (math.inf if torch.equal(model[0].weight, before[0].weight) else 1)

    model[0].register_forward_hook(overflow)
    train(model, opt, range(FIRST, FIRST + 3))
    assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())
    assert model[1].num_batches_tracked == FIRST + 3


def test_micro_batches_all_move_them():
    model = network()
    opt = VSGD(model.parameters())
    for step in range(SECOND + 5):
        opt.step([closure_of(model, opt, 2 * step + k) for k in range(2)])
    assert model[1].num_batches_tracked == 2 * (SECOND + 5)
    x, y = (torch.cat(parts) for parts in zip(*map(batch, range(1000, 1100)), strict=True))
    by_running = F.mse_loss(model.eval()(x), y)
    torch.optim.swa_utils.update_bn([batch(step)[0] for step in range(20)], model.train())
    assert by_running < 1.1 * F.mse_loss(model.eval()(x), y)


def test_a_skipped_step_of_micro_batches_leaves_them_alone():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(3))
    before = statistics(model)
    broken = partial(lambda output, target, factor: factor * F.mse_loss(output, target), factor=math.inf)
    opt.step([closure_of(model, opt, 3), closure_of(model, opt, 4, loss_of=broken)])
    assert opt.param_groups[0]["skipped"] == 1
    assert same(statistics(model), before)


@pytest.mark.parametrize("kind", ["eval mode", "no statistics"])
def test_layers_without_statistics_to_move_cost_nothing(kind):
    model = network()
    if kind == "eval mode":
        model[1].eval()
    else:
        model[1] = nn.BatchNorm1d(8, track_running_stats=False).double()
    opt = VSGD(model.parameters())
    train(model, opt, range(FIRST))
    before, called = copy.deepcopy(model), []
    opt.step(closure_of(model, opt, FIRST, called))
    assert not any(torch.equal(each[0].weight, before[0].weight) for each in called)
    assert same(statistics(model), statistics(before))


@pytest.mark.parametrize("affine", [True, False])
def test_training_resumes_to_the_bit_with_layers_that_take_turns(affine):
    def heads():
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(8, affine=affine) for _ in range(2)]
        return nn.ModuleList(nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 1)) for norm in norms).double()

    def train_in_turn(model, opt, steps):
        for step in steps:
            x, y = batch(step)
            opt.minimize(lambda head=model[step % 2], x=x, y=y: F.mse_loss(head(x), y))

    model = heads()
    opt = VSGD(model.parameters())
    half = 8 * batchnorm.INTERVAL
    train_in_turn(model, opt, range(half))
    assert len(opt.state_dict()["statistics"]) == 2, "both heads have had their turn"
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train_in_turn(model, opt, range(half, half + 70))
    other = heads()
    other.load_state_dict(saved[0])
    again = VSGD(other.parameters())
    again.load_state_dict(saved[1])
    train_in_turn(other, again, range(half, half + 70))
    assert same(statistics(model), statistics(other))
    assert same(dict(model.named_parameters()), dict(other.named_parameters()))


def test_copies_of_an_optimizer_go_on_alike():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(SECOND))
    other, again = copy.deepcopy((model, opt))
    for pair in ((model, opt), (other, again)):
        train(*pair, range(SECOND, SECOND + 20))
    assert same(statistics(model), statistics(other))


@pytest.mark.parametrize(
    "damage", [None, {"parameter 2": []}, {"parameter 2": [torch.ones(8), torch.full((8,), math.nan), torch.ones(())]}]
)
def test_damaged_statistics_are_refused(damage):
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(FIRST + 1))
    before = opt.state_dict()
    with pytest.raises(ValueError, match=r"'statistics' must be three tensors.*Nothing was loaded"):
        opt.load_state_dict({**before, "statistics": damage})
    assert list(opt.state_dict()["statistics"]) == ["parameter 2"]


def test_a_layer_of_another_width_starts_anew():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(FIRST + 1))
    saved = opt.state_dict()
    saved["statistics"]["parameter 2"] = [torch.ones(3), torch.ones(3), torch.zeros(())]
    opt.load_state_dict(saved)
    train(model, opt, range(FIRST + 1, SECOND + 1))
    assert opt.state_dict()["statistics"]["parameter 2"][0].shape == (8,)


def test_weights_that_the_closure_changes_are_not_taken_for_changes_by_the_user():
    """As `max_norm` changes them: iterates must not jump to the average."""
    model = network()
    opt = VSGD(model.parameters())

    def renormalize(layer, inputs):
        layer.weight.data.mul_(0.999)

    train(model, opt, range(SECOND))
    before = opt.state[model[3].weight]["iterate"].clone()
    model[3].register_forward_pre_hook(renormalize)
    opt.step(closure_of(model, opt, SECOND))
    after = opt.state[model[3].weight]["iterate"]
    assert (after - before).norm() < (after - model[3].weight).norm()


def test_buffers_are_restored_if_a_part_was_called_before_the_whole_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    with saving_state() as saved:
        model[1](torch.randn(8, 4))
        model(torch.randn(8, 3))
    saved.restore()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
