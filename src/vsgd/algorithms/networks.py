"""The default for networks: the paper's update, and the points in which the default differs from it, in order.

1. The probe moves all coordinates of a tensor by the same distance, a fraction of its length scale: `probe_size`.
2. A second gradient is computed in about one of ten steps: `probe_due`, `is_long`.
3. The memory τ has a cap: `core.memory_below_cap`.
4. Second moments are inflated at the end of the bootstrap (the slow start of the 2012 paper): `inflate_second_moments`.
5. In decoupled coordinates, curvature is the mean of signed differences plus the standard error of that mean. In other
   coordinates, it is the paper's. Both are shrunk towards the mean of the tensor: `rate`.
6. Gradients are clipped at three times their root mean square, and steps at three times the size of the probe:
   `limited_step`.
7. The weights to evaluate are a moving average of the iterates. Its window grows while that lowers the loss:
   `averaging`.
8. The bootstrap takes three minibatches instead of ten samples: `Networks.bootstrap`.
9. Rates are optimal for a horizon of several steps, over which noise averages out. The horizon grows while the loss is
   expected to decrease by more than the noise of the iterates costs: `progress`.
10. Momentum along the drift of the iterates is switched on while gradients agree with it and the loss does not rise:
    `momentum`.
11. If the number of steps per epoch is known, weight decay is estimated from gradient noise, curvature and weights:
    `decay_strength`.

Coordinates are decoupled if the covariance of the gradient is (nearly) diagonal in them, as in the eigenbasis that
`vsgd.eigenbasis` finds. The algorithm receives a flag only. No constant has the unit of the loss.
`docs/algorithm.md` explains each point.
"""

from __future__ import annotations

from typing import NamedTuple

from vsgd.algorithms.base import checked
from vsgd.core import (
    Info,
    Mask,
    Moments,
    PerCoordinate,
    PerTensor,
    Scalar,
    Values,
    add_one,
    bootstrap_weight,
    clip,
    ema,
    is_far,
    larger,
    memory_below_cap,
    shorten_memory,
    signal_fraction,
    square_root,
    update_moments,
    variance,
)
from vsgd.core import State as CoreState


@checked(
    memory=1,
    min_memory_cap=1,
    probe_interval=1,
    variance_inflation=1,
    probe_scale=1e-6,
    min_window=1,
    max_horizon=1,
)
class Networks(NamedTuple):
    """The constants of the default for networks. None is meant to be tuned per problem.

    Attributes:
        epsilon: keeps denominators from vanishing; far below any squared gradient or curvature in float32.
        bootstrap: number of samples that are averaged before the first update.
        memory: τ at the end of the bootstrap.
        outlier_sigmas: a minibatch is an outlier if it is this many standard deviations from the average. A gradient is
            long if its norm is this many times the expected one.
        variance_floor: a variance below this fraction of the mean square is treated as rounding error.
        probe_scale: |δ| as a fraction of the length scale of its tensor.
        min_rms: the length scale where all parameters are zero.
        probe_interval: number of steps from one second gradient to the next; half of it if the first gradient is long.
        min_memory_cap: τ is at most the larger of this and √(samples seen).
        variance_inflation: v̄ and v̄^fd are multiplied by this at the end of the bootstrap.
        shrinkage: weight with which the mean curvature of a tensor enters that of each of its coordinates.
        grad_clip: gradients are clipped at this many times their root mean square so far.
        step_limit: maximum step of a coordinate, in units of the probe |δ|.
        min_window: minimum window of the average of the iterates, in steps.
        window_share: minimum window as a fraction of all steps.
        average_iterates: whether the weights to evaluate are a moving average of the iterates.
        eigenbasis: whether coordinates are decoupled where that is cheap.
        max_horizon: maximum horizon of the rates, in steps.
        max_momentum: the largest momentum coefficient β; 0 switches momentum off.
    """

    epsilon: float = 1e-36
    bootstrap: float = 3.0
    memory: float = 2.0
    outlier_sigmas: float = 2.0
    variance_floor: float = 1e-6
    probe_scale: float = 0.03
    min_rms: float = 1e-3
    probe_interval: float = 10.0
    min_memory_cap: float = 10.0
    variance_inflation: float = 10.0
    shrinkage: float = 1e-3
    grad_clip: float = 3.0
    step_limit: float = 3.0
    min_window: float = 5.0
    window_share: float = 0.05
    average_iterates: bool = True
    eigenbasis: bool = True
    max_horizon: float = 16.0
    max_momentum: float = 0.9


NETWORKS = Networks()
"""The default of `vsgd.torch`."""


class TensorContext(NamedTuple):
    """Per-tensor quantities used in the update of each coordinate."""

    curv: PerTensor
    """Added to the curvature of each coordinate: a small part of the tensor's mean. `curv_sq` is added to v̄^fd."""
    curv_sq: PerTensor
    grad_clip: PerTensor
    step_limit: PerTensor
    horizon: PerTensor
    """Number of steps over which gradient noise averages out. The variance is divided by it."""


class Averaging(NamedTuple):
    """How far back the average of the iterates reaches, and whether that has paid off."""

    window: Scalar
    """In steps: a new iterate enters with weight 1/window."""
    advantage: Scalar
    """Moving average of f(θ) − f(θ̄): how much higher the loss is at the newest iterate than at the average."""


class Progress(NamedTuple):
    """How fast the loss falls, and the horizon that rates are optimal for meanwhile."""

    recent: Scalar
    """The loss of minibatches, averaged over about the last tenth of all steps."""
    earlier: Scalar
    """The same over about the last quarter."""
    horizon: Scalar
    spread: Scalar
    """Mean distance of a loss from `earlier`."""


class Momentum(NamedTuple):
    """The momentum of a tensor."""

    coefficient: PerTensor
    """β, between 0 and `Networks.max_momentum`."""
    agreement: PerTensor
    """Moving average of ∇·(θ − θ̄); negative while −∇ points along the drift of the iterates."""


AGREEMENT_STEPS = 40.0
"""Number of steps that `Momentum.agreement` averages over."""

MOMENTUM_GROWTH, MOMENTUM_FALL = 0.01, 0.1
"""Growth and fall of β per step. It falls faster, so that it stays near 0 if gradients agree only now and then."""

LOSS_RISE = 0.3
"""The loss rises if its recent average exceeds the earlier one by this many times the usual distance of a loss."""

EXPECTED_DECREASE = 3.0
"""Expected decrease of the loss in the steps to come, as a multiple of the recent one; see `progress`."""

LOSS_OUTLIER = 10.0
"""A loss enters the averages of `Progress` at a distance of at most this many times the usual one."""


# --- the probe ----------------------------------------------------------------------------------------------------

MULTIPLIER = 0x2545F4914F6CDD1D
"""An odd number with well spread bits. Multiplication by it mixes the bits of the other factor."""


def length_scale(before: PerTensor, rms: PerTensor, config: Networks = NETWORKS) -> PerTensor:
    """Return the largest RMS that a tensor has had. If it fell, a tensor whose optimum is zero would stop learning."""
    return larger(larger(before, abs(rms)), (before == 0) * (rms == 0) * config.min_rms)


def probe_size(scale: PerTensor, config: Networks = NETWORKS) -> PerTensor:
    """Return |δ| for all coordinates of a tensor.

    Suppose one coordinate moved less than the others. They change its gradient, too. Divided by its small offset, this
    change would look like a large curvature.
    """
    return config.probe_scale * scale


def random_bit(index: PerCoordinate, seed: Scalar) -> Mask:
    """Return 0 or 1, computed from two whole numbers of 64 bits."""
    mixed = (index ^ seed) * MULTIPLIER
    mixed = (mixed ^ (mixed >> 32)) * MULTIPLIER
    return (mixed >> 40) & 1


def probe(size: PerTensor, positive: Mask) -> PerCoordinate:
    """Return δ = ± size. With random signs, the effects of other coordinates on a gradient average out over time.

    A row of an embedding table is seen too seldom for that, so its coordinates move against their gradients.
    """
    return (positive == 1) * size - (positive == 0) * size


def probe_due(unprobed: Scalar, long: Mask, config: Networks = NETWORKS) -> Mask:
    """Return whether a second gradient is due after `unprobed` steps without one, or half as many if `long`."""
    return (unprobed + 1) * (1 + long) >= config.probe_interval


def is_long(norm_sq: PerTensor, expected_norm_sq: PerTensor, config: Networks = NETWORKS) -> Mask:
    """Return whether ‖∇‖² > 4 Σv̄: the gradient is an outlier, so its curvature is probably unusual, too."""
    return norm_sq > config.outlier_sigmas * config.outlier_sigmas * expected_norm_sq


# --- the rate -----------------------------------------------------------------------------------------------------

MIN_CURVATURE = 1e-30
"""Minimum curvature, relative to that at which a step is as long as the probe. It keeps steps finite."""


def noise(mean: Moments, config: Networks) -> PerCoordinate:
    """Return σ², the variance of the gradient of one sample. It is never zero."""
    return variance(mean.grad, mean.grad_sq) + config.epsilon


def context(
    mean_curv: PerTensor,
    mean_curv_sq: PerTensor,
    signal_rms: PerTensor,
    grad_rms: PerTensor,
    size: PerTensor,
    config: Networks = NETWORKS,
    horizon: PerTensor = 1.0,
) -> TensorContext:
    """Return the context of a tensor from its means of |h̄^fd| and v̄^fd, and from the RMS of ḡ and of gradients.

    Where no coordinate has seen any curvature, |ḡ|/|δ| stands in, so that a step is no longer than the probe.
    """
    unseen = (mean_curv == 0) * (signal_rms / size) + MIN_CURVATURE * (grad_rms / size)
    return TensorContext(
        curv=config.shrinkage * mean_curv + unseen,
        curv_sq=config.shrinkage * mean_curv_sq + unseen * unseen,
        grad_clip=config.grad_clip + 0 * size,
        step_limit=config.step_limit * size,
        horizon=horizon + 0 * size,
    )


def rate(
    mean: Moments, memory: PerCoordinate, count: PerCoordinate, config: Networks, tensor: TensorContext, decoupled: bool
) -> PerCoordinate:
    """Return η*, the optimal rate for the mean gradient over `count` samples (eq. 3) and the steps of the horizon.

    In decoupled coordinates, effects of other coordinates on a gradient average out of h̄^fd, but not of v̄^fd. The
    curvature is then |h̄^fd| plus the standard error of that mean. Elsewhere it is v̄^fd / h̄^fd (section 5.2).
    """
    fraction = signal_fraction(mean.grad * mean.grad, noise(mean, config))
    return rate_from(fraction, (count > 0) / memory, mean, count, config, tensor, decoupled)


def rate_from(
    fraction: PerCoordinate,
    inverse_memory: PerCoordinate,
    mean: Moments,
    count: PerCoordinate,
    config: Networks,
    tensor: TensorContext,
    decoupled: bool,
) -> PerCoordinate:
    """Return `rate` from the signal fraction f of one sample and from 1/τ, which the update needs elsewhere too.

    The signal fraction of n samples is n f / (1 + (n − 1) f). Its denominator is at least 1, so it can be multiplied by
    that of the curvature without underflow, and one division is enough.
    """
    samples = tensor.horizon * count
    denominator = (count > 0) + (samples * fraction - fraction)
    if decoupled:
        error = square_root(variance(mean.curv, mean.curv_sq) * (inverse_memory / count))
        return samples * fraction / (denominator * (abs(mean.curv) + error + tensor.curv + config.epsilon))
    return (
        samples
        * fraction
        * (mean.curv + tensor.curv)
        / (denominator * (mean.curv_sq + tensor.curv_sq + config.epsilon))
    )


def limited_step(
    rate: PerCoordinate, grad: PerCoordinate, grad_sq: PerCoordinate, tensor: TensorContext
) -> PerCoordinate:
    """Return η∇, with a limit for ∇ of some times its usual size (v̄ before this minibatch), and one for the step.

    A rare huge gradient comes with a curvature that no probe has seen, and so does a point far beyond the last probe.
    """
    return clip(rate * clip(grad, tensor.grad_clip * square_root(grad_sq)), tensor.step_limit)


def inflate_second_moments(mean: Moments, ended: Mask, config: Networks) -> Moments:
    """Multiply the second moments by `variance_inflation` where the bootstrap has just `ended`."""
    return Moments(
        grad=mean.grad,
        grad_sq=mean.grad_sq + ended * (config.variance_inflation * mean.grad_sq - mean.grad_sq),
        curv=mean.curv,
        curv_sq=mean.curv_sq + ended * (config.variance_inflation * mean.curv_sq - mean.curv_sq),
    )


# --- the update ---------------------------------------------------------------------------------------------------


def learn(
    state: CoreState,
    batch: Moments,
    count: PerCoordinate,
    config: Networks,
    tensor: TensorContext,
    decoupled: bool,
    measured: bool = True,
) -> tuple[CoreState, Info]:
    """Return the statistics after a minibatch, and the rates computed from them.

    Args:
        state: the statistics so far.
        batch: moments of the minibatch.
        count: number of its samples; 0 changes nothing.
        config: the constants.
        tensor: what the coordinates of the tensor share.
        decoupled: whether the covariance of the gradient is nearly diagonal in these coordinates.
        measured: whether the minibatch has curvatures. Otherwise those of `batch` are the moving averages, which stay.
    """
    learning = (count > 0) & (state.seen >= config.bootstrap)
    before, limits = state.mean, (config.outlier_sigmas, config.variance_floor)
    outlier = learning & is_far(batch.grad, before.grad, before.grad_sq, *limits)
    if measured:
        outlier = outlier | (learning & is_far(batch.curv, before.curv, before.curv_sq, *limits))
    seen = state.seen + count
    grows = outlier & memory_below_cap(add_one(state.memory, outlier), seen, config.min_memory_cap)
    memory = add_one(state.memory, grows)
    inverse_memory = (count >= 0) / memory
    weight = learning * inverse_memory + bootstrap_weight(state.seen, count, config.bootstrap)
    mean = update_moments(before, batch, weight)
    if not measured:
        mean = Moments(mean.grad, mean.grad_sq, before.curv, before.curv_sq)
    mean = inflate_second_moments(mean, (state.seen < config.bootstrap) & (seen >= config.bootstrap), config)
    fraction = signal_fraction(mean.grad * mean.grad, noise(mean, config))
    eta = learning * rate_from(fraction, inverse_memory, mean, count + (count == 0), config, tensor, decoupled)
    memory = shorten_memory(memory, fraction, learning)
    grows = learning & memory_below_cap(add_one(memory, learning), seen, config.min_memory_cap)
    return CoreState(mean, add_one(memory, grows), seen), Info(rate=eta, outlier=outlier)


def averaging_weight(seen: Values, window: Values, config: Networks = NETWORKS) -> Values:
    """Return the weight with which a new iterate enters the average: 1 until the bootstrap is over.

    `seen` are the samples before the step.
    """
    return (seen >= config.bootstrap) / window + (seen < config.bootstrap)


def row_averaging_weight(seen: PerCoordinate, count: PerCoordinate, config: Networks = NETWORKS) -> PerCoordinate:
    """Return the weight of a new iterate in the average of a row of a table: 1/√t for its t-th iterate."""
    earlier = (seen > config.bootstrap) * (seen - config.bootstrap)
    return square_root(count / (earlier + count + (count == 0)))


def averaging(state: Averaging, gain: Scalar, steps: Scalar, config: Networks = NETWORKS) -> Averaging:
    """Return the window after `steps` steps. It grows while the average is better than the newest iterate.

    `gain` is f(θ) − f(θ̄) to second order, ∇·(θ − θ̄) − ½ (θ−θ̄)ᵀ|H|(θ−θ̄), over all coordinates. Without noise it is
    negative, and the window stays short; in stationary noise the window grows with time; under drift it shrinks again.
    The error of h̄^fd makes |H| too large, so the window never shrinks below a small share of all steps.
    """
    least = config.min_window + 0 * state.window
    better = ema(state.advantage, gain, 1 / larger(state.window, least + least))
    window = state.window + (better > 0) * 0.5 - (better <= 0) * 1.0
    return Averaging(larger(larger(window, least), config.window_share * steps), better)


def progress(
    state: Progress, loss: Scalar, curvature_penalty: Scalar, steps: Scalar, config: Networks = NETWORKS
) -> Progress:
    """Return the horizon after a minibatch. It grows while larger rates pay off.

    The optimal rate for one step is too small for many steps (Wu et al. 2018). Noise increases the loss immediately;
    progress along flat directions pays off later, and noise averages out. The horizon grows while the expected decrease
    of the loss exceeds `curvature_penalty`, and shrinks twice as fast otherwise.

    The decrease is expected over as many steps as were taken. If the loss falls with the logarithm of their number, it
    falls by log 2 = 0.69 units in these steps, and the two averages of the loss differ by 1/3 − 1/9 = 0.22 units.

    Args:
        state: the losses and the horizon so far.
        loss: the loss of the minibatch.
        curvature_penalty: ½ (θ−θ̄)ᵀ|H|(θ−θ̄), the increase of the loss by noise.
        steps: number of steps before this one.
        config: the constants.
    """
    deviation = (steps > 0) * (loss - state.earlier)
    # without the limit, the average of the losses would need a power of the number of steps to forget an outlier
    deviation = clip(deviation, LOSS_OUTLIER * state.spread + (state.spread == 0) * abs(deviation))
    loss = (steps == 0) * loss + (steps > 0) * (state.earlier + deviation)
    recent = ema(state.recent, loss, 9 / (steps + 9))
    earlier = ema(state.earlier, loss, 3 / (steps + 3))
    spread = ema(state.spread, abs(deviation), 3 / (steps + 3))
    pays = curvature_penalty < EXPECTED_DECREASE * (earlier - recent)
    horizon = state.horizon * (1 + pays * 0.0045 - (pays == 0) * 0.009)
    return Progress(recent, earlier, clip(larger(horizon, 1 + 0 * horizon), config.max_horizon), spread)


def update_window_and_horizon(
    state: Averaging,
    before: Progress,
    products: Scalar,
    penalty: Scalar,
    loss: Scalar | None,
    steps: Scalar,
    config: Networks,
) -> tuple[Averaging, Progress]:
    """Return the window of the average and the horizon of the rates after a step.

    Args:
        state: window before the step.
        before: horizon before the step.
        products: ∇·(θ − θ̄), over all coordinates.
        penalty: ½ (θ−θ̄)ᵀ|H|(θ−θ̄), over all coordinates.
        loss: loss of the minibatch, negated if it is maximized; None if it is not known, so that the horizon stays.
        steps: number of steps before this one.
        config: constants of the algorithm.
    """
    after = averaging(state, products - penalty, steps + 1, config)
    return after, before if loss is None else progress(before, loss, penalty, steps, config)


# --- momentum -----------------------------------------------------------------------------------------------------


def momentum_obstacle(averaging: Averaging, progress: Progress) -> Scalar:
    """Return a number that is positive if the average is better than the newest iterate, or if the loss rises.

    In a game between two networks, gradients may agree with the drift while the loss of both rises and falls. Momentum
    would increase these oscillations. Without known losses, they count as not rising.
    """
    rises = progress.recent - progress.earlier > LOSS_RISE * progress.spread
    return larger(averaging.advantage, rises + 0 * averaging.advantage)


def momentum(before: Momentum, product: PerTensor, obstacle: Scalar, config: Networks = NETWORKS) -> Momentum:
    """Return the momentum of a tensor after a step.

    θ − θ̄ is a moving average of past steps, so it is the momentum buffer. The derivative of the loss with respect to β
    has the sign of ∇·(θ − θ̄). β grows while that is negative on average, that is, while −∇ still points along the
    drift. It grows only if the newest iterate is no worse than the average, so noise switches it off, and only if the
    loss does not rise.

    Args:
        before: momentum before the step.
        product: ∇·(θ − θ̄) of the tensor in this step.
        obstacle: `momentum_obstacle` of the parameter group. β falls if it is positive.
        config: constants of the algorithm.
    """
    agreement = ema(before.agreement, product, 1 / AGREEMENT_STEPS)
    grows = (agreement < 0) & (obstacle <= 0)
    coefficient = before.coefficient + MOMENTUM_GROWTH * (grows == 1) - MOMENTUM_FALL * (grows == 0)
    return Momentum(clip(coefficient * (coefficient > 0), config.max_momentum), agreement)


def momentum_weight(coefficient: PerTensor, averaging_weight: Values, lr: Scalar) -> Values:
    """Return the factor k in θ ← θ − step + k (θ − θ̄): β over the window.

    It is 0 until there is an average, and if `lr`, the user's factor on the rates, is 0.
    """
    return coefficient * averaging_weight * ((averaging_weight < 0.5) & (lr > 0))


def add_momentum(step: PerCoordinate, theta: PerCoordinate, average: PerCoordinate, weight: Values) -> PerCoordinate:
    """Return the step with momentum along θ − θ̄; `weight` is that of `momentum_weight`."""
    return step - weight * (theta - average)


# --- weight decay -------------------------------------------------------------------------------------------------


def decay_strength(noise: PerTensor, curv: PerTensor, rms: PerTensor, samples: Scalar) -> PerTensor:
    """Return the strength λ of the penalty ½λ‖θ‖² of a tensor that is estimated to generalize best.

    The gradient of the training loss differs from that of the expected loss by an error with variance σ²/n, where n is
    the number of samples in the data. An unpenalized fit follows that error, which costs σ²/(n h) per coordinate in
    expected loss (Takeuchi 1976). λ is the strength whose shrinkage λθ² equals this cost in the penalized fit:

        λ θ² = σ² / (n (h + λ)).

    If the loss is a log likelihood of the right family, σ² = h, and this is MacKay's evidence procedure. λ has the
    unit of a curvature, so the result does not depend on the scale of the loss.

    Args:
        noise: σ², mean variance of a sample's gradient over the coordinates of the tensor.
        curv: h, mean curvature.
        rms: root mean square of the weights.
        samples: n; 0 if it is unknown, and then λ is 0.
    """
    known = (samples > 0) & (rms > 0)
    error = square_root(noise / (samples + (samples == 0)))
    pull = curv * rms
    fraction = (error + error) / (pull + square_root(pull * pull + 4 * error * error) + (error == 0))
    return known * (error / (rms + (rms == 0)) * fraction)
