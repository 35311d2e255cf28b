"""Algorithm 1 of Schaul & LeCun (2013), once, for every array library.

The text is plain arithmetic: no framework call, no branch on data, a boolean counts as 0 or 1. The same
lines therefore run on Python floats, NumPy arrays, torch tensors, JAX tracers and, compiled by numba, as the
scalar body of a fused loop. Literals are avoided where they would turn float32 into float64 there.

| paper                              | here                                | what it is                              |
|------------------------------------|-------------------------------------|-----------------------------------------|
| ∇, (1/n)Σ∇², (1/n)Σh^fd, (1/n)Σh²  | `Moments`                           | averages over one minibatch             |
| n − z_i                            | `count`                             | its samples that are not zero, 0 if none|
| ḡ, v̄, h̄^fd, v̄^fd                   | `State.mean`                        | the same four as moving averages        |
| τ                                  | `State.memory`                      | samples that the averages reach back    |
| η*                                 | `Info.rate`                         | the learning rate of each coordinate    |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vsgd.options import PAPER, Options

Array = Any
"""A float, or an array of any library: one entry a coordinate."""


class Moments(NamedTuple):
    """Four averages per coordinate over the samples of a minibatch, zeros of a sparse gradient left out."""

    grad: Array
    grad_sq: Array
    """Mean of the squared sample gradients; not the square of their mean."""
    curv: Array
    curv_sq: Array


class Neighbours(NamedTuple):
    """Curvature, and its square, that are mixed into those of a coordinate: its neighbours', with a small weight."""

    curv: Array
    curv_sq: Array


class State(NamedTuple):
    """All that the method remembers."""

    mean: Moments
    memory: Array
    seen: Array
    """Samples so far. The first `Options.bootstrap` of them are averaged plainly, before any update."""


class Info(NamedTuple):
    """What one step did, for whoever wants to look."""

    rate: Array
    outlier: Array


def init(theta: Array, options: Options = PAPER) -> State:
    """The state before the first sample, shaped like `theta`."""
    zero = abs(theta - theta)
    return State(
        mean=Moments(grad=zero, grad_sq=zero, curv=zero, curv_sq=zero),
        memory=zero + options.memory,
        seen=zero,
    )


def variance(mean: Array, mean_sq: Array) -> Array:
    """E[x²] − E[x]², kept from going negative by rounding."""
    return abs(mean_sq - mean * mean)


def is_outlier(mean: Moments, batch: Moments, options: Options) -> Array:
    """Is the minibatch more than two standard deviations off, in gradient or in curvature?

    Squares are compared instead of roots. A variance too small to be told from rounding is no evidence.
    """
    sigmas_sq = options.outlier_sigmas * options.outlier_sigmas
    grad_off = batch.grad - mean.grad
    grad_var = variance(mean.grad, mean.grad_sq) + options.resolution * mean.grad_sq
    curv_off = batch.curv - mean.curv
    curv_var = variance(mean.curv, mean.curv_sq) + options.resolution * mean.curv_sq
    return (grad_off * grad_off > sigmas_sq * grad_var) | (curv_off * curv_off > sigmas_sq * curv_var)


def average(mean: Moments, batch: Moments, weight: Array) -> Moments:
    """Moving averages: the minibatch enters with `weight` = 1/τ."""
    return Moments(
        grad=mean.grad + weight * (batch.grad - mean.grad),
        grad_sq=mean.grad_sq + weight * (batch.grad_sq - mean.grad_sq),
        curv=mean.curv + weight * (batch.curv - mean.curv),
        curv_sq=mean.curv_sq + weight * (batch.curv_sq - mean.curv_sq),
    )


def noise(mean: Moments, options: Options) -> Array:
    """σ², the variance of the gradient of one sample; never zero."""
    return variance(mean.grad, mean.grad_sq) + options.epsilon


def share(signal: Array, noise: Array) -> Array:
    """How much of a gradient is signal, between 0 and 1."""
    return signal / (signal + noise)


def rate(mean: Moments, count: Array, options: Options = PAPER, neighbours: Neighbours | None = None) -> Array:
    """η*, the optimal rate for the mean gradient over `count` samples (eq. 1, 3 and 4, and section 5.2).

    With σ² = v̄ − ḡ² the share of signal, n ḡ² / (n ḡ² + σ²), is n ḡ² / (v̄ + (n−1) ḡ²) as printed. The factor
    n/(n−z) of eq. 4 is in the gradient already, which averages over the non-zero samples only. Where a coordinate
    shows (almost) no curvature of its own, that of its `neighbours` decides; they come with normalized curvature only.
    """
    reliable = share(count * (mean.grad * mean.grad), noise(mean, options))
    if neighbours is not None and options.neighbours > 0:
        return reliable * (mean.curv + neighbours.curv) / (mean.curv_sq + neighbours.curv_sq + options.epsilon)
    if options.normalize_curvature:
        return reliable * (mean.curv + options.epsilon) / (mean.curv_sq + options.epsilon)
    return reliable / (abs(mean.curv) + options.epsilon)


def within_limit(memory: Array, seen: Array, options: Options) -> Array:
    """May τ be this long? Squares are compared instead of roots."""
    square = memory * memory
    return (square <= options.memory_limit * options.memory_limit) | (square <= seen) | (options.memory_limit == 0)


def remember(memory: Array, mean: Moments, learning: Array, seen: Array, options: Options = PAPER) -> Array:
    """τ ← (1 − ḡ²/v̄) τ + 1 where `learning`: a large step makes the past worth less.

    The 1 is left out where τ would grow beyond a limit, if there is one.
    """
    shorter = memory - learning * share(mean.grad * mean.grad, noise(mean, options)) * memory
    return shorter + (learning & within_limit(shorter + learning, seen, options))


def bootstrap_weight(state: State, count: Array, options: Options) -> Array:
    """The weight that makes a plain mean of the first samples; 0 once there are enough."""
    total = state.seen + count
    return count / (total + (total == 0)) * (state.seen < options.bootstrap)


def distrust(mean: Moments, ended: Array, options: Options) -> Moments:
    """The averages, less trusted where the bootstrap has just `ended`."""
    return Moments(
        grad=mean.grad,
        grad_sq=mean.grad_sq + ended * (options.slow_start * mean.grad_sq - mean.grad_sq),
        curv=mean.curv,
        curv_sq=mean.curv_sq + ended * (options.slow_start * mean.curv_sq - mean.curv_sq),
    )


def averaging_weight(seen: Array, count: Array, options: Options) -> Array:
    """1/√t, the weight of the t-th iterate in a moving average of them, if t of them had `count` samples each.

    At first it is 1. The average reaches back ever further, but less and less of the whole way.
    """
    earlier = (seen > options.bootstrap) * (seen - options.bootstrap)
    return (count / (earlier + count + (count == 0))) ** 0.5


def follow(average: Array, theta: Array, weight: Array) -> Array:
    """The average of the iterates after the newest."""
    return average + weight * (theta - average)


def step(
    theta: Array,
    state: State,
    batch: Moments,
    count: Array,
    options: Options = PAPER,
    shared: Callable[[Moments], Moments] | None = None,
    neighbours: Neighbours | None = None,
) -> tuple[Array, State, Info]:
    """One pass through the loop of Algorithm 1.

    Args:
        theta: θ, the parameters.
        state: what `init` or the last step returned.
        batch: this minibatch's moments; the curvature taken at the shift that `vsgd.probe.shift` names.
        count: its number of samples n, or n − z_i per coordinate. Where it is 0 nothing changes.
        options: `PAPER` unless told.
        shared: lets coordinates of a block share their statistics (see `vsgd.blocks`); None: each has its own.
        neighbours: curvature that is mixed in (see `rate`).
    """
    learning = (count > 0) & (state.seen >= options.bootstrap)
    outlier = learning & options.detect_outliers & is_outlier(state.mean, batch, options)
    seen = state.seen + count
    memory = state.memory + (outlier & within_limit(state.memory + outlier, seen, options))

    mean = average(state.mean, batch, learning / memory + bootstrap_weight(state, count, options))
    if options.slow_start != 1:
        mean = distrust(mean, (state.seen < options.bootstrap) & (seen >= options.bootstrap), options)
    basis = mean if shared is None else shared(mean)
    eta = learning * rate(basis, count, options, neighbours)
    memory = remember(memory, basis, learning, seen, options)
    theta = theta - eta * batch.grad

    return theta, State(mean=mean, memory=memory, seen=seen), Info(rate=eta, outlier=outlier)
