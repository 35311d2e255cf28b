"""Algorithm 1 of Schaul & LeCun (2013), unchanged, and its predecessor of 2012.

`docs/algorithm.md` lists the equations next to the functions, and explains how ambiguities of the paper were resolved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vsgd.algorithms.base import checked
from vsgd.core import (
    Info,
    Moments,
    PerCoordinate,
    State,
    bootstrap_weight,
    ema,
    is_outlier,
    shorten_memory,
    signal_fraction,
    update_moments,
    variance,
    zero_state,
)


@checked(memory=1)
class Paper(NamedTuple):
    """Constants of Algorithm 1.

    Attributes:
        epsilon: ε, added to denominators so that none is zero.
        bootstrap: number of samples that are averaged before the first update.
        memory: τ at the end of the bootstrap.
        outlier_sigmas: a minibatch that is this many standard deviations from the average is an outlier.
        variance_floor: a variance below this fraction of the mean square is treated as rounding error.
        detect_outliers: whether an outlier increases τ before it is added to the averages.
        normalize_curvature: whether the curvature is v̄^fd / h̄^fd (section 5.2); otherwise it is h̄^fd.
    """

    epsilon: float = 1e-5
    bootstrap: float = 10.0
    memory: float = 2.0
    outlier_sigmas: float = 2.0
    variance_floor: float = 1e-6
    detect_outliers: bool = True
    normalize_curvature: bool = True


PAPER = Paper()
"""vSGD-fd: Algorithm 1 of the paper."""

VSGD_2012 = Paper(detect_outliers=False, normalize_curvature=False)
"""vSGD of 2012: it uses the given curvature and detects no outliers."""


def init(theta: PerCoordinate, config: Paper = PAPER) -> State:
    """Return the state before the first sample.

    Args:
        theta: the parameters θ, a float or an array.
        config: the constants.

    Returns:
        A state with the shape of `theta`.

    >>> init(1.0).memory
    2.0
    """
    return zero_state(theta, config.memory)


def probe(state: State, grad: PerCoordinate, count: PerCoordinate, config: Paper = PAPER) -> PerCoordinate:
    """Return the probe δ = ḡ, the typical update distance (eq. 6), moved away from zero by ε.

    During the bootstrap, the gradient of this minibatch is added to the average first.

    Args:
        state: the state before this minibatch.
        grad: mean gradient of the minibatch.
        count: number of its samples.
        config: the constants.

    Returns:
        The offset δ of each coordinate, at which the second gradient is taken.

    >>> probe(init(1.0), grad=0.5, count=1)
    0.50001
    """
    mean = ema(state.mean.grad, grad, bootstrap_weight(state.seen, count, config.bootstrap))
    return mean + (mean >= 0) * config.epsilon - (mean < 0) * config.epsilon


def noise(mean: Moments, config: Paper) -> PerCoordinate:
    """Return σ², the variance of the gradient of one sample, plus ε."""
    return variance(mean.grad, mean.grad_sq) + config.epsilon


def rate(mean: Moments, count: PerCoordinate, config: Paper = PAPER) -> PerCoordinate:
    """Return the optimal learning rate η* for a mean gradient over `count` samples (eq. 1, 3 and 4, section 5.2).

    The signal fraction is n ḡ² / (n ḡ² + σ²). With σ² = v̄ − ḡ² this equals n ḡ² / (v̄ + (n−1) ḡ²) of the paper. The
    factor n/(n−z) of eq. 4 is not needed, since gradients are means over samples with a non-zero gradient.

    Args:
        mean: the moving averages.
        count: number of samples n, or n − z_i per coordinate.
        config: the constants.

    Returns:
        The learning rate of each coordinate.

    >>> round(rate(Moments(grad=1.0, grad_sq=2.0, curv=4.0, curv_sq=16.0), count=1), 4)  # half of it is noise
    0.125
    """
    fraction = signal_fraction(count * (mean.grad * mean.grad), noise(mean, config))
    if config.normalize_curvature:
        return fraction * (mean.curv + config.epsilon) / (mean.curv_sq + config.epsilon)
    return fraction / (abs(mean.curv) + config.epsilon)


def learn(
    state: State,
    batch: Moments,
    count: PerCoordinate,
    config: Paper = PAPER,
    shared: Callable[[Moments], Moments] | None = None,
) -> tuple[State, Info]:
    """Return the state after a minibatch, and its learning rates. Arguments as in `update`, which also steps."""
    learning = (count > 0) & (state.seen >= config.bootstrap)
    outlier = (
        learning & config.detect_outliers & is_outlier(state.mean, batch, config.outlier_sigmas, config.variance_floor)
    )
    memory = state.memory + outlier
    mean = update_moments(state.mean, batch, learning / memory + bootstrap_weight(state.seen, count, config.bootstrap))
    basis = mean if shared is None else shared(mean)
    eta = learning * rate(basis, count, config)
    memory = shorten_memory(memory, signal_fraction(basis.grad * basis.grad, noise(basis, config)), learning) + learning
    return State(mean, memory, state.seen + count), Info(rate=eta, outlier=outlier)


def update(
    theta: PerCoordinate,
    state: State,
    batch: Moments,
    count: PerCoordinate,
    config: Paper = PAPER,
    shared: Callable[[Moments], Moments] | None = None,
) -> tuple[PerCoordinate, State, Info]:
    """Take one step of Algorithm 1.

    Args:
        theta: the parameters θ.
        state: the state that `init` or the last step returned.
        batch: moments of the minibatch, with curvatures measured at the offset that `probe` returned.
        count: its number of samples n, or n − z_i per coordinate. Coordinates with count 0 do not change.
        config: the constants.
        shared: a function that shares statistics within blocks of coordinates (see `share_within`), or None.

    Returns:
        The new parameters, the new state, and the learning rates and outliers of this step.

    >>> theta, state = 1.0, init(1.0)
    >>> for _ in range(20):  # the loss ½θ² without noise
    ...     theta, state, info = update(theta, state, Moments(theta, theta**2, 1.0, 1.0), 1)
    >>> abs(theta) < 0.01
    True
    """
    state, info = learn(state, batch, count, config, shared)
    return theta - info.rate * batch.grad, state, info


def evaluation_point(theta: PerCoordinate, state: State) -> PerCoordinate:
    """Return θ: the algorithm does not average its iterates."""
    return theta


def share_within(labels: Any) -> Callable[[Moments], Moments]:
    """Return a function that shares one learning rate among the coordinates of a block: vSGD-b.

    One label for all coordinates is vSGD-g. The rate is η_b = Σ ḡ_i² / (h⁺ Σ v̄_i), with the upper bound h⁺ = max h̄_i
    of the curvatures. Pass the function to `update` as `shared`.

    Args:
        labels: the block of each coordinate. Coordinates are the last axis of arrays.
    """
    import numpy as np

    labels = np.asarray(labels)
    members = np.unique(labels)[:, None] == labels
    weights = members / members.sum(axis=1, keepdims=True)

    def block_mean(values: PerCoordinate) -> PerCoordinate:
        return values @ weights.T @ members

    def block_max(values: PerCoordinate) -> PerCoordinate:
        return np.where(members, values[..., None, :], -np.inf).max(axis=-1) @ members

    def share(mean: Moments) -> Moments:
        return Moments(
            grad=block_mean(mean.grad**2) ** 0.5,
            grad_sq=block_mean(mean.grad_sq),
            curv=block_max(mean.curv),
            curv_sq=block_max(mean.curv_sq),
        )

    return share
