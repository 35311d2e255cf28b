"""The gradient noise scale B = tr Σ / |G|²: the number of samples whose mean gradient is as much signal as noise."""

from __future__ import annotations

import math
from typing import NamedTuple

from vsgd.core import Array, ema, variance

HORIZON = 20
"""Steps over which the noise is averaged."""

CERTAIN = 2.0
"""The signal is known if it is this many standard errors above zero."""


class Noise(NamedTuple):
    """Moving averages over steps. Products of gradients are averaged, not gradients, which turn from step to step."""

    variance: Array = 0.0
    """tr Σ of a single sample."""
    signal: Array = 0.0
    """|G|²"""
    signal_sq: Array = 0.0
    """Of its square: what a step says of the signal is uncertain."""
    steps: int = 0


def observe(noise: Noise, total_variance: Array, signal: Array) -> Noise:
    """Take in what one step says."""
    weight = 1 / min(noise.steps + 1, HORIZON)
    return Noise(
        variance=ema(noise.variance, total_variance, weight),
        signal=ema(noise.signal, signal, weight),
        signal_sq=ema(noise.signal_sq, signal * signal, weight),
        steps=noise.steps + 1,
    )


class StepNoise(NamedTuple):
    """What the samples of one step say, without bias."""

    variance: Array
    """tr Σ of a sample."""
    signal: Array
    """|G|²"""
    samples: float
    """How many samples there were."""


def of_samples(mean_of_squares: Array, square_of_mean: Array, count: float) -> StepNoise:
    """From Σ_i of the mean of squared gradients of samples, and of their squared mean."""
    total = (mean_of_squares - square_of_mean) * (count / (count - 1))
    return StepNoise(total, square_of_mean - total / count, count)


def is_known(noise: Noise) -> bool:
    """Is the signal certainly above zero?"""
    error_sq = variance(noise.signal, noise.signal_sq) / (2 * min(noise.steps, HORIZON) - 1)
    return bool(noise.signal > 0) and bool(noise.signal * noise.signal > CERTAIN * CERTAIN * error_sq)


def noise_scale(noise: Noise) -> float:
    """B = tr Σ / |G|²; infinite while the signal cannot be told from zero."""
    return float(noise.variance / noise.signal) if noise.signal > 0 else math.inf
