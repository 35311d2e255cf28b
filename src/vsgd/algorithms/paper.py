"""Algorithm 1 of Schaul & LeCun (2013) to the letter, and vSGD, its predecessor of 2012.

`docs/algorithm.md` puts the equations beside the functions and says how open questions were answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vsgd.algorithms.base import checked
from vsgd.core import (
    Array,
    Info,
    Moments,
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
    """The constants of the paper.

    Attributes:
        epsilon: ε, added to denominators so that none vanishes.
        bootstrap: how many samples make the first averages before anything moves.
        memory: τ at the end of the bootstrap.
        outlier_sigmas: a minibatch this many standard deviations off is an outlier.
        variance_floor: a variance below this fraction of the mean square is rounding.
        detect_outliers: whether an outlier lengthens the memory before it enters the averages.
        normalize_curvature: whether the curvature is h̄ = v̄^fd / h̄^fd (section 5.2), or h̄^fd as it is.
    """

    epsilon: float = 1e-5
    bootstrap: float = 10.0
    memory: float = 2.0
    outlier_sigmas: float = 2.0
    variance_floor: float = 1e-6
    detect_outliers: bool = True
    normalize_curvature: bool = True


PAPER = Paper()
"""vSGD-fd: Algorithm 1 to the letter."""

VSGD_2012 = Paper(detect_outliers=False, normalize_curvature=False)
"""vSGD, the predecessor: trusts the curvature it is given and every sample it sees."""


def init(theta: Array, config: Paper = PAPER) -> State:
    """The state before the first sample, shaped like `theta`."""
    return zero_state(theta, config.memory)


def probe(state: State, grad: Array, count: Array, config: Paper = PAPER) -> Array:
    """δ = ḡ, the typical update distance (eq. 6), pushed away from zero by epsilon on its own side.

    During the bootstrap this minibatch's gradient enters the average first.
    """
    mean = ema(state.mean.grad, grad, bootstrap_weight(state.seen, count, config.bootstrap))
    return mean + (mean >= 0) * config.epsilon - (mean < 0) * config.epsilon


def probe_due(step: int, config: Paper = PAPER) -> bool:
    """A second gradient is taken at every step."""
    return True


def noise(mean: Moments, config: Paper) -> Array:
    """σ², the variance of the gradient of one sample; never zero."""
    return variance(mean.grad, mean.grad_sq) + config.epsilon


def rate(mean: Moments, count: Array, config: Paper = PAPER) -> Array:
    """η*, the optimal rate for the mean gradient over `count` samples (eq. 1, 3 and 4, and section 5.2).

    With σ² = v̄ − ḡ² the signal fraction, n ḡ² / (n ḡ² + σ²), is n ḡ² / (v̄ + (n−1) ḡ²) as printed. The factor n/(n−z)
    of eq. 4 is in the gradient already, which is a mean over the non-zero samples.
    """
    fraction = signal_fraction(count * (mean.grad * mean.grad), noise(mean, config))
    if config.normalize_curvature:
        return fraction * (mean.curv + config.epsilon) / (mean.curv_sq + config.epsilon)
    return fraction / (abs(mean.curv) + config.epsilon)


def learn(
    state: State,
    batch: Moments,
    count: Array,
    config: Paper = PAPER,
    shared: Callable[[Moments], Moments] | None = None,
) -> tuple[State, Info]:
    """The statistics after a minibatch, and the rates that follow from them: all of `update` but the step itself."""
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
    theta: Array,
    state: State,
    batch: Moments,
    count: Array,
    config: Paper = PAPER,
    shared: Callable[[Moments], Moments] | None = None,
) -> tuple[Array, State, Info]:
    """One pass through the loop of Algorithm 1.

    Args:
        theta: θ, the parameters.
        state: what `init` or the last update returned.
        batch: this minibatch's moments; the curvature measured at the offset that `probe` names.
        count: its number of samples n, or n − z_i per coordinate. Where it is 0 nothing changes.
        config: `PAPER` by default.
        shared: lets the coordinates of a block share their statistics (see `share_within`); None: each has its own.

    Returns:
        The new parameters, the new state, and the rates and outliers of this update.
    """
    state, info = learn(state, batch, count, config, shared)
    return theta - info.rate * batch.grad, state, info


def evaluation_point(theta: Array, state: State) -> Array:
    """The iterate itself."""
    return theta


def share_within(labels: Any) -> Callable[[Moments], Moments]:
    """Let coordinates (the last axis) with the same label share one rate: vSGD-b, or vSGD-g with one label for all.

    η_b = Σ ḡ_i² / (h⁺ Σ v̄_i): the strength of the whole gradient of a block against its noise, and the upper bound
    h⁺ = max h̄_i of its curvatures. Pass the result to `update` as `shared`.
    """
    import numpy as np

    labels = np.asarray(labels)
    members = np.unique(labels)[:, None] == labels
    weights = members / members.sum(axis=1, keepdims=True)

    def block_mean(values: Any) -> Any:
        return values @ weights.T @ members

    def block_max(values: Any) -> Any:
        return np.where(members, values[..., None, :], -np.inf).max(axis=-1) @ members

    def share(mean: Moments) -> Moments:
        return Moments(
            grad=block_mean(mean.grad**2) ** 0.5,
            grad_sq=block_mean(mean.grad_sq),
            curv=block_max(mean.curv),
            curv_sq=block_max(mean.curv_sq),
        )

    return share
