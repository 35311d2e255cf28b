"""The minibatch with the largest expected gain per second."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from vsgd.torch import VSGD, BatchSizer, noise
from vsgd.torch.noise import (
    Noise,
    best_size,
    doublings,
    fitted_time,
    gain_per_second,
    next_size,
    noise_scale,
    of_samples,
)


@pytest.mark.parametrize(("scale", "fixed", "each"), [(10, 1, 0.01), (1000, 0.2, 0.3), (3, 5, 0.1), (math.inf, 1, 1)])
def test_best_size_is_the_smallest_that_has_nearly_the_largest_gain_per_second(scale, fixed, each):
    sizes = doublings(8, 3000)
    assert sizes == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3000]
    best = best_size(sizes, scale, fixed, each)
    gains = [gain_per_second(n, scale, fixed, each) for n in sizes]
    assert gain_per_second(best, scale, fixed, each) >= 0.8 * max(gains)
    assert all(gain < 0.8 * max(gains) for n, gain in zip(sizes, gains, strict=True) if n < best)


def test_noise_scale_of_gradients_that_are_known():
    random = torch.Generator().manual_seed(0)
    mean, sigma = torch.full((50,), 0.3), 2.0
    found = []
    for _ in range(4000):
        grads = mean + sigma * torch.randn(4, 50, generator=random)
        found.append(of_samples(float(grads.square().mean(0).sum()), float(grads.mean(0).square().sum()), 4))
    variance, signal, _ = torch.tensor(found).mean(0).tolist()
    assert variance == pytest.approx(50 * sigma**2, rel=0.03)
    assert signal == pytest.approx(float(mean @ mean), rel=0.05)
    assert noise_scale(Noise(6.0, 2.0)) == 3.0
    assert noise_scale(Noise(6.0, -0.1)) == math.inf


def test_time_of_a_step_is_a_line():
    assert fitted_time({8: 0.5 + 8 * 0.1, 32: 0.5 + 32 * 0.1, 64: 0.5 + 64 * 0.1}) == pytest.approx((0.5, 0.1))
    assert fitted_time({8: 0.2}) == pytest.approx((0.2, 0.0))
    fixed, each = fitted_time({8: 0.1, 16: 0.4})  # more than proportional
    assert fixed == pytest.approx(0)
    assert each > 0


def test_size_changes_by_one_doubling_at_a_time():
    assert next_size(32, 1000, 8, 512) == 64
    assert next_size(32, 40, 8, 512) == 32
    assert next_size(32, 0.0, 8, 512) == 16
    assert next_size(8, 0.0, 8, 512) == 8
    assert next_size(512, 512, 8, 512) == 512
    assert next_size(1024, 2000, 8, 2000) == 1024
    assert next_size(1024, 2048, 8, 2000) == 2000


@pytest.mark.parametrize(("sigma", "grows"), [(30.0, True), (0.001, False)])
def test_minibatches_grow_with_the_noise(monkeypatch, sigma, grows):
    """By a clock that only the closure moves."""
    now = [0.0]
    monkeypatch.setattr(noise, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    torch.manual_seed(0)
    data = TensorDataset(1 + sigma * torch.randn(20_000, 30), torch.arange(20_000))
    theta = torch.nn.Parameter(torch.zeros(30))
    opt = VSGD([theta])
    sizer = BatchSizer(data, opt, start=64, largest=256)

    def loss(x):
        now[0] += 5e-4 + 5e-6 * len(x)
        return (theta - x).square().mean(0).sum()

    sizes, drawn = [], set()
    for (x, rows), _ in zip(DataLoader(data, batch_sampler=sizer), range(130), strict=False):
        opt.minimize([partial(loss, half) for half in x.chunk(2)])
        sizes.append(len(x))
        drawn |= set(rows.tolist())
    assert len(drawn) == sum(sizes)  # no row is drawn twice in a pass
    assert sizes[-1] > 64 if grows else sizes[-1] < 64
    assert set(sizer.seconds()) <= set(sizes)


def test_a_step_without_a_minibatch_of_its_own_is_told():
    theta = torch.nn.Parameter(torch.ones(3))
    opt = VSGD([theta])
    BatchSizer(range(100), opt)
    with pytest.raises(RuntimeError, match="use each of them for one step"):
        opt.minimize(lambda: theta.square().sum())


def test_bounds():
    opt = VSGD([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="smallest is 200"):
        BatchSizer(range(100), opt, smallest=200)
    with pytest.raises(ValueError, match="empty"):
        BatchSizer([], opt)


def halves(model, x, factor=1.0):
    return [partial(lambda part: (model(part) * factor).square().mean(), half) for half in x.chunk(2)]


def test_a_pass_of_one_step_leaves_the_size_as_it_is():
    model = torch.nn.Linear(4, 1)
    opt = VSGD(model.parameters())
    sizer = BatchSizer(range(40), opt, largest=40, start=32)
    for _ in range(25):
        for _ in sizer:
            opt.minimize(halves(model, torch.randn(32, 4)))
    assert sizer.size == 32


def test_a_skipped_step_says_nothing_of_the_noise():
    """Neither the first after a state was loaded, nor a later one, which would count what an earlier one has said."""
    model, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
    opt = VSGD(model.parameters())
    opt.minimize(halves(model, x))
    resumed = VSGD(model.parameters())
    resumed.load_state_dict(opt.state_dict())
    sizer = BatchSizer(range(100), resumed)
    minibatches = iter(sizer)
    for factor, told in ((math.nan, False), (1.0, True), (math.nan, False)):
        before = sizer.noise
        next(minibatches)
        resumed.minimize(halves(model, x, factor))
        assert (sizer.noise != before) == told
