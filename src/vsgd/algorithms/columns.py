"""The default algorithm for linear models. Curvature is measured per row, in units of each column.

No constant has the unit of a feature or of the loss. Training therefore does not depend on the scale of a column or of
the loss. `docs/sparse.md` explains the differences from the paper.
"""

from __future__ import annotations

from typing import NamedTuple

from vsgd.algorithms.base import checked
from vsgd.core import (
    Info,
    Moments,
    PerCoordinate,
    State,
    is_outlier,
    memory_below_cap,
    shorten_memory,
    signal_fraction,
    update_moments,
    variance,
    zero_state,
)


@checked(epsilon=1e-300, memory=1, min_memory_cap=1)
class Columns(NamedTuple):
    """Constants of the algorithm for linear models.

    Attributes:
        epsilon: ε, added to denominators so that none is zero. It is far below any variance or curvature in float64.
        memory: τ before the first sample.
        outlier_sigmas: a minibatch that is this many standard deviations from the average is an outlier.
        variance_floor: a variance below this fraction of the mean square is treated as rounding error.
        min_memory_cap: upper limit on τ; if √(samples seen) is larger, that is the limit.
        curvature_damping: c in h^fd + c·|∇/δ|. It limits a step to δ/c if the measured curvature is zero.
        row_curvature_floor: lower limit on the curvature of a row, as a fraction of the mean over rows.
    """

    epsilon: float = 1e-100
    memory: float = 1.0
    outlier_sigmas: float = 2.0
    variance_floor: float = 1e-6
    min_memory_cap: float = 100.0
    curvature_damping: float = 0.1
    row_curvature_floor: float = 0.25


COLUMNS = Columns()
"""The default of `vsgd.sklearn`, `vsgd fit` and `vsgd.river`."""


def init(theta: PerCoordinate, config: Columns = COLUMNS) -> State:
    """Return the state before the first sample, with the shape of `theta`."""
    return zero_state(theta, config.memory)


def noise(mean: Moments, config: Columns) -> PerCoordinate:
    """Return σ², the variance of the gradient of one sample, plus ε."""
    return variance(mean.grad, mean.grad_sq) + config.epsilon


def probe(state: State, count: PerCoordinate, column_max: PerCoordinate, config: Columns = COLUMNS) -> PerCoordinate:
    """Return the probe δ = √s / max |x|, the RMS change of a coordinate in one step, where s is the signal fraction.

    The estimate of s comes from τ samples, so its upper bound s + (1 − s)/τ is used. A coordinate with few samples
    therefore has the largest probe.

    Args:
        state: the state of the coordinate.
        count: number of samples in the minibatch.
        column_max: largest |x| of the column so far. If it is 0, the probe is 0.
        config: the constants.
    """
    fraction = signal_fraction(count * (state.mean.grad * state.mean.grad), noise(state.mean, config))
    constant = column_max == 0
    return (fraction + (1 - fraction) / state.memory) ** 0.5 / (column_max + constant) * (column_max > 0)


def damped(curvature: PerCoordinate, grad: PerCoordinate, delta: PerCoordinate, config: Columns) -> PerCoordinate:
    """Return h^fd + c·|∇/δ|. The probe does not see a kink just beyond δ, and this term limits the step."""
    return curvature + config.curvature_damping * abs(grad / delta)


def column_curvature(
    row_curvature: PerCoordinate, x: PerCoordinate, column_max: PerCoordinate, others: PerCoordinate
) -> PerCoordinate:
    """Return the curvature of one sample in θ_i, including the steps of the other coordinates of its row.

    The other coordinates are assumed to change the output in the same direction. If all signal fractions were 1, the
    steps of a row would add up to at most its optimal step.

    Args:
        row_curvature: curvature of the loss in the output.
        x: element of the row in this column.
        column_max: largest |x| of the column.
        others: sum of |x_k| δ_k over the other elements of the row.
    """
    return row_curvature * (x * x + abs(x) * column_max * others)


def rate(mean: Moments, count: PerCoordinate, config: Columns = COLUMNS) -> PerCoordinate:
    """Return the learning rate η* for a mean gradient over `count` samples, with the mean curvature."""
    fraction = signal_fraction(count * (mean.grad * mean.grad), noise(mean, config))
    return fraction / (abs(mean.curv) + config.epsilon)


def update(
    theta: PerCoordinate, state: State, batch: Moments, count: PerCoordinate, config: Columns = COLUMNS
) -> tuple[PerCoordinate, State, Info]:
    """Take one step, without a bootstrap and with a capped memory. Arguments and result as in `paper.update`."""
    learning = count > 0
    outlier = learning & is_outlier(state.mean, batch, config.outlier_sigmas, config.variance_floor)
    seen = state.seen + count
    memory = state.memory + (outlier & memory_below_cap(state.memory + outlier, seen, config.min_memory_cap))
    mean = update_moments(state.mean, batch, learning / memory)
    eta = learning * rate(mean, count, config)
    memory = shorten_memory(memory, signal_fraction(mean.grad * mean.grad, noise(mean, config)), learning)
    memory = memory + (learning & memory_below_cap(memory + learning, seen, config.min_memory_cap))
    return theta - eta * batch.grad, State(mean, memory, seen), Info(rate=eta, outlier=outlier)


def evaluation_point(theta: PerCoordinate, state: State) -> PerCoordinate:
    """Return θ: the algorithm does not average its iterates."""
    return theta
