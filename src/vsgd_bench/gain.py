"""What one minibatch is worth: closed forms behind Figures 1 and 2, and the same by simulation.

A noisy quadratic of curvature 1 is one away from its optimum. Of the n samples in a minibatch k are non-zero,
k ~ Binomial(n, p), and their mean gradient has variance σ²/k. A step of c on it multiplies the excess loss by
(1 − c)² + c² σ²/k in expectation. The gain is −log of the *expected* factor, over both k and the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom

from vsgd.algorithms.paper import Paper, rate
from vsgd.core import Moments

EXACT = Paper(epsilon=1e-300)
"""Here the statistics are known, so no denominator needs a larger ε."""

StepSize = Callable[[Any], Any]
"""The step c on the mean of the k non-zero gradients, as a function of k."""


def truth(noise: float) -> Moments:
    """The moments that an estimate would converge to: gradient 1, variance σ², curvature 1."""
    return Moments(grad=1.0, grad_sq=1.0 + noise, curv=1.0, curv_sq=1.0)


def counted(noise: float) -> StepSize:
    """The paper's way: the optimal rate for the number of non-zero samples in this very minibatch (eq. 4)."""
    return lambda k: rate(truth(noise), np.asarray(k, dtype=float), EXACT)


def averaged(noise: float, n: int, presence: float) -> StepSize:
    """The rate for the long-term average number of non-zero samples, np, or 1 where that is less."""
    usual = max(1.0, n * presence)
    return lambda k: float(rate(truth(noise), usual, EXACT)) * k / usual


def fixed(eta: float, n: int) -> StepSize:
    """A fixed rate on the sum over n, as in plain SGD."""
    return lambda k: eta * k / n


def gain(n: int, presence: float, noise: float, step: StepSize) -> float:
    """−log E[loss after / loss before]."""
    k = np.arange(1, n + 1)
    c = step(k)
    factor = (1 - c) ** 2 + c**2 * noise / k
    probabilities = binom.pmf(k, n, presence)
    return float(-np.log(binom.pmf(0, n, presence) + probabilities @ factor))


def relative_gain(n: int, presence: float, noise: float, step: StepSize) -> float:
    """The gain per sample gradient, compared to that of minibatches of one."""
    return gain(n, presence, noise, step) / (n * gain(1, presence, noise, counted(noise)))


class Estimate(NamedTuple):
    value: float
    error: float
    """One standard error."""


def simulated_relative_gain(n: int, presence: float, noise: float, repeats: int, rng: np.random.Generator) -> Estimate:
    """`relative_gain` of the counted rate, by drawing the samples."""
    there = rng.random((repeats, n)) < presence
    gradients = (1 + np.sqrt(noise) * rng.standard_normal((repeats, n))) * there
    k = there.sum(axis=1)
    mean = gradients.sum(axis=1) / np.maximum(k, 1)
    losses = (1 - counted(noise)(k) * mean) ** 2
    unit = n * gain(1, presence, noise, counted(noise))
    error = losses.std(ddof=1) / np.sqrt(repeats) / losses.mean()
    return Estimate(value=float(-np.log(losses.mean()) / unit), error=float(error / unit))
