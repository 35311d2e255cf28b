"""The vocabulary that all algorithms share: moments, moving averages, signal fraction, memory, outliers.

The text is plain arithmetic: no framework call, no branch on data, a boolean counts as 0 or 1. The same lines therefore
run on Python floats, NumPy arrays, torch tensors, JAX tracers and, compiled by numba, as the scalar body of a fused
loop. Literals are avoided where they would turn float32 into float64 there.

| paper                              | here                | what it is                                          |
|------------------------------------|---------------------|-----------------------------------------------------|
| ∇, (1/n)Σ∇², (1/n)Σh^fd, (1/n)Σh²  | `Moments`           | means over the samples of one minibatch             |
| n − z_i                            | `count`             | its samples with a non-zero gradient, 0 if none     |
| ḡ, v̄, h̄^fd, v̄^fd                   | `State.mean`        | the same four as exponential moving averages (EMA)  |
| τ                                  | `State.memory`      | memory size: the EMA horizon, in samples            |
| η*                                 | `Info.rate`         | the learning rate of each coordinate                |
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""A float, or an array of any library: one entry per coordinate."""


class Moments(NamedTuple):
    """Four means per coordinate over the samples of a minibatch; zeros of a sparse gradient are left out."""

    grad: Array
    grad_sq: Array
    """Mean of the squared sample gradients, not the square of their mean."""
    curv: Array
    curv_sq: Array


class State(NamedTuple):
    """What an algorithm remembers of each coordinate."""

    mean: Moments
    memory: Array
    seen: Array
    """Samples so far. The first ones, the bootstrap, are averaged plainly before anything moves."""


class Info(NamedTuple):
    """What one update did, for diagnostics."""

    rate: Array
    outlier: Array


def zero_state(theta: Array, memory: Array) -> State:
    """The state before the first sample, shaped like `theta`."""
    zero = abs(theta - theta)
    return State(mean=Moments(zero, zero, zero, zero), memory=zero + memory, seen=zero)


def variance(mean: Array, mean_sq: Array) -> Array:
    """E[x²] − E[x]², kept from becoming negative by rounding."""
    return abs(mean_sq - mean * mean)


def signal_fraction(signal: Array, noise: Array) -> Array:
    """How much of a squared gradient is signal, between 0 and 1."""
    return signal / (signal + noise)


def is_outlier(mean: Moments, batch: Moments, sigmas: Array, variance_floor: Array) -> Array:
    """Is the minibatch more than `sigmas` standard deviations off, in gradient or in curvature (section 5.3)?

    Squares are compared instead of roots. A variance below `variance_floor` times the mean square is rounding.
    """
    grad_off = batch.grad - mean.grad
    grad_var = variance(mean.grad, mean.grad_sq) + variance_floor * mean.grad_sq
    curv_off = batch.curv - mean.curv
    curv_var = variance(mean.curv, mean.curv_sq) + variance_floor * mean.curv_sq
    return (grad_off * grad_off > sigmas * sigmas * grad_var) | (curv_off * curv_off > sigmas * sigmas * curv_var)


def square_root(x: Array) -> Array:
    """√x. Compiled code takes it in the precision of x, which the literal would widen."""
    return x**0.5


def larger(a: Array, b: Array) -> Array:
    """The larger of two numbers."""
    return a + (b > a) * (b - a)


def select(condition: Array, value: Array, otherwise: Array) -> Array:
    """Return `value` where the condition holds, elsewhere `otherwise`; both must be finite."""
    return condition * value + (condition == 0) * otherwise


def clip(value: Array, limit: Array) -> Array:
    """The value, or ± limit if it is further from zero."""
    return value + (value > limit) * (limit - value) - (value < -limit) * (limit + value)


def ema(mean: Array, value: Array, weight: Array) -> Array:
    """The moving average after `value` has entered it with `weight`."""
    return mean + weight * (value - mean)


def update_moments(mean: Moments, batch: Moments, weight: Array) -> Moments:
    """Moving averages: the minibatch enters all four with `weight` = 1/τ."""
    return Moments(
        grad=ema(mean.grad, batch.grad, weight),
        grad_sq=ema(mean.grad_sq, batch.grad_sq, weight),
        curv=ema(mean.curv, batch.curv, weight),
        curv_sq=ema(mean.curv_sq, batch.curv_sq, weight),
    )


def bootstrap_weight(seen: Array, count: Array, bootstrap: Array) -> Array:
    """The weight that makes a plain mean of the first samples; 0 once there are enough of them."""
    total = seen + count
    return count / (total + (total == 0)) * (seen < bootstrap)


def shorten_memory(memory: Array, fraction: Array, learning: Array) -> Array:
    """τ ← (1 − ḡ²/v̄) τ where `learning`: after a large step the past is worth less. The paper then adds 1."""
    return memory - learning * fraction * memory


def within_cap(memory: Array, seen: Array, least_cap: Array) -> Array:
    """Is τ ≤ max(least_cap, √seen)? Squares are compared instead of roots."""
    square = memory * memory
    return (square <= least_cap * least_cap) | (square <= seen)


def curvature(grad: Array, probed_grad: Array, delta: Array) -> Array:
    """h^fd = |(∇_θ − ∇_{θ+δ}) / δ| of one sample (eq. 6)."""
    return abs((grad - probed_grad) / delta)


def signed_curvature(grad: Array, probed_grad: Array, delta: Array) -> Array:
    """(∇_{θ+δ} − ∇_θ) / δ of one sample, which may be negative."""
    return (probed_grad - grad) / delta


def measured_curvature(mean: Moments, diff: Array, diff_sq: Array, delta: Array) -> tuple[Array, Array]:
    """Mean h^fd and its mean square over samples, from the mean of ∇_{θ+δ} − ∇_θ, or of its size, and of its square.

    Where δ vanished in the precision of the parameter nothing was measured, and the averages so far stand in.
    """
    vanished = delta == 0
    inverse = (delta != 0) / (delta + vanished)
    return diff * inverse + vanished * mean.curv, diff_sq * inverse * inverse + vanished * mean.curv_sq


def descend(theta: Array, step: Array, decay: Array) -> Array:
    """θ ← (θ − step) / (1 + decay), where decay = ηλ is weight decay in implicit form: no rate makes it overshoot."""
    return (theta - step) / ((decay >= 0) + decay)
