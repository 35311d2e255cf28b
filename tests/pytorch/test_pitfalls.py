"""Things that went wrong once, or nearly."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from closures import closure_of
from torch import nn

from vsgd import NETWORKS, PAPER
from vsgd.torch import VSGD

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def closure_for(model, opt, factor=1.0):
    return closure_of(opt, lambda: F.cross_entropy(model(X.to(next(model.parameters()).dtype)), Y) * factor)


def test_autocast_around_the_step_sees_the_shift():
    model = make_model()
    opt = VSGD(model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            opt.step(closure_for(model, opt))
    assert all(opt.state[p]["curv"].max() > 0 for p in model.parameters())


def test_gradients_in_views_of_a_buffer_are_kept_apart():
    """As DistributedDataParallel(gradient_as_bucket_view=True) makes them."""
    curvatures = []
    for bucket in (False, True):
        model = make_model()
        opt = VSGD(model.parameters())
        params = list(model.parameters())
        buffer = torch.zeros(sum(p.numel() for p in params))

        def closure(model=model, opt=opt, params=params, buffer=buffer, bucket=bucket):
            loss = closure_for(model, opt)()
            if bucket:
                views = buffer.split([p.numel() for p in params])
                for p, view in zip(params, views, strict=True):
                    p.grad = view.view_as(p).copy_(p.grad)
            return loss

        for _ in range(12):
            opt.step(closure)
        curvatures.append([opt.state[p]["curv"] for p in params])
    torch.testing.assert_close(*curvatures)


def test_gradients_in_the_same_memory_are_an_error():
    p = nn.Parameter(torch.ones(3))
    opt = VSGD([p])
    buffer = torch.zeros(3)

    def closure():
        p.grad = buffer.copy_(p.detach())
        return p.detach().sum()

    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="same memory"):
        opt.step(closure)
    assert torch.equal(p, before)


def test_state_follows_a_change_of_precision():
    model = make_model()
    opt = VSGD(model.parameters())
    for _ in range(12):
        opt.step(closure_for(model, opt))
    saved = opt.state_dict()
    double = make_model().double()
    again = VSGD(double.parameters())
    again.load_state_dict(saved)
    before = again.state[double[0].weight]["grad"].clone()
    for _ in range(3):
        again.step(closure_for(double, again))
    assert again.state[double[0].weight]["grad"].dtype == torch.float64
    assert not torch.equal(again.state[double[0].weight]["grad"], before)


def test_a_micro_batch_need_not_reach_every_parameter():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    opt = VSGD([a, b])

    def closure(loss_of):
        def run():
            opt.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss

        return run

    for _ in range(100):
        opt.step([closure(lambda: ((a - 2) ** 2 + (b - 3) ** 2).sum()), closure(lambda: ((a - 2) ** 2).sum())])
    assert a.item() == pytest.approx(2, abs=1e-2)
    assert b.item() == pytest.approx(3, abs=1e-2)
    assert opt.state[b]["seen"] == 100
    assert opt.state[a]["seen"] == 200


def test_parameters_that_share_memory_are_refused():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight.data = first.weight.data
    with pytest.raises(ValueError, match="share memory"):
        VSGD([*first.parameters(), *second.parameters()])


def test_gradients_whose_squares_overflow_are_skipped():
    model = make_model()
    opt = VSGD(model.parameters())
    for factor in (1.0, 1e19):
        opt.step(closure_for(model, opt, factor))
    assert opt.param_groups[0]["skipped"] == 1
    assert all(torch.isfinite(value).all() for p in model.parameters() for value in opt.state[p].values())


def test_gradients_are_unscaled_once_with_or_without_a_second_one():
    model = make_model()
    algorithm = NETWORKS._replace(probe_interval=5, average_iterates=False)
    opt = VSGD(model.parameters(), algorithm=algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(20):
        F.cross_entropy(model(X), Y).backward()
        expected = model[0].weight.grad.clone()

        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            scaler.scale(loss).backward()
            return loss

        model.zero_grad()
        opt.step(closure, scaler=scaler)
        scaler.update()
        torch.testing.assert_close(model[0].weight.grad, expected)
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:all micro-batches have exactly the same")
@pytest.mark.parametrize("overflows", [0, 1])
def test_the_scaler_is_told_of_an_overflow_in_any_micro_batch(overflows):
    model = make_model()
    opt = VSGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def closure(factor):
        loss = F.cross_entropy(model(X), Y)
        scaler.scale(loss * factor).backward()
        return loss

    for broken, scale in ((False, 1024.0), (True, 512.0), (False, 512.0)):
        factors = [math.inf if broken and k == overflows else 1.0 for k in range(2)]
        opt.step([partial(closure, factor) for factor in factors], scaler=scaler)
        scaler.update()
        assert scaler.get_scale() == scale
    assert (opt.param_groups[0]["steps"], opt.param_groups[0]["skipped"]) == (2, 1)


def test_a_skipped_step_leaves_running_statistics_alone():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    opt = VSGD(model.parameters())
    opt.step(closure_for(model, opt))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def broken():
        opt.zero_grad()
        loss = model(X * float("nan")).sum()
        loss.backward()
        return loss

    opt.step(broken)
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


def test_an_old_graph_is_noticed():
    model = make_model()
    opt = VSGD(model.parameters())
    for _ in range(12):
        opt.step(closure_for(model, opt))
    loss = F.cross_entropy(model(X), Y)
    opt.step(closure_for(model, opt))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_table_that_joins_late():
    torch.manual_seed(0)
    table, layer = nn.Embedding(7, 5), nn.Linear(5, 3)
    model = nn.ModuleList([table, layer])
    table.weight.requires_grad_(False)
    opt = VSGD(model.parameters(), per_sample=model)
    index = torch.randint(7, (16,), generator=torch.Generator().manual_seed(0))

    closure = closure_of(opt, lambda: F.cross_entropy(layer(table(index)), Y))

    for _ in range(12):
        opt.step(closure)
    table.weight.requires_grad_(True)
    start = table.weight.detach().clone()
    for _ in range(30):
        opt.step(closure)
    assert not torch.equal(table.weight, start)


def test_an_error_in_the_update_puts_all_parameters_back():
    model = make_model()
    opt = VSGD(model.parameters())
    for _ in range(12):
        opt.step(closure_for(model, opt))
    before = [p.detach().clone() for p in model.parameters()]
    opt.param_groups[0]["lr"] = "fast"
    with pytest.raises(ValueError, match="fast"):
        opt.step(closure_for(model, opt))
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)


def test_plain_things_work():
    empty = nn.Parameter(torch.zeros(0, 4))
    counter = nn.Parameter(torch.tensor(3), requires_grad=False)
    table = nn.Embedding(5, 2, sparse=True, padding_idx=0)
    scale = nn.Parameter(torch.tensor(2.0))
    opt = VSGD([empty, counter, *table.parameters(), scale])
    opt.param_groups[0]["algorithm"] = PAPER

    def closure(index):
        def run():
            opt.zero_grad()
            loss = (table(index).sum(dim=(1, 2), keepdim=True)[0, 0] * scale).abs() + scale**2 + 0 * empty.sum()
            loss.backward()
            return loss  # of shape (1,)

        return run

    for step in range(30):
        opt.step(closure(torch.tensor([[0, 0]]) if step % 2 else torch.tensor([[1, 2]])))
    assert abs(scale.item()) < 0.5


def test_the_state_of_another_optimizer_is_refused():
    model = make_model()
    opt = VSGD(model.parameters())
    with pytest.raises(ValueError, match="not one of VSGD"):
        opt.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_a_parameter_that_stopped_early_does_not_ask_for_second_gradients():
    model = make_model()
    extra = nn.Parameter(torch.ones(3))
    opt = VSGD([*model.parameters(), extra], algorithm=NETWORKS._replace(probe_interval=10))
    calls = 0
    for step in range(60):

        def closure(step=step):
            nonlocal calls
            calls += 1
            opt.zero_grad()
            loss = F.cross_entropy(model(X) + (extra if step < 3 else 0), Y)
            loss.backward()
            return loss

        opt.step(closure)
    assert 60 + 1 + 3 + 5 <= calls <= 60 + 1 + 3 + 5 + 3, "a few more where gradients are long"


def test_a_parameter_that_moves_to_another_group_gets_its_settings():
    model = make_model()
    last = model[-1]
    opt = VSGD([{"params": [*model.parameters()][:-1]}, {"params": [last.bias], "lr": 0.0}])
    for _ in range(3):
        opt.step(closure_for(model, opt))
    opt.param_groups[1]["params"].append(opt.param_groups[0]["params"].pop())
    still, moving = last.weight.detach().clone(), model[0].weight.detach().clone()
    for _ in range(3):
        opt.step(closure_for(model, opt))
    assert torch.equal(last.weight, still)
    assert not torch.equal(model[0].weight, moving)


def test_a_parameter_that_leaves_its_group_is_no_longer_trained_and_may_return():
    model = make_model()
    opt = VSGD(model.parameters())
    for _ in range(3):
        opt.step(closure_for(model, opt))
    removed = opt.param_groups[0]["params"].pop()
    still = removed.detach().clone()
    opt.step(closure_for(model, opt))
    opt.zero_grad()
    removed.grad = None
    blocks = list(opt._blocks)
    opt.step(closure_for(model, opt))
    assert list(opt._blocks) == blocks, "blocks are built once, not in each step"
    assert torch.equal(removed, still)
    opt.add_param_group({"params": [removed]})
    removed.grad = None
    opt.step(closure_for(model, opt))
    assert not torch.equal(removed, still)


@pytest.mark.parametrize("failing", ["second block", "end of the step"])
def test_an_update_that_runs_out_of_memory_needs_a_checkpoint(failing, monkeypatch):
    def train(model, opt, steps):
        for _ in range(steps):
            opt.step(closure_for(model, opt))

    model = make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[-1].parameters()}]
    opt = VSGD(groups, algorithm=NETWORKS._replace(probe_interval=1))
    train(model, opt, 5)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train(model, opt, 3)
    expected = copy.deepcopy(model.state_dict())

    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    model.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    train(model, opt, 2)
    with monkeypatch.context() as patch:
        target = list(opt._blocks)[1] if failing == "second block" else opt._blocks
        patch.setattr(target, "apply" if failing == "second block" else "measure_scales", fail)
        with pytest.raises(RuntimeError, match=r"applied in part.*no memory.*last checkpoint"):
            opt.step(closure_for(model, opt))
    for use in (lambda: opt.step(closure_for(model, opt)), opt.state_dict, lambda: copy.deepcopy(opt)):
        with pytest.raises(RuntimeError, match=r"applied in part.*last checkpoint"):
            use()
    model.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    train(model, opt, 3)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)


def test_running_out_of_memory_before_the_update_changes_nothing(monkeypatch):
    model = make_model()
    opt = VSGD(model.parameters())
    for _ in range(5):
        opt.step(closure_for(model, opt))
    before = copy.deepcopy((model.state_dict(), opt.state_dict()))

    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(next(iter(opt._blocks)), "check", fail)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            opt.step(closure_for(model, opt))
    after = copy.deepcopy((model.state_dict(), opt.state_dict()))
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    torch.testing.assert_close(after[1]["state"], before[1]["state"], rtol=0, atol=0)
    opt.step(closure_for(model, opt))
