"""Functions that all algorithms share: moments, moving averages, signal fraction, memory, outliers.

The functions are plain arithmetic: they call no framework, do not branch on data, and use booleans as 0 or 1. The same
code therefore runs on Python floats, NumPy arrays, torch tensors and JAX tracers. Compiled by numba, it is the scalar
body of a fused loop. There, a float literal would convert float32 to float64, so literals are avoided.

| paper                              | here                | meaning                                             |
|------------------------------------|---------------------|-----------------------------------------------------|
| ∇, (1/n)Σ∇², (1/n)Σh^fd, (1/n)Σh²  | `Moments`           | means over the samples of one minibatch             |
| n − z_i                            | `count`             | number of its samples with a non-zero gradient      |
| ḡ, v̄, h̄^fd, v̄^fd                   | `State.mean`        | exponential moving averages (EMA) of these means    |
| τ                                  | `State.memory`      | memory size: the EMA horizon, in samples            |
| η*                                 | `Info.rate`         | the learning rate of each coordinate                |
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

Values: TypeAlias = Any
"""A number, or an array of NumPy, torch or JAX of any shape. The arguments of a function are broadcast.

This and the following aliases are `Any` to a type checker: no static type covers the arithmetic of all these libraries.
They document shapes.
"""

PerCoordinate: TypeAlias = Any
"""`Values` with the shape of the parameters, or with a shape that is broadcast to it."""

PerTensor: TypeAlias = Any
"""`Values` with one entry per tensor: a number, an array of shape (tensors,), or one broadcast to the coordinates."""

Scalar: TypeAlias = Any
"""One number: a Python number, or an array of shape ()."""

Mask: TypeAlias = Any
"""`Values` that are booleans, 0 or 1."""


class Moments(NamedTuple):
    """Means over the samples of a minibatch, per coordinate. Samples with a zero gradient are left out.

    Attributes:
        grad: mean of the sample gradients ∇.
        grad_sq: mean of their squares ∇², which is not the square of their mean.
        curv: mean of the finite-difference curvatures h^fd.
        curv_sq: mean of their squares.
    """

    grad: PerCoordinate
    grad_sq: PerCoordinate
    curv: PerCoordinate
    curv_sq: PerCoordinate


class State(NamedTuple):
    """Statistics of each coordinate.

    Attributes:
        mean: moving averages of the four moments.
        memory: τ, the EMA horizon in samples.
        seen: number of samples so far. The first ones, the bootstrap, are averaged with equal weights.
    """

    mean: Moments
    memory: PerCoordinate
    seen: PerCoordinate


class Info(NamedTuple):
    """Diagnostics of one update.

    Attributes:
        rate: learning rate η* of each coordinate.
        outlier: whether the minibatch was an outlier in this coordinate.
    """

    rate: PerCoordinate
    outlier: Mask


def zero_state(theta: PerCoordinate, memory: float) -> State:
    """Return the state before the first sample, with the shape of `theta`."""
    zero = abs(theta - theta)
    return State(mean=Moments(zero, zero, zero, zero), memory=zero + memory, seen=zero)


def variance(mean: Values, mean_sq: Values) -> Values:
    """Return E[x²] − E[x]². The absolute value is taken, since rounding can make it negative."""
    return abs(mean_sq - mean * mean)


def signal_fraction(signal: Values, noise: Values) -> Values:
    """Return signal / (signal + noise), the fraction of a squared gradient that is signal."""
    return signal / (signal + noise)


def is_outlier(mean: Moments, batch: Moments, sigmas: float, variance_floor: float) -> Mask:
    """Return whether the gradient or curvature of a minibatch is an outlier (section 5.3); see `is_far`."""
    return is_far(batch.grad, mean.grad, mean.grad_sq, sigmas, variance_floor) | is_far(
        batch.curv, mean.curv, mean.curv_sq, sigmas, variance_floor
    )


def is_far(value: Values, mean: Values, mean_sq: Values, sigmas: float, variance_floor: float) -> Mask:
    """Return whether a value is more than `sigmas` standard deviations from the moving average.

    A variance below `variance_floor` times the mean square is treated as rounding error. Squares are compared, so that
    no square root is needed.
    """
    off = value - mean
    return off * off > sigmas * sigmas * (variance(mean, mean_sq) + variance_floor * mean_sq)


def square_root(x: Values) -> Values:
    """Return √x. JAX and numba compute it in the precision of x."""
    return x**0.5


def larger(a: Values, b: Values) -> Values:
    """Return the larger of two numbers."""
    return a + (b > a) * (b - a)


def add_one(value: Values, condition: Mask) -> Values:
    """Return `value` + 1 where the condition holds, and `value` elsewhere."""
    return value + condition


def select(condition: Mask, value: Values, otherwise: Values) -> Values:
    """Return `value` where the condition holds, and `otherwise` elsewhere. Both must be finite."""
    return condition * value + (condition == 0) * otherwise


def clip(value: Values, limit: Values) -> Values:
    """Return the value, clipped to the range from −limit to limit."""
    return value + (value > limit) * (limit - value) - (value < -limit) * (limit + value)


def ema(mean: Values, value: Values, weight: Values) -> Values:
    """Return the moving average after `value` is added with `weight`."""
    return mean + weight * (value - mean)


def update_moments(mean: Moments, batch: Moments, weight: PerCoordinate) -> Moments:
    """Return the four moving averages after a minibatch is added with `weight`, usually 1/τ."""
    return Moments(
        grad=ema(mean.grad, batch.grad, weight),
        grad_sq=ema(mean.grad_sq, batch.grad_sq, weight),
        curv=ema(mean.curv, batch.curv, weight),
        curv_sq=ema(mean.curv_sq, batch.curv_sq, weight),
    )


def bootstrap_weight(seen: PerCoordinate, count: PerCoordinate, bootstrap: float) -> PerCoordinate:
    """Return the EMA weight with which the first samples are averaged equally; 0 after `bootstrap` samples."""
    total = seen + count
    return count / (total + (total == 0)) * (seen < bootstrap)


def shorten_memory(memory: PerCoordinate, fraction: PerCoordinate, learning: Mask) -> PerCoordinate:
    """Return (1 − ḡ²/v̄) τ where `learning`, else τ. Old statistics count less after a large step.

    `fraction` is ḡ²/v̄. Algorithm 1 then adds 1 to τ.
    """
    return memory - learning * fraction * memory


def memory_below_cap(memory: PerCoordinate, seen: PerCoordinate, min_cap: float) -> Mask:
    """Return whether τ ≤ max(min_cap, √seen). Squares are compared, so that no square root is needed."""
    return memory * memory <= larger(min_cap * min_cap, seen)


def curvature(grad: PerCoordinate, probed_grad: PerCoordinate, delta: PerCoordinate) -> PerCoordinate:
    """Return the finite-difference curvature h^fd = |(∇_θ − ∇_{θ+δ}) / δ| of one sample (eq. 6).

    Args:
        grad: gradient at θ.
        probed_grad: gradient of the same sample at θ + δ.
        delta: the probe δ, as returned by `vsgd.probe`. It must not be zero.

    Returns:
        The curvature of each coordinate.

    >>> curvature(grad=2.0, probed_grad=2.5, delta=0.25)  # the gradient of θ² at 1 and at 1.25
    2.0
    """
    return abs((grad - probed_grad) / delta)


def signed_curvature(grad: PerCoordinate, probed_grad: PerCoordinate, delta: PerCoordinate) -> PerCoordinate:
    """Return (∇_{θ+δ} − ∇_θ) / δ of one sample, which may be negative."""
    return (probed_grad - grad) / delta


def measured_curvature(
    mean: Moments, diff: PerCoordinate, diff_sq: PerCoordinate, delta: PerCoordinate
) -> tuple[PerCoordinate, PerCoordinate]:
    """Return the means of h^fd and of its square over samples.

    Where δ is zero in the precision of the parameter, nothing was measured, and the moving averages are returned.

    Args:
        mean: moving averages.
        diff: mean of ∇_{θ+δ} − ∇_θ, or of its absolute value.
        diff_sq: mean of its square.
        delta: the probe δ.
    """
    vanished = delta == 0
    inverse = (delta != 0) / (delta + vanished)
    return diff * inverse + vanished * mean.curv, diff_sq * inverse * inverse + vanished * mean.curv_sq


def descend(theta: PerCoordinate, step: PerCoordinate, decay: PerCoordinate) -> PerCoordinate:
    """Return (θ − step) / (1 + decay), where decay = ηλ. This implicit form of weight decay is stable for all rates.

    The reciprocal is a number per tensor. Compiled loops compute it once.
    """
    return (theta - step) * ((decay >= 0) / ((decay >= 0) + decay))
