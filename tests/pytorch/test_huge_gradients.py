"""Second gradients too large to be squared, windows of other lengths, and nested steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vsgd import Networks
from vsgd.torch import VSGD, is_probing


@pytest.mark.parametrize("size", [1e16, 1e18, 1e22, 1e27, 1e30, float("inf")])
def test_a_huge_second_gradient_skips_the_step(size):
    theta = nn.Parameter(torch.ones(4))
    opt = VSGD([theta])
    for _ in range(8):
        opt.minimize(lambda: theta.square().sum())

    def closure():
        factor = size if is_probing() else 1.0
        return (theta.square().sum() * 0.5) * factor

    for _ in range(12):
        before = theta.detach().clone()
        skipped = opt.param_groups[0]["skipped"]
        opt.minimize(closure)
        assert theta.isfinite().all()
        if opt.param_groups[0]["skipped"] > skipped:
            assert torch.equal(theta.detach(), before)
            break


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_state_with_a_short_window_loads(steps):
    model = nn.Linear(2, 1)
    opt = VSGD(model.parameters(), algorithm=Networks(min_window=2.0))
    for _ in range(steps):
        opt.minimize(lambda: model(torch.ones(3, 2)).square().mean())
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["averaging"][0] <= 3


def test_a_step_of_another_optimizer_within_a_closure_keeps_is_probing():
    inner, outer = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opts = {name: VSGD([p]) for name, p in (("inner", inner), ("outer", outer))}
    found = []

    def closure():
        before = is_probing()
        opts["inner"].minimize(lambda: inner.square().sum())
        found.append((before, is_probing()))
        return outer.square().sum()

    opts["outer"].minimize(closure)
    assert (True, True) in found
    assert all(before == after for before, after in found)
