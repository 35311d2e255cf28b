"""The expected gain of one minibatch: closed forms behind Figures 1 and 2, and a simulation.

The problem is a noisy quadratic of curvature 1, at a distance of 1 from its optimum. Of the n samples in a minibatch,
k ~ Binomial(n, p) are non-zero. Their mean gradient has variance σ²/k. A step of size c along it multiplies the excess
loss by (1 − c)² + c² σ²/k in expectation. The gain is −log of the expectation of this factor over k and the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

from vsgd.algorithms.paper import Paper, rate
from vsgd.core import Moments, Values

EXACT = Paper(epsilon=1e-300)
"""The statistics are exact here, so no denominator needs a larger ε."""

StepSize = Callable[[Values], Values]
"""Returns the step size c for the mean of k non-zero gradients, as a function of k."""


def truth(noise: float) -> Moments:
    """Return the true moments: gradient 1, variance σ², curvature 1."""
    return Moments(grad=1.0, grad_sq=1.0 + noise, curv=1.0, curv_sq=1.0)


def counted(noise: float) -> StepSize:
    """Return the paper's rate, optimal for the number of non-zero samples in the current minibatch (eq. 4)."""
    return lambda k: rate(truth(noise), np.asarray(k, dtype=float), EXACT)


def averaged(noise: float, n: int, presence: float) -> StepSize:
    """Return the rate for np, the average number of non-zero samples, or for 1 if that is larger."""
    usual = max(1.0, n * presence)
    return lambda k: float(rate(truth(noise), usual, EXACT)) * k / usual


def fixed(eta: float, n: int) -> StepSize:
    """Return a fixed rate for the sum over n samples, as in plain SGD."""
    return lambda k: eta * k / n


def gain(n: int, presence: float, noise: float, step: StepSize) -> float:
    """Return −log E[loss after / loss before]."""
    k = np.arange(1, n + 1)
    c = step(k)
    factor = (1 - c) ** 2 + c**2 * noise / k
    probabilities = binom.pmf(k, n, presence)
    return float(-np.log(binom.pmf(0, n, presence) + probabilities @ factor))


def relative_gain(n: int, presence: float, noise: float, step: StepSize) -> float:
    """Return the gain per sample gradient, divided by that of minibatches of one sample."""
    return gain(n, presence, noise, step) / (n * gain(1, presence, noise, counted(noise)))


class Estimate(NamedTuple):
    value: float
    error: float
    """One standard error."""


def simulated_relative_gain(n: int, presence: float, noise: float, repeats: int, rng: np.random.Generator) -> Estimate:
    """Return `relative_gain` with the rate of `counted`, estimated from random samples."""
    there = rng.random((repeats, n)) < presence
    gradients = (1 + np.sqrt(noise) * rng.standard_normal((repeats, n))) * there
    k = there.sum(axis=1)
    mean = gradients.sum(axis=1) / np.maximum(k, 1)
    losses = (1 - counted(noise)(k) * mean) ** 2
    unit = n * gain(1, presence, noise, counted(noise))
    error = losses.std(ddof=1) / np.sqrt(repeats) / losses.mean()
    return Estimate(value=float(-np.log(losses.mean()) / unit), error=float(error / unit))
