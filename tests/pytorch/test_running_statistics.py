"""The running statistics of BatchNorm are those of the weights that are evaluated, the averages of the iterates."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vsgd import NETWORKS, PAPER
from vsgd.tensors import probe_seed
from vsgd.torch import VSGD, is_probing, optimizer

INTERVAL = int(NETWORKS.probe_interval)
WORTH = optimizer.STATISTICS_WORTH
DUE = [k for k in range(INTERVAL, 1000) if k % INTERVAL == probe_seed(k // INTERVAL, 0) % INTERVAL]
"""Steps in which the closure is evaluated at the averaged weights."""

FIRST, SECOND = DUE[:2]


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


@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_evaluation_at_the_averaged_weights_counts_for_several(momentum):
    model = network(momentum)
    opt = VSGD(model.parameters())
    train(model, opt, range(SECOND))
    before, called = copy.deepcopy(model), []
    opt.step(closure_of(model, opt, SECOND, called))
    assert all(torch.equal(a, b) for a, b in zip(called[-1].parameters(), before.parameters(), strict=True))
    twin = before
    if momentum is not None:
        twin[1].momentum = 1 - (1 - momentum) ** WORTH
    twin(batch(SECOND)[0])
    torch.testing.assert_close(statistics(model), statistics(twin))
    assert model[1].momentum == momentum


def test_other_steps_leave_statistics_as_they_are():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(FIRST + 1))
    before = statistics(model)
    train(model, opt, range(FIRST + 1, SECOND))
    assert same(statistics(model), before)
    train(model, opt, [SECOND])
    assert not same(statistics(model), before)


def test_the_first_steps_leave_those_of_the_iterates():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(INTERVAL))
    assert model[1].num_batches_tracked == INTERVAL


@pytest.mark.parametrize("algorithm", [NETWORKS._replace(average_iterates=False), PAPER], ids=["no average", "paper"])
def test_without_averages_every_step_moves_them(algorithm):
    model = network()
    opt = VSGD(model.parameters(), algorithm=algorithm)
    train(model, opt, range(FIRST + 2))
    assert model[1].num_batches_tracked == FIRST + 2


def test_judged_by_them_the_average_is_as_good_as_with_statistics_taken_anew():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(301))
    x, y = (torch.cat(parts) for parts in zip(*map(batch, range(1000, 1100)), strict=True))
    by_running = F.mse_loss(model.eval()(x), y)
    torch.optim.swa_utils.update_bn([batch(step)[0] for step in range(20)], model.train())
    anew = F.mse_loss(model.eval()(x), y)
    assert by_running < 1.1 * anew


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


@pytest.mark.parametrize("ending", ["not a number", "an error"])
def test_nothing_of_an_evaluation_that_fails_is_kept(ending):
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(FIRST))
    before = copy.deepcopy(model)

    def loss_of(output, target):
        at_average = torch.equal(model[0].weight, before[0].weight)
        if at_average and ending == "an error":
            raise MemoryError("no memory is left")
        return F.mse_loss(output, target) * (math.nan if at_average else 1)

    closure = closure_of(model, opt, FIRST, loss_of=loss_of)
    if ending == "an error":
        with pytest.raises(MemoryError):
            opt.step(closure)
        assert same(dict(model.named_parameters()), dict(before.named_parameters()))
    else:
        opt.step(closure)
    assert same(statistics(model), statistics(before))
    assert model[1].momentum == 0.1


def test_micro_batches_move_them_one_after_the_other():
    model = network()
    opt = VSGD(model.parameters())

    def micro_batches(step):
        return [closure_of(model, opt, 2 * step + k) for k in range(2)]

    for step in range(FIRST):
        opt.step(micro_batches(step))
    twin = copy.deepcopy(model)
    opt.step(micro_batches(FIRST))
    twin[1].momentum = 1 - 0.9**WORTH
    for k in range(2):
        twin(batch(2 * FIRST + k)[0])
    torch.testing.assert_close(statistics(model), statistics(twin))


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


def test_layers_that_take_turns_all_have_their_turn():
    torch.manual_seed(0)
    heads = nn.ModuleList(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)) for _ in range(2)).double()
    opt = VSGD(heads.parameters())
    for step in range(20 * INTERVAL):
        x, y = batch(step)
        opt.minimize(lambda head=heads[step % 2], x=x, y=y: F.mse_loss(head(x), y))
    tracked = [int(head[1].num_batches_tracked) for head in heads]
    assert min(tracked) >= INTERVAL / 2 + 5, "more than in the first steps, which move both"


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
