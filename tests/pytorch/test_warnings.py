"""Warnings point at the line of the user's code that caused them."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vsgd.torch import VSGD

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def loss_of(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(X), Y)


def small_lr(model):
    VSGD(model.parameters(), lr=1e-3)


def small_lr_in_a_group(model):
    opt = VSGD(model.parameters())
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1e-3})


def small_lr_in_all_steps(model):
    opt = VSGD(model.parameters())
    for _ in range(21):
        opt.param_groups[0]["lr"] = 1e-3
        opt.minimize(lambda: loss_of(model))


def deprecated_arguments(model):
    VSGD(model.parameters(), samples="replicas")


def tiny_gradient(model):
    VSGD(model.parameters()).minimize(lambda: 1e-18 * loss_of(model))


def tiny_gradient_in_a_step(model):
    opt = VSGD(model.parameters())

    def closure():
        opt.zero_grad()
        loss = 1e-18 * loss_of(model)
        loss.backward()
        return loss

    opt.step(closure)


def equal_micro_batches(model):
    VSGD(model.parameters()).minimize([lambda: loss_of(model), lambda: loss_of(model)])


def closure_that_does_not_repeat(model):
    opt, generator = VSGD(model.parameters()), torch.Generator().manual_seed(0)
    opt.minimize(lambda: loss_of(model))
    opt.param_groups[0]["steps"] = 2000
    opt.minimize(lambda: F.cross_entropy(model(X + torch.randn(X.shape, generator=generator)), Y))


MISTAKES = (
    small_lr,
    small_lr_in_a_group,
    small_lr_in_all_steps,
    deprecated_arguments,
    tiny_gradient,
    tiny_gradient_in_a_step,
    equal_micro_batches,
    closure_that_does_not_repeat,
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_warning_points_at_the_users_line(mistake):
    with pytest.warns() as caught:
        mistake(nn.Linear(6, 3))
    lines, first = inspect.getsourcelines(mistake)
    (warning,) = caught
    assert warning.filename == __file__
    assert "opt." in lines[warning.lineno - first] or "VSGD(" in lines[warning.lineno - first]
