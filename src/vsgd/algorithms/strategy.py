"""Run an algorithm on whole tensors: what `vsgd.torch` and `vsgd.optax` share, and one `Strategy` per algorithm.

A front end asks the strategy of an algorithm what to probe and when, how to learn, and what the coordinates of a tensor
share. It has no branches on the algorithm itself. The functions are plain arithmetic, as `vsgd.core` explains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vsgd.algorithms import networks, paper
from vsgd.algorithms.networks import Momentum, Networks, TensorContext
from vsgd.algorithms.paper import Paper
from vsgd.core import (
    Info,
    Mask,
    Moments,
    PerCoordinate,
    PerTensor,
    Scalar,
    State,
    Values,
    clip,
    larger,
    select,
    square_root,
)

Config = Paper | Networks

MIN_PROBE = 1e-5
"""Smallest usual probe. Differences of gradients are divided by the probe and then squared."""

UNLIMITED = 1e18
"""Used where there is no limit. 1 / UNLIMITED is the smallest probe. The squares of both fit into float32."""

MIN_SIZE = 1e-30
"""Stands for the size of a probe before the first one."""

MIN_NORM = 1e-30
"""Stands for the norm of a gradient that is zero."""

MIN_RMS_SHARE = 0.1
"""Weight decay assumes that the RMS of a tensor is at least this fraction of its length scale."""

ROUNDING = 1e-5
"""A gradient whose norm is below this fraction of the largest is rounding, as that of a bias before BatchNorm."""


class Totals(NamedTuple):
    """Numbers per tensor: sums over its coordinates, and lengths."""

    grad_sq: PerTensor
    """Σ v̄"""
    signal: PerTensor
    """Σ ḡ²"""
    curv: PerTensor
    """Σ |h̄^fd|"""
    curv_sq: PerTensor
    """Σ v̄^fd"""
    probe_size: PerTensor
    """RMS of the last probe δ."""
    scale: PerTensor
    """Length scale: the largest RMS that the tensor has had."""
    rms: PerTensor
    """RMS of the weights at the last probe."""
    momentum: PerTensor
    """`Momentum.coefficient`"""
    agreement: PerTensor
    """`Momentum.agreement`, the only number here that may be negative."""


class Sums(NamedTuple):
    """Sums over the coordinates of a tensor that one update takes. The first four become `Totals`."""

    grad_sq: PerTensor
    """Σ v̄"""
    signal: PerTensor
    """Σ ḡ²"""
    curv: PerTensor
    """Σ |h̄^fd|"""
    curv_sq: PerTensor
    """Σ v̄^fd"""
    outliers: PerTensor
    """Number of outliers."""
    step_sq: PerTensor
    """Squared norm of the step."""
    batch_sq: PerTensor
    """Squared norm of the gradient of the minibatch."""
    products: PerTensor = 0.0
    """∇·(θ − θ̄) before the step."""
    penalty: PerTensor = 0.0
    """½ Σ |h̄^fd| (θ − θ̄)² before the step."""


class Rates(NamedTuple):
    """Settings of a parameter group that scale its learning rates."""

    lr: float
    """Factor on all rates."""
    horizon: float
    """Number of steps that rates are optimal for."""
    weight_decay: float = 0.0
    """λ of AdamW; 0 leaves weight decay to the estimate."""
    momentum_obstacle: float = 0.0
    """See `networks.momentum_obstacle`."""


Learn = Callable[..., tuple[State, Info]]
"""(state, batch, count, config, tensor, measured) → new statistics, rates and outliers. Steps follow by `limited_step`.

`measured` is whether the minibatch has curvatures; see `networks.learn`.
"""

limited_step = networks.limited_step


class Strategy(NamedTuple):
    """How one algorithm runs on whole tensors. Every function takes the constants of the algorithm as `config`."""

    learn_decoupled: Learn
    """In coordinates in which the covariance of the gradient is nearly diagonal."""
    learn_coupled: Learn
    """In all others."""
    rate: Callable[..., PerCoordinate]
    """(state, count, config, tensor, decoupled) → learning rate of each coordinate, from the statistics so far."""
    context: Callable[..., TensorContext]
    """(totals, length, config, horizon) → quantities that the coordinates of a tensor share."""
    probe: Callable[..., PerCoordinate]
    """(state, grad, count, size, positive, config) → offset δ; `positive` is 1 or 0, for the sign of ± size."""
    uses_signs: bool
    """Whether `probe` uses `size` and `positive`."""
    probe_due: Callable[..., Mask]
    """(starting, unprobed, long, config) → whether a second gradient is due."""
    is_long: Callable[..., Mask]
    """(norm_sq, totals, count, config) → whether the gradient of a tensor is unusually long."""
    probe_size: Callable[..., PerTensor]
    """(scale, config) → |δ|."""
    length_scale: Callable[..., PerTensor]
    """(before, mean_sq, overall, least, config) → new length scale; see `length_scale`."""
    averaging_weight: Callable[..., Values]
    """(seen, window, config) → weight with which a new iterate enters the average."""
    row_averaging_weight: Callable[..., PerCoordinate]
    """(seen, count, config) → the same for a row of an embedding table."""
    decay_has_begun: Callable[..., bool]
    """(steps, steps_per_epoch, config) → whether weights decay by the estimate; see `decay_has_begun`."""
    momentum: Callable[..., Momentum]
    """(before, product, obstacle, config) → momentum of a tensor; see `networks.momentum`."""
    averages_iterates: Callable[[Any], bool]
    """(config) → whether the weights to evaluate are an average of the iterates."""
    rotates: Callable[[Any], bool]
    """(config) → whether tensors are rotated into an eigenbasis."""
    coarse_curvature: bool
    """Whether bfloat16 suffices for curvatures."""
    first_window: Callable[[Any], float]
    """(config) → window of the average before the first step."""
    max_window: Callable[..., float]
    """(steps, config) → the longest window that training can have reached."""

    def learn(self, decoupled: bool) -> Learn:
        return self.learn_decoupled if decoupled else self.learn_coupled


# --- networks -----------------------------------------------------------------------------------------------------


def learn_decoupled(
    state: State, batch: Moments, count: PerCoordinate, config: Networks, tensor: TensorContext, measured: bool = True
) -> tuple[State, Info]:
    return networks.learn(state, batch, count, config, tensor, True, measured)


def learn_coupled(
    state: State, batch: Moments, count: PerCoordinate, config: Networks, tensor: TensorContext, measured: bool = True
) -> tuple[State, Info]:
    return networks.learn(state, unsigned(batch), count, config, tensor, False, measured)


def unsigned(batch: Moments) -> Moments:
    """Return moments with the absolute value of the curvature."""
    return Moments(batch.grad, batch.grad_sq, abs(batch.curv), batch.curv_sq)


def network_rate(
    state: State, count: PerCoordinate, config: Networks, tensor: TensorContext, decoupled: bool
) -> PerCoordinate:
    return networks.rate(state.mean, state.memory, count, config, tensor, decoupled)


def network_context(totals: Totals, length: PerTensor, config: Networks, horizon: Scalar) -> TensorContext:
    """Return what the `length` coordinates of a tensor share."""
    signal_rms, grad_rms = square_root(totals.signal / length), square_root(totals.grad_sq / length)
    size = larger(totals.probe_size, MIN_SIZE)
    return networks.context(totals.curv / length, totals.curv_sq / length, signal_rms, grad_rms, size, config, horizon)


def network_probe(
    state: State, grad: PerCoordinate, count: PerCoordinate, size: PerTensor, positive: Mask, config: Networks
) -> PerCoordinate:
    return networks.probe(size, positive)


def network_probe_due(starting: Mask, unprobed: Scalar, long: Mask, config: Networks) -> Mask:
    """Return whether a second gradient is due: at the start of averages, or by `networks.probe_due`."""
    return starting | networks.probe_due(unprobed, long, config)


def network_is_long(norm_sq: PerTensor, totals: Totals, count: PerCoordinate, config: Networks) -> Mask:
    return networks.is_long(norm_sq, expected_norm_sq(totals, count), config)


def network_probe_size(scale: PerTensor, config: Networks) -> PerTensor:
    """Return |δ|, never so small that its square vanishes."""
    return larger(networks.probe_size(scale, config), 1 / UNLIMITED)


def network_length_scale(
    before: PerTensor, mean_sq: PerTensor, overall: Scalar, least: Scalar, config: Networks
) -> PerTensor:
    """Return the length scale of a tensor: the largest RMS so far, of the tensor or of all parameters together.

    Args:
        before: length scale so far.
        mean_sq: mean square of the tensor.
        overall: mean square of all parameters together.
        least: RMS to assume where all parameters are zero.
        config: constants of the algorithm.
    """
    rms = square_root(select(overall > mean_sq, overall, mean_sq))
    return networks.length_scale(before, select(overall > 0, rms, least), config)


def network_max_window(steps: int, config: Networks) -> float:
    return config.min_window + (1 + config.window_share) * steps


NETWORK_STRATEGY = Strategy(
    learn_decoupled=learn_decoupled,
    learn_coupled=learn_coupled,
    rate=network_rate,
    context=network_context,
    probe=network_probe,
    uses_signs=True,
    probe_due=network_probe_due,
    is_long=network_is_long,
    probe_size=network_probe_size,
    length_scale=network_length_scale,
    averaging_weight=networks.averaging_weight,
    row_averaging_weight=networks.row_averaging_weight,
    decay_has_begun=lambda steps, steps_per_epoch, config: decay_has_begun(steps, steps_per_epoch, config),
    momentum=networks.momentum,
    averages_iterates=lambda config: bool(config.average_iterates),
    rotates=lambda config: bool(config.eigenbasis),
    coarse_curvature=True,
    first_window=lambda config: float(config.min_window),
    max_window=network_max_window,
)


# --- the paper ----------------------------------------------------------------------------------------------------


def learn_paper(
    state: State, batch: Moments, count: PerCoordinate, config: Paper, tensor: TensorContext, measured: bool = True
) -> tuple[State, Info]:
    """Return the result of `paper.learn`. The published algorithm measures curvatures in every step."""
    return paper.learn(state, unsigned(batch), count, config)


def paper_context(totals: Totals, length: PerTensor, config: Paper, horizon: Scalar) -> TensorContext:
    """Return a context in which coordinates share nothing, have no limit, and look one step ahead."""
    zero = 0 * totals.scale
    return TensorContext(zero, zero, grad_clip=zero + UNLIMITED, step_limit=zero + UNLIMITED, horizon=zero + 1)


def paper_probe(
    state: State, grad: PerCoordinate, count: PerCoordinate, size: PerTensor, positive: Mask, config: Paper
) -> PerCoordinate:
    return paper.probe(state, grad, count, config)


PAPER_STRATEGY = Strategy(
    learn_decoupled=learn_paper,
    learn_coupled=learn_paper,
    rate=lambda state, count, config, tensor, decoupled: paper.rate(state.mean, count, config),
    context=paper_context,
    probe=paper_probe,
    uses_signs=False,
    probe_due=lambda starting, unprobed, long, config: starting | (unprobed >= 0),  # at every step
    is_long=lambda norm_sq, totals, count, config: norm_sq < 0,
    probe_size=lambda scale, config: scale,
    length_scale=lambda before, mean_sq, overall, least, config: before,
    averaging_weight=lambda seen, window, config: seen >= 0,  # the weights to evaluate are the iterates
    row_averaging_weight=lambda seen, count, config: seen >= 0,
    decay_has_begun=lambda steps, steps_per_epoch, config: steps < 0,  # the published algorithm has no decay
    momentum=lambda before, product, obstacle, config: before,
    averages_iterates=lambda config: False,
    rotates=lambda config: False,
    coarse_curvature=False,
    first_window=lambda config: 1.0,
    max_window=lambda steps, config: float("inf"),
)

STRATEGIES: dict[type, Strategy] = {Networks: NETWORK_STRATEGY, Paper: PAPER_STRATEGY}


def strategy_of(config: Config) -> Strategy:
    """Return how the algorithm with these constants runs on whole tensors."""
    return STRATEGIES[type(config)]


# --- numbers per tensor -------------------------------------------------------------------------------------------


def expected_norm_sq(totals: Totals, count: PerTensor) -> PerTensor:
    """Return E‖∇‖² of the mean gradient over `count` samples."""
    return (totals.grad_sq + (count - 1) * totals.signal) / (count + (count < 1) * (1 - count))


def gradient_limit(largest: float) -> float:
    """Return the limit of gradients and of their squares. `largest` is the largest number of the precision."""
    return largest * MIN_PROBE**2


def weight_decay(strength: PerTensor, step_norm_sq: PerTensor, length: PerTensor) -> PerTensor:
    """Return the decay d of a tensor in θ ← (θ − step) / (1 + d): `strength` times the RMS of its step.

    AdamW shrinks weights by `strength` times its learning rate, which is about the RMS of its steps, so a `strength`
    chosen for AdamW has the same effect here. The RMS does not depend on the basis.

    Args:
        strength: weight decay as in AdamW.
        step_norm_sq: squared norm of the tensor's step.
        length: number of its coordinates.
    """
    return strength * square_root(step_norm_sq / length)


def estimated_decay(
    totals: Totals, length: PerTensor, samples: Scalar, step_norm_sq: PerTensor, grad_norm_sq: PerTensor
) -> PerTensor:
    """Return the decay d of a tensor in θ ← (θ − step) / (1 + d): λ times the tensor's rate, RMS(step) / RMS(∇).

    Decay moves a tensor no further than its step does. Without this limit, flat tensors with high rates would vanish.

    Args:
        totals: of the tensor.
        length: number of its coordinates.
        samples: number of samples in the data; 0 if it is unknown, and then the decay is 0.
        step_norm_sq: squared norm of the tensor's step.
        grad_norm_sq: squared norm of its gradient.
    """
    step_rms, grad_rms = square_root(step_norm_sq / length), square_root(grad_norm_sq / length)
    rate = step_rms / (grad_rms + (grad_rms == 0))
    limit = step_rms / (totals.rms + (totals.rms == 0))
    return clip(rate * strength_of_decay(totals, length, samples), limit)


def decay_of(totals: Totals, sums: Sums, length: PerTensor, samples: PerTensor, rates: Rates) -> PerTensor:
    """Return the decay d of a tensor: by the strength that the user has set, or estimated if `samples` is not 0."""
    estimate = estimated_decay(totals, length, samples, sums.step_sq, sums.batch_sq)
    return weight_decay(rates.weight_decay, sums.step_sq, length) + estimate


def decay_has_begun(steps: Scalar, steps_per_epoch: Scalar, config: Networks) -> Mask:
    """Return whether weights decay after `steps` steps.

    In the first epoch every gradient comes from new data, so nothing is over-fitted. Inflated variances of the
    bootstrap are forgotten after a few times the memory.
    """
    return (steps >= steps_per_epoch) & (steps >= 3 * config.min_memory_cap)


def strength_of_decay(totals: Totals, length: PerTensor, samples: Scalar) -> PerTensor:
    """Return λ of a tensor by `networks.decay_strength`; see `estimated_decay` for the arguments."""
    noise = larger(totals.grad_sq - totals.signal, 0 * totals.signal) / length
    # weights that have shrunk to nothing would otherwise be held there by an ever stronger decay
    rms = larger(totals.rms, MIN_RMS_SHARE * totals.scale)
    return networks.decay_strength(noise, totals.curv / length, rms, samples)


def distance_to_zero_loss(loss: Scalar, grad_norm_sq: PerTensor, length: PerTensor) -> PerTensor:
    """Return the step per coordinate along the gradient that would bring a linear loss to zero.

    It is the length scale of parameters that are all zero.
    """
    slope = square_root(grad_norm_sq * length)
    return abs(loss) / select(slope > MIN_NORM, slope, MIN_NORM)


def probe_seed(step: Scalar, index: int) -> Scalar:
    """Return the 63-bit seed of the probe signs of parameter `index` at step `step`."""
    return (step * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9) & ((1 << 63) - 1)
