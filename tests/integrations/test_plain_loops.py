"""Loops without a framework: the short form, scalers, and gradients from outside the closure."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vsgd.torch import VSGD


def problem(count=20):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(count, 8, 6)
    return model, list(zip(x, (x.sum(2) > 0).long(), strict=True))


def closure_of(model, opt, x, y, backward=torch.Tensor.backward):
    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        backward(loss)
        return loss

    return closure


def loss_of(model, x, y):
    return lambda: F.cross_entropy(model(x), y)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_short_form_is_a_step(micro_batches):
    model, batches = problem()
    twin = copy.deepcopy(model)
    opt, other = VSGD(model.parameters()), VSGD(twin.parameters())
    for k in range(0, len(batches), micro_batches):
        chunk = batches[k : k + micro_batches]
        loss = opt.minimize([loss_of(model, *batch) for batch in chunk])
        assert torch.equal(loss, other.step([closure_of(twin, other, *batch) for batch in chunk]))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert not loss.requires_grad
    assert opt.minimize(loss_of(model, *batches[0])) < 0.7


def test_the_short_form_scales_the_loss():
    model, batches = problem()
    twin = copy.deepcopy(model)
    opt, other = VSGD(model.parameters()), VSGD(twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in batches:
        opt.minimize(loss_of(model, *batch), scaler=scaler)
        scaler.update()
        other.minimize(loss_of(twin, *batch))
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, r"^VSGD may need a second gradient.*\n\n    opt\.minimize\(lambda: "),
        (lambda: None, "it must end with"),
        (lambda: torch.ones(3), "mean or sum"),
    ],
)
def test_the_short_form_wants_a_loss(wrong, message):
    model, _ = problem()
    with pytest.raises((TypeError, ValueError), match=message):
        VSGD(model.parameters()).minimize(wrong)


def test_the_usual_recipe_of_a_scaler_is_refused_with_the_lines_to_write():
    model, batches = problem()
    opt = VSGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    lines = r"opt\.step\(closure, scaler=scaler\)"
    scaler.scale(F.cross_entropy(model(batches[0][0]), batches[0][1])).backward()
    with pytest.raises(TypeError, match=lines):
        scaler.step(opt)
    scaler = torch.amp.GradScaler("cpu")

    def backward(loss):
        scaler.scale(loss).backward()
        scaler.unscale_(opt)

    with pytest.raises(RuntimeError, match=lines):
        opt.step(closure_of(model, opt, *batches[0], backward), scaler=scaler)


class TestGradientsFromOutside:
    def test_are_an_error_that_names_what_to_do(self):
        model, batches = problem()
        opt = VSGD(model.parameters())
        opt.minimize(loss_of(model, *batches[0]))
        opt.zero_grad()
        loss_of(model, *batches[1])().backward()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=r"opt\.step\(\[closure, closure"):
            opt.minimize(loss_of(model, *batches[2]))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        opt.zero_grad()
        opt.minimize(loss_of(model, *batches[2]))

    def test_that_a_step_has_left_are_none(self):
        model, batches = problem()
        opt = VSGD(model.parameters())
        for batch in batches:
            opt.minimize(loss_of(model, *batch))  # these gradients are not cleared
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # as zero_grad(set_to_none=False) of another optimizer
        opt.minimize(loss_of(model, *batches[0]))

    def test_of_a_step_that_failed_are_none(self):
        model, batches = problem()
        opt = VSGD(model.parameters())
        opt.minimize(loss_of(model, *batches[0]))

        def failing():
            loss_of(model, *batches[1])().backward()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            opt.step(failing)
        opt.minimize(loss_of(model, *batches[1]))

    def test_of_a_network_that_competes_are_none(self):
        one, batches = problem()
        two = copy.deepcopy(one)
        first, second = VSGD(one.parameters()), VSGD(two.parameters())
        for x, y in batches:
            first.minimize(lambda x=x, y=y: F.cross_entropy(one(x) + two(x), y))
            second.minimize(lambda x=x, y=y: F.cross_entropy(one(x) - two(x), y))


def test_autocast_around_the_loop_is_not_mistaken_for_a_scaler():
    model, _ = problem()
    opt = VSGD(model.parameters())

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def train():
        opt.step()

    with pytest.raises(TypeError, match="computes the loss") as raised:
        train()
    assert "GradScaler" not in str(raised.value)


def test_lazy_modules_train_after_their_first_call():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Dropout(0.1), nn.LazyLinear(2))
    opt = VSGD(model.parameters())
    x = torch.randn(64, 6)
    y = (x[:, 0] > 0).long()
    with pytest.raises(RuntimeError, match=r"6 of 6 parameters have no shape yet.*call the model once.*model\(x\)"):
        opt.minimize(lambda: F.cross_entropy(model(x), y))
    assert all(map(nn.parameter.is_lazy, model.parameters())), "the closure has not run"
    model(x)
    losses = [opt.minimize(lambda: F.cross_entropy(model(x), y)).item() for _ in range(40)]
    assert losses[-1] < 0.3 < losses[0]
