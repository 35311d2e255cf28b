"""The default for linear models: curvature measured row by row, in units of each column.

No constant has the unit of a feature or of the loss, so neither the scale of a column nor that of the loss matters.
`docs/sparse.md` numbers and explains the differences to the paper.
"""

from __future__ import annotations

from typing import NamedTuple

from vsgd.algorithms.base import checked
from vsgd.core import (
    Array,
    Info,
    Moments,
    State,
    is_outlier,
    shorten_memory,
    signal_fraction,
    update_moments,
    variance,
    within_cap,
    zero_state,
)


@checked(epsilon=1e-300, memory=1, min_memory_cap=1)
class Columns(NamedTuple):
    """The constants of the algorithm for linear models.

    Attributes:
        epsilon: keeps denominators from vanishing; far below any variance or curvature in float64.
        memory: τ before the first sample.
        outlier_sigmas: a minibatch this many standard deviations off is an outlier.
        variance_floor: a variance below this fraction of the mean square is rounding.
        min_memory_cap: τ grows no further than the larger of this and √(samples seen).
        curvature_damping: c in h^fd + c·|∇/δ|, which bounds a step by δ/c where the probe sees no curvature.
        row_curvature_floor: lower bound on a row's curvature, as a fraction of the running mean over rows.
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


def init(theta: Array, config: Columns = COLUMNS) -> State:
    """The state before the first sample, shaped like `theta`."""
    return zero_state(theta, config.memory)


def noise(mean: Moments, config: Columns) -> Array:
    """σ², the variance of the gradient of one sample; never zero."""
    return variance(mean.grad, mean.grad_sq) + config.epsilon


def probe(state: State, count: Array, column_max: Array, config: Columns = COLUMNS) -> Array:
    """δ = √s / max |x| of the column: the RMS distance that one step moves a coordinate, s being the signal fraction.

    s is estimated from τ samples, so its upper estimate s + (1 − s)/τ is used: a coordinate with few samples takes the
    full step.
    """
    fraction = signal_fraction(count * (state.mean.grad * state.mean.grad), noise(state.mean, config))
    constant = column_max == 0
    return (fraction + (1 - fraction) / state.memory) ** 0.5 / (column_max + constant) * (column_max > 0)


def damped(curvature: Array, grad: Array, delta: Array, config: Columns) -> Array:
    """h^fd + c·|∇/δ|, since the gradient may vanish just beyond the probe, where a kink would not be seen."""
    return curvature + config.curvature_damping * abs(grad / delta)


def column_curvature(row_curvature: Array, x: Array, column_max: Array, others: Array) -> Array:
    """Curvature of one sample in θ_i when the other coordinates of its row move too, all to the same side.

    `row_curvature` is that of the loss in the output, `others` the sum of |x_k| δ_k over the rest of the row. If all
    signal fractions were 1, the steps of a row would add up to no more than the one that is best for it.
    """
    return row_curvature * (x * x + abs(x) * column_max * others)


def rate(mean: Moments, count: Array, config: Columns = COLUMNS) -> Array:
    """η* for the mean gradient over `count` samples, with the mean curvature as it is."""
    fraction = signal_fraction(count * (mean.grad * mean.grad), noise(mean, config))
    return fraction / (abs(mean.curv) + config.epsilon)


def update(
    theta: Array, state: State, batch: Moments, count: Array, config: Columns = COLUMNS
) -> tuple[Array, State, Info]:
    """One pass through the loop, without a bootstrap and with a capped memory. Arguments as in `paper.update`."""
    learning = count > 0
    outlier = learning & is_outlier(state.mean, batch, config.outlier_sigmas, config.variance_floor)
    seen = state.seen + count
    memory = state.memory + (outlier & within_cap(state.memory + outlier, seen, config.min_memory_cap))
    mean = update_moments(state.mean, batch, learning / memory)
    eta = learning * rate(mean, count, config)
    memory = shorten_memory(memory, signal_fraction(mean.grad * mean.grad, noise(mean, config)), learning)
    memory = memory + (learning & within_cap(memory + learning, seen, config.min_memory_cap))
    return theta - eta * batch.grad, State(mean, memory, seen), Info(rate=eta, outlier=outlier)


def evaluation_point(theta: Array, state: State) -> Array:
    """The iterate itself."""
    return theta
