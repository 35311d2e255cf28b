"""The default for networks: the paper's update, and the points in which the default differs from it, in order.

1. The probe moves all coordinates of a tensor by the same distance, a fraction of the tensor's RMS: `probe_size`.
2. The memory τ has a cap: `core.within_cap`.
3. Second moments are inflated at the end of the bootstrap (the slow start of the 2012 paper): `inflate_second_moments`.
4. Curvature is shrunk towards the mean of the tensor: `curvature_shrinkage`.
5. A second gradient is taken in some steps only: `probe_due` and `is_long`.
6. The weights to evaluate are an average of the iterates: `averaging_weight`.
7. The bootstrap takes three minibatches instead of ten samples: `Networks.bootstrap`.

No constant has the unit of the loss. `docs/algorithm.md` explains each point.
"""

from __future__ import annotations

from typing import NamedTuple

from vsgd.algorithms.base import checked
from vsgd.core import (
    Array,
    Info,
    Moments,
    bootstrap_weight,
    descend,
    ema,
    is_outlier,
    shorten_memory,
    signal_fraction,
    update_moments,
    variance,
    within_cap,
    zero_state,
)
from vsgd.core import State as CoreState


@checked(memory=1, min_memory_cap=1, probe_interval=1, variance_inflation=1, probe_scale=1e-6)
class Networks(NamedTuple):
    """The constants of the default for networks. None is meant to be tuned per problem.

    Attributes:
        epsilon: keeps denominators from vanishing; far below any squared gradient or curvature in float32.
        bootstrap: how many samples make the first averages before anything moves.
        memory: τ at the end of the bootstrap.
        outlier_sigmas: a minibatch this many standard deviations off is an outlier; so is a gradient this many times
            as long as usual.
        variance_floor: a variance below this fraction of the mean square is rounding.
        probe_scale: |δ| as a fraction of the RMS of its tensor.
        min_rms: a tensor closer to zero than this is probed as if its RMS were this.
        min_memory_cap: τ grows no further than the larger of this and √(samples seen).
        variance_inflation: v̄ and v̄^fd are multiplied by this at the end of the bootstrap.
        shrinkage: weight with which the mean curvature of a tensor enters that of each of its coordinates.
        probe_interval: a second gradient is taken in every so many steps, and where the first is unusually long.
        average_iterates: whether the weights to evaluate are a moving average of the iterates.
    """

    epsilon: float = 1e-36
    bootstrap: float = 3.0
    memory: float = 2.0
    outlier_sigmas: float = 2.0
    variance_floor: float = 1e-6
    probe_scale: float = 0.03
    min_rms: float = 1e-3
    min_memory_cap: float = 10.0
    variance_inflation: float = 10.0
    shrinkage: float = 1e-3
    probe_interval: float = 4.0
    average_iterates: bool = True


NETWORKS = Networks()
"""The default of `vsgd.torch`."""


class TensorCurvature(NamedTuple):
    """What the mean curvature of a tensor, h̄^fd and v̄^fd, adds to that of each of its coordinates."""

    curv: Array
    curv_sq: Array


class State(NamedTuple):
    """`core.State`, and the average of the iterates."""

    inner: CoreState
    average: Array


def init(theta: Array, config: Networks = NETWORKS) -> State:
    """The state before the first sample, shaped like `theta`."""
    return State(inner=zero_state(theta, config.memory), average=theta)


# --- the probe ----------------------------------------------------------------------------------------------------

MULTIPLIER = 0x2545F4914F6CDD1D
"""Odd, with bits well spread: multiplying by it mixes those of a number."""


def probe_size(rms: Array, config: Networks = NETWORKS) -> Array:
    """|δ| for all coordinates of a tensor: a fraction of the root mean square of its values.

    If one coordinate moved less than the others, what they change of its gradient, divided by its own small offset,
    would be taken for curvature.
    """
    return config.probe_scale * ((rms >= config.min_rms) * rms + (rms < config.min_rms) * config.min_rms)


def random_bit(index: Array, seed: Array) -> Array:
    """0 or 1, from two whole numbers of 64 bits alone."""
    mixed = (index ^ seed) * MULTIPLIER
    mixed = (mixed ^ (mixed >> 32)) * MULTIPLIER
    return (mixed >> 40) & 1


def probe(size: Array, positive: Array) -> Array:
    """δ = ± size. With random signs, what the other coordinates change of a gradient averages out over time.

    A row of an embedding table is seen too seldom for that, so its coordinates move against their gradients.
    """
    return (positive == 1) * size - (positive == 0) * size


def probe_due(step: int, config: Networks = NETWORKS) -> bool:
    """Is a second gradient due at this step, whatever the first one looks like?"""
    return step % config.probe_interval == 0


def is_long(norm_sq: Array, expected_norm_sq: Array, config: Networks = NETWORKS) -> Array:
    """Is the gradient of a tensor as long as that of an outlier, ‖∇‖² > 4 Σv̄? Its curvature is unusual then, too."""
    return norm_sq > config.outlier_sigmas * config.outlier_sigmas * expected_norm_sq


# --- the rate -----------------------------------------------------------------------------------------------------


def noise(mean: Moments, config: Networks) -> Array:
    """σ², the variance of the gradient of one sample; never zero."""
    return variance(mean.grad, mean.grad_sq) + config.epsilon


def curvature_shrinkage(
    mean_curv: Array, mean_curv_sq: Array, grad_rms: Array, size: Array, config: Networks = NETWORKS
) -> TensorCurvature:
    """What the curvature of a coordinate is shrunk towards, given the means over its tensor.

    Where no coordinate has seen any, |ḡ|/|δ| stands in, so that a step is no longer than the probe.
    """
    unseen = (mean_curv == 0) * (grad_rms / size)
    return TensorCurvature(config.shrinkage * (mean_curv + unseen), config.shrinkage * (mean_curv_sq + unseen * unseen))


def rate(mean: Moments, count: Array, config: Networks, tensor: TensorCurvature) -> Array:
    """η*, the optimal rate for the mean gradient over `count` samples (eq. 3), with the curvature of section 5.2."""
    fraction = signal_fraction(count * (mean.grad * mean.grad), noise(mean, config))
    return fraction * (mean.curv + tensor.curv) / (mean.curv_sq + tensor.curv_sq + config.epsilon)


def inflate_second_moments(mean: Moments, ended: Array, config: Networks) -> Moments:
    """Trust the averages less where the bootstrap has just `ended`."""
    return Moments(
        grad=mean.grad,
        grad_sq=mean.grad_sq + ended * (config.variance_inflation * mean.grad_sq - mean.grad_sq),
        curv=mean.curv,
        curv_sq=mean.curv_sq + ended * (config.variance_inflation * mean.curv_sq - mean.curv_sq),
    )


# --- the update ---------------------------------------------------------------------------------------------------


def learn(
    state: CoreState, batch: Moments, count: Array, config: Networks, tensor: TensorCurvature
) -> tuple[CoreState, Info]:
    """The statistics after a minibatch, and the rates that follow from them. Where `count` is 0 nothing changes."""
    learning = (count > 0) & (state.seen >= config.bootstrap)
    outlier = learning & is_outlier(state.mean, batch, config.outlier_sigmas, config.variance_floor)
    seen = state.seen + count
    memory = state.memory + (outlier & within_cap(state.memory + outlier, seen, config.min_memory_cap))
    mean = update_moments(state.mean, batch, learning / memory + bootstrap_weight(state.seen, count, config.bootstrap))
    mean = inflate_second_moments(mean, (state.seen < config.bootstrap) & (seen >= config.bootstrap), config)
    eta = learning * rate(mean, count, config, tensor)
    memory = shorten_memory(memory, signal_fraction(mean.grad * mean.grad, noise(mean, config)), learning)
    memory = memory + (learning & within_cap(memory + learning, seen, config.min_memory_cap))
    return CoreState(mean, memory, seen), Info(rate=eta, outlier=outlier)


def averaging_weight(seen: Array, count: Array, config: Networks = NETWORKS) -> Array:
    """1/√t, the weight with which the t-th iterate enters the average, if t of them had `count` samples each."""
    earlier = (seen > config.bootstrap) * (seen - config.bootstrap)
    return (count / (earlier + count + (count == 0))) ** 0.5


def update(
    theta: Array, state: State, batch: Moments, count: Array, config: Networks, tensor: TensorCurvature
) -> tuple[Array, State, Info]:
    """One step: learn from the minibatch, descend, average the iterates."""
    inner, info = learn(state.inner, batch, count, config, tensor)
    theta = descend(theta, info.rate * batch.grad, 0 * count)
    average = ema(state.average, theta, averaging_weight(state.inner.seen, count, config))
    return theta, State(inner, average), info


def evaluation_point(theta: Array, state: State) -> Array:
    """The average of the iterates."""
    return state.average
