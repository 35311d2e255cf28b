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
from vsgd.torch import VSGD, is_probing

INTERVAL = int(NETWORKS.probe_interval)


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
def test_an_evaluation_at_the_averaged_weights_counts_for_all_steps_since_the_last(momentum):
    model = network(momentum)
    opt = VSGD(model.parameters())
    train(model, opt, range(2 * INTERVAL))
    before, called = copy.deepcopy(model), []
    opt.step(closure_of(model, opt, 2 * INTERVAL, called))
    assert len(called) == 3, "at the iterate, at the probe and at the average"
    assert all(torch.equal(a, b) for a, b in zip(called[-1].parameters(), before.parameters(), strict=True))
    twin = before
    if momentum is not None:
        twin[1].momentum = 1 - (1 - momentum) ** INTERVAL
    twin(batch(2 * INTERVAL)[0])
    torch.testing.assert_close(statistics(model), statistics(twin))
    assert model[1].momentum == momentum


def test_other_steps_leave_statistics_as_they_are():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(INTERVAL + 1))
    before = statistics(model)
    train(model, opt, range(INTERVAL + 1, 2 * INTERVAL))
    assert same(statistics(model), before)
    train(model, opt, [2 * INTERVAL])
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
    train(model, opt, range(INTERVAL + 2))
    assert model[1].num_batches_tracked == INTERVAL + 2


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
    other[1].track_running_stats, other[1].running_mean, other[1].running_var = False, None, None
    opts = [VSGD(model.parameters()) for model in (plain, other)]
    for step in range(2 * INTERVAL + 1):
        for model, opt in zip((plain, other), opts, strict=True):
            opt.step(closure_of(model, opt, step))
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)


def test_loggers_can_tell_it_from_the_first_evaluation():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(INTERVAL))
    flags = []

    def loss_of(output, target):
        flags.append(is_probing())
        return F.mse_loss(output, target)

    opt.step(closure_of(model, opt, INTERVAL, loss_of=loss_of))
    assert flags == [False, True, True]
    assert not is_probing()


@pytest.mark.parametrize("ending", ["not a number", "an error"])
def test_nothing_of_an_evaluation_that_fails_is_kept(ending):
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(INTERVAL))
    before, calls = copy.deepcopy(model), []

    def loss_of(output, target):
        calls.append(0)
        if len(calls) == 3 and ending == "an error":
            raise MemoryError("no memory is left")
        return F.mse_loss(output, target) * (math.nan if len(calls) == 3 else 1)

    closure = closure_of(model, opt, INTERVAL, loss_of=loss_of)
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

    for step in range(INTERVAL):
        opt.step(micro_batches(step))
    twin = copy.deepcopy(model)
    opt.step(micro_batches(INTERVAL))
    twin[1].momentum = 1 - 0.9**INTERVAL
    for k in range(2):
        twin(batch(2 * INTERVAL + k)[0])
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


def test_layers_in_eval_mode_and_without_statistics_cost_nothing():
    model = network()
    model[1].eval()
    opt = VSGD(model.parameters())
    train(model, opt, range(INTERVAL))
    before, called = statistics(model), []
    opt.step(closure_of(model, opt, INTERVAL, called))
    assert len(called) == 2
    assert same(statistics(model), before)
