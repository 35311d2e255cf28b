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
from vsgd.torch import VSGD, batchnorm, is_probing
from vsgd.torch.replay import saving_state

STEPS = 46
"""Number of steps after which iterates and averaged weights differ."""


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


def inputs(kind: type[nn.Module], seed: int) -> torch.Tensor:
    shape = {nn.BatchNorm1d: (12, 6), nn.BatchNorm2d: (4, 6, 3, 3), nn.InstanceNorm1d: (4, 6, 9)}[kind]
    return 3 + 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def average(norm, kind, seeds, window) -> None:
    with saving_state() as saved:
        for seed in seeds:
            norm(inputs(kind, seed))
    batchnorm.average_over_window(layer_of(saved), window)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm1d])
@pytest.mark.parametrize("momentum", [0.1, 0.003])
def test_a_minibatch_enters_with_weight_one_over_the_window(kind, momentum):
    norm, twin = (kind(6, momentum=m, track_running_stats=True).double() for m in (momentum, 1 / 20))
    for each in (norm, twin):
        if kind is not nn.InstanceNorm1d:
            each.num_batches_tracked.fill_(100)
        each.running_mean.fill_(-1)
    for seed in range(5):
        average(norm, kind, [seed], 20)
        twin(inputs(kind, seed))
    torch.testing.assert_close(norm.running_mean, twin.running_mean)
    torch.testing.assert_close(norm.running_var, twin.running_var)


def test_several_calls_in_a_step_enter_with_the_weight_of_one_minibatch():
    norm = nn.BatchNorm1d(6).double()
    norm.num_batches_tracked.fill_(100)
    average(norm, nn.BatchNorm1d, range(3), 20)
    means = [inputs(nn.BatchNorm1d, seed).mean(0) for seed in range(3)]
    of_layer = sum(0.9 ** (2 - k) * mean for k, mean in enumerate(means)) / sum(0.9**k for k in range(3))
    torch.testing.assert_close(norm.running_mean, of_layer / 20)


def test_first_minibatches_of_a_new_layer_have_equal_weights():
    norm = nn.BatchNorm1d(6).double()
    for seed in range(4):
        average(norm, nn.BatchNorm1d, [seed], 20)
    x = torch.stack([inputs(nn.BatchNorm1d, seed) for seed in range(4)])
    torch.testing.assert_close(norm.running_mean, x.mean(1).mean(0))
    torch.testing.assert_close(norm.running_var, x.var(1).mean(0))


@pytest.mark.parametrize("momentum", [None, 0.0])
def test_plain_means_and_constant_statistics_remain(momentum):
    norm, twin = (nn.BatchNorm1d(6, momentum=momentum).double() for _ in range(2))
    for seed in range(4):
        average(norm, nn.BatchNorm1d, [seed], 5)
        twin(inputs(nn.BatchNorm1d, seed))
    torch.testing.assert_close(statistics(norm), statistics(twin))


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

    for step in range(20):
        learn(step, step % 2)
    before = statistics(model.norms[1])
    for step in range(20, 30):
        learn(step, 0)
    assert same(statistics(model.norms[1]), before)


def test_no_step_evaluates_the_averaged_weights():
    model = network()
    opt = VSGD(model.parameters())
    for step in range(STEPS):
        before, called = copy.deepcopy(model), []
        opt.step(closure_of(model, opt, step, called))
        assert step < 5 or not any(torch.equal(each[0].weight, before[0].weight) for each in called), step
    assert model[1].num_batches_tracked == STEPS


@pytest.mark.parametrize("algorithm", [NETWORKS._replace(average_iterates=False), PAPER], ids=["no average", "paper"])
def test_without_averages_statistics_are_those_of_the_layer(algorithm):
    model = network()
    opt = VSGD(model.parameters(), algorithm=algorithm)
    train(model, opt, range(STEPS))
    before, called = statistics(model[1]), []
    opt.step(closure_of(model, opt, STEPS, called))
    hidden = called[0][0](batch(STEPS)[0])
    torch.testing.assert_close(model[1].running_mean, 0.9 * before["running_mean"] + 0.1 * hidden.mean(0))
    assert model[1].num_batches_tracked == STEPS + 1


@pytest.mark.parametrize("steps", [30, 100, 301])
def test_the_loss_with_running_statistics_is_close_to_that_with_recomputed_statistics(steps):
    """On average over networks, since the ratio of a single one depends on chance."""
    ratios = []
    for seed in range(4):
        model = network()
        torch.manual_seed(seed)
        model.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
        train(model, VSGD(model.parameters()), range(steps))
        x, y = (torch.cat(parts) for parts in zip(*map(batch, range(1000, 1100)), strict=True))
        by_running = F.mse_loss(model.eval()(x), y).item()
        torch.optim.swa_utils.update_bn([batch(step)[0] for step in range(20)], model.train())
        ratios.append(by_running / F.mse_loss(model.eval()(x), y).item())
    assert sum(ratios) / len(ratios) < 1.08


def test_running_statistics_have_no_effect_on_gradients_and_training():
    plain, other = network(), network()
    other[1] = nn.BatchNorm1d(8, track_running_stats=False).double()
    opts = [VSGD(model.parameters()) for model in (plain, other)]
    for step in range(STEPS + 1):
        for model, opt in zip((plain, other), opts, strict=True):
            opt.step(closure_of(model, opt, step))
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)


def test_an_error_in_a_second_evaluation_restores_them():
    model = network()
    opt = VSGD(model.parameters(), algorithm=NETWORKS._replace(probe_interval=1))
    train(model, opt, range(10))
    before = copy.deepcopy(model)

    def loss_of(output, target):
        if is_probing():
            raise MemoryError("no memory is left")
        return F.mse_loss(output, target)

    with pytest.raises(MemoryError):
        opt.step(closure_of(model, opt, 10, loss_of=loss_of))
    assert same(dict(model.named_parameters()), dict(before.named_parameters()))
    assert same(statistics(model), statistics(before))


def test_micro_batches_all_move_them():
    model = network()
    opt = VSGD(model.parameters())
    for step in range(STEPS + 5):
        opt.step([closure_of(model, opt, 2 * step + k) for k in range(2)])
    assert model[1].num_batches_tracked == 2 * (STEPS + 5)
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
def test_layers_without_statistics_to_move_stay_as_they_are(kind):
    model = network()
    if kind == "eval mode":
        model[1].eval()
    else:
        model[1] = nn.BatchNorm1d(8, track_running_stats=False).double()
    opt = VSGD(model.parameters())
    before = statistics(model)
    train(model, opt, range(10))
    assert same(statistics(model), before)


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
    half = 100
    train_in_turn(model, opt, range(half))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train_in_turn(model, opt, range(half, half + 70))
    other = heads()
    other.load_state_dict(saved[0])
    again = VSGD(other.parameters())
    again.load_state_dict(saved[1])
    train_in_turn(other, again, range(half, half + 70))
    never_saved = heads()
    train_in_turn(never_saved, VSGD(never_saved.parameters()), range(half + 70))
    for each in (model, other):
        assert same(statistics(never_saved), statistics(each))
        assert same(dict(never_saved.named_parameters()), dict(each.named_parameters()))


def test_copies_of_an_optimizer_go_on_alike():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(STEPS))
    other, again = copy.deepcopy((model, opt))
    for pair in ((model, opt), (other, again)):
        train(*pair, range(STEPS, STEPS + 20))
    assert same(statistics(model), statistics(other))


def test_weights_that_the_closure_changes_are_not_taken_for_changes_by_the_user():
    """As `max_norm` changes them: iterates must not jump to the average."""
    model = network()
    opt = VSGD(model.parameters())

    def renormalize(layer, inputs):
        layer.weight.data.mul_(0.999)

    train(model, opt, range(STEPS))
    before = opt.state[model[3].weight]["iterate"].clone()
    model[3].register_forward_pre_hook(renormalize)
    opt.step(closure_of(model, opt, STEPS))
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


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("calls", [1, 16])
def test_several_calls_of_an_old_layer_have_the_weight_of_one_over_the_window(kind, calls):
    norm = kind(6, momentum=0.01, track_running_stats=True).double()
    norm.num_batches_tracked.fill_(10_000)
    norm.running_mean.fill_(-1)
    same_input = inputs(kind, 0)
    with saving_state() as saved:
        for _ in range(calls):
            norm(same_input)
    batchnorm.average_over_window(layer_of(saved), 20)
    mean = same_input.mean(0) if kind is nn.BatchNorm1d else same_input.mean((0, 2))
    torch.testing.assert_close(norm.running_mean, 0.95 * -torch.ones(6).double() + 0.05 * mean)


def test_first_steps_of_a_new_layer_with_several_calls_have_equal_weights():
    norm = nn.BatchNorm1d(6).double()
    for seed in range(6):
        average(norm, nn.BatchNorm1d, [seed] * 8, 50)
    means = torch.stack([inputs(nn.BatchNorm1d, seed).mean(0) for seed in range(6)])
    torch.testing.assert_close(norm.running_mean, means.mean(0))


@pytest.mark.parametrize("first", [NETWORKS._replace(average_iterates=False), PAPER], ids=["no average", "paper"])
def test_layers_of_a_group_without_average_keep_their_own_average(first):
    model = network()
    groups = [{"params": model[:2].parameters(), "algorithm": first}, {"params": model[2:].parameters()}]
    opt = VSGD(groups)
    train(model, opt, range(STEPS))
    before, called = statistics(model[1]), []
    opt.step(closure_of(model, opt, STEPS, called))
    hidden = called[0][0](batch(STEPS)[0])
    torch.testing.assert_close(model[1].running_mean, 0.9 * before["running_mean"] + 0.1 * hidden.mean(0))


def test_layers_of_a_companion_have_the_window_of_the_optimizer_that_trains_them():
    torch.manual_seed(0)
    maker, judge = network(), nn.Linear(1, 1).double()
    opts = VSGD(maker.parameters()), VSGD(judge.parameters())
    for step in range(60):
        x, _ = batch(step)
        opts[1].minimize(lambda x=x: (judge(maker(x).detach()) - 1).square().mean())
        opts[0].minimize(lambda x=x: judge(maker(x)).square().mean())
    opts[0].param_groups[0]["averaging"][0] = 50.0
    before = statistics(maker[1])
    x, _ = batch(60)
    opts[1].minimize(lambda: (judge(maker(x).detach()) - 1).square().mean())
    with opts[0].iterates():
        mean = maker[0](x).mean(0)
    torch.testing.assert_close(maker[1].running_mean, torch.lerp(before["running_mean"], mean, 1 / 50))


def test_statistics_in_bfloat16_follow_the_data_over_a_long_window():
    norm = nn.BatchNorm1d(6).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        with saving_state() as saved:
            norm((3 + 2 * torch.randn(64, 6, generator=generator)).bfloat16())
        batchnorm.average_over_window(layer_of(saved), 500)
    torch.testing.assert_close(norm.running_mean.float(), torch.full((6,), 3.0), rtol=0.15, atol=0)
    torch.testing.assert_close(norm.running_var.float(), torch.full((6,), 4.0), rtol=0.25, atol=0)


def test_layers_without_a_counter_and_lazy_layers_learn():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.LazyBatchNorm1d(affine=False), nn.Linear(8, 1)
    ).double()
    model[1].num_batches_tracked = None
    opt = VSGD([p for layer in (model[0], model[1], model[3]) for p in layer.parameters()])
    train(model, opt, range(12))
    assert model[2].num_batches_tracked == 12
