"""Properties of the functions that all algorithms share."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from vsgd import core
from vsgd.algorithms import paper
from vsgd.core import Moments


def test_a_signal_without_noise_is_all_signal():
    assert core.signal_fraction(4.0, 0.0) == 1
    assert core.signal_fraction(1.0, 3.0) == 0.25


def test_variance_is_not_negative_though_rounding_is():
    mean = 0.1 + 0.2
    assert core.variance(mean, mean * mean * (1 - 1e-16)) >= 0
    assert core.variance(1.0, 5.0) == 4


def test_an_outlier_is_more_than_two_standard_deviations_off_in_gradient_or_curvature():
    mean = Moments(grad=1.0, grad_sq=5.0, curv=3.0, curv_sq=10.0)  # standard deviations 2 and 1

    def is_outlier(grad, curv):
        return bool(core.is_outlier(mean, Moments(grad, 0.0, curv, 0.0), 2.0, 1e-6))

    assert not is_outlier(1.0 + 3.9, 3.0 - 1.9)
    assert is_outlier(1.0 + 4.1, 3.0)
    assert is_outlier(1.0 - 4.1, 3.0)
    assert is_outlier(1.0, 3.0 + 2.1)


def test_rounding_is_not_an_outlier():
    """A constant curvature has a variance of zero up to rounding."""
    mean = Moments(grad=0.0, grad_sq=1.0, curv=2.0, curv_sq=4.0)
    for off in (1e-12, -1e-12, 1e-4):
        assert not core.is_outlier(mean, Moments(0.0, 1.0, 2.0 * (1 + off), 4.0), 2.0, 1e-6)
    assert core.is_outlier(mean, Moments(0.0, 1.0, 2.0 * 1.01, 4.0), 2.0, 1e-6)


def test_the_bootstrap_is_a_plain_mean():
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal(n) for n in (1, 4, 3, 2)]
    mean, seen = 0.0, 0
    for samples in batches:
        mean = core.ema(mean, samples.mean(), core.bootstrap_weight(seen, len(samples), 10))
        seen += len(samples)
    assert mean == pytest.approx(np.concatenate(batches).mean())
    assert core.bootstrap_weight(seen, 5, 10) == 0
    assert core.bootstrap_weight(0, 0, 10) == 0


def test_all_four_moments_are_averaged_with_one_weight():
    mean, batch = Moments(0.0, 1.0, 2.0, 3.0), Moments(4.0, 5.0, 6.0, 7.0)
    assert core.update_moments(mean, batch, 0.25) == Moments(1.0, 2.0, 3.0, 4.0)


def test_a_large_step_shortens_the_memory():
    assert core.shorten_memory(8.0, 0.25, True) == 6
    assert core.shorten_memory(8.0, 0.25, False) == 8


def test_the_cap_of_the_memory_grows_with_the_root_of_time():
    assert core.memory_below_cap(10.0, 0.0, 10.0)
    assert not core.memory_below_cap(10.1, 0.0, 10.0)
    assert core.memory_below_cap(100.0, 10_000.0, 10.0)
    assert not core.memory_below_cap(100.1, 10_000.0, 10.0)


def test_curvature_of_a_parabola():
    for delta in (0.3, -0.3):
        assert core.curvature(2 * 1.0, 2 * (1.0 + delta), delta) == pytest.approx(2)


def test_weight_decay_never_overshoots():
    assert core.descend(3.0, 1.0, 0.0) == 2
    assert core.descend(3.0, 0.0, 1e9) == pytest.approx(0, abs=1e-8)
    assert core.descend(3.0, 0.0, 1e9) > 0


def test_the_first_state_is_shaped_like_the_parameters():
    theta = np.array([[1.0, np.inf, -2.0]], np.float32)[:, ::2]
    state = core.zero_state(theta, 2.0)
    assert state.memory.tolist() == [[2, 2]]
    for array in (*state.mean, state.seen):
        assert array.dtype == np.float32
        assert array.tolist() == [[0, 0]]


@pytest.mark.parametrize("module", [core, paper])
def test_examples_of_docstrings_run(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
