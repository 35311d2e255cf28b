"""The optimizers of the simulator: baselines and the algorithms of this package.

Each is a pair of pure functions, `init` and `update`. They are plain arithmetic on arrays or compiled scalars, as
described in `vsgd.core`. An optimizer with a second gradient also has a function `probe`, which returns its offset δ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from vsgd.algorithms import networks, paper
from vsgd.core import Moments, PerCoordinate, State
from vsgd_bench import one_coordinate

NO_CURVATURE, SAMPLE_CURVATURE, FINITE_DIFFERENCES, SIGNED_DIFFERENCES = range(4)

EPSILON = 1e-8

Updated: TypeAlias = tuple[PerCoordinate, Any, PerCoordinate]
"""Parameter and state after a step, and the rate of the step."""


def no_probe(
    theta: PerCoordinate, state: Any, grad: PerCoordinate, count: PerCoordinate, t: int, params: Any
) -> PerCoordinate:
    return grad


class Algorithm(NamedTuple):
    """An optimizer of the simulator."""

    name: str
    params: Any
    init: Callable[..., Any]
    """(theta, params) → state"""
    update: Callable[..., Any]
    """(theta, state, batch: Moments, count, t, params) → theta, state, rate"""
    curvature: int = NO_CURVATURE
    probe: Callable[..., Any] = no_probe
    """(theta, state, grad, count, t, params) → δ; used only with FINITE_DIFFERENCES"""
    bootstrap: float = 0.0
    """Number of samples that it receives before the first update."""
    evaluation_point: Callable[..., Any] = paper.evaluation_point
    """(theta, state) → the parameter to evaluate"""


class Decay(NamedTuple):
    rate: float
    decay: float


def no_state(theta: PerCoordinate, params: Any) -> PerCoordinate:
    return 0 * theta


def sgd_update(
    theta: PerCoordinate, state: PerCoordinate, batch: Moments, count: PerCoordinate, t: int, params: Decay
) -> Updated:
    eta = params.rate / (1 + params.decay * t)
    return theta - eta * batch.grad, state, eta


def sgd(rate: float, decay: float = 0.0) -> Algorithm:
    """Return SGD with the rate η0 / (1 + γt)."""
    return Algorithm(f"SGD η={rate:g} γ={decay:g}", Decay(rate, decay), no_state, sgd_update)


def adagrad_update(
    theta: PerCoordinate, state: PerCoordinate, batch: Moments, count: PerCoordinate, t: int, params: Decay
) -> Updated:
    total = state + batch.grad * batch.grad
    eta = params.rate / (total**0.5 + EPSILON)
    return theta - eta * batch.grad, total, eta


def adagrad(rate: float) -> Algorithm:
    """Return AdaGrad, with the rate η0 / √Σ∇² (Duchi, Hazan & Singer 2011)."""
    return Algorithm(f"AdaGrad η={rate:g}", Decay(rate, 0.0), no_state, adagrad_update)


def natural_update(
    theta: PerCoordinate, state: PerCoordinate, batch: Moments, count: PerCoordinate, t: int, params: Decay
) -> Updated:
    fisher = state + (batch.grad_sq - state) / (t + 1)
    eta = params.rate / (fisher + EPSILON)
    return theta - eta * batch.grad, fisher, eta


def natural_gradient(rate: float) -> Algorithm:
    """Return the natural gradient with a diagonal Fisher matrix (Amari 2000).

    The rate is η0 divided by the mean of all squared sample gradients.
    """
    return Algorithm(f"natural η={rate:g}", Decay(rate, 0.0), no_state, natural_update)


def secant_state(theta: PerCoordinate, params: Decay) -> PerCoordinate:
    return 0 * theta + 1 / params.rate


def secant_probe(
    theta: PerCoordinate, state: PerCoordinate, grad: PerCoordinate, count: PerCoordinate, t: int, params: Decay
) -> PerCoordinate:
    """Return the next step, along which the secant is measured."""
    step = grad / (state * (1 + t))
    return EPSILON * (step <= 0) - EPSILON * (step > 0) - step


def secant_update(
    theta: PerCoordinate, state: PerCoordinate, batch: Moments, count: PerCoordinate, t: int, params: Decay
) -> Updated:
    eta = 1 / (state * (1 + t))
    curvature = state + (batch.curv - state) * 2 / (t + 2)
    floor = 1 / (100 * params.rate)
    curvature = curvature + (floor - curvature) * (curvature < floor)
    return theta - eta * batch.grad, curvature, eta


def sgd_qn(rate: float = 1.0) -> Algorithm:
    """Return SGD-QN (Bordes, Bottou & Gallinari 2009).

    The rate is 1/(1+t) divided by a decaying average of secant curvatures. The curvature starts at 1/η0 and does not
    fall below 1 % of that. In the paper, λ sets the limits.
    """
    params = Decay(rate, 1.0)
    return Algorithm(f"SGD-QN η={rate:g}", params, secant_state, secant_update, FINITE_DIFFERENCES, secant_probe)


class AdamState(NamedTuple):
    mean: PerCoordinate
    square: PerCoordinate


def adam_init(theta: PerCoordinate, params: Decay) -> AdamState:
    return AdamState(mean=0 * theta, square=0 * theta)


def adam_update(
    theta: PerCoordinate, state: AdamState, batch: Moments, count: PerCoordinate, t: int, params: Decay
) -> Updated:
    mean = 0.9 * state.mean + 0.1 * batch.grad
    square = 0.999 * state.square + 0.001 * batch.grad * batch.grad
    eta = params.rate / ((square / (1 - 0.999 ** (t + 1))) ** 0.5 + EPSILON)
    return theta - eta * mean / (1 - 0.9 ** (t + 1)), AdamState(mean=mean, square=square), eta


def adam(rate: float = 1e-3) -> Algorithm:
    """Return Adam (Kingma & Ba 2015) with its default β."""
    return Algorithm(f"Adam η={rate:g}", Decay(rate, 0.0), adam_init, adam_update)


class Truth(NamedTuple):
    curvature: float
    noise: float


def oracle_update(
    theta: PerCoordinate, state: PerCoordinate, batch: Moments, count: PerCoordinate, t: int, params: Truth
) -> Updated:
    signal = theta * theta
    eta = signal / (signal + params.noise / (count + (count == 0))) / params.curvature
    return theta - eta * batch.grad, state, eta


def oracle(curvature: float, noise: float) -> Algorithm:
    """Return SGD with the optimal rate (eq. 1 and 3), computed from the true curvature, noise and distance to 0.

    No algorithm can be better on a quadratic.
    """
    return Algorithm("oracle", Truth(curvature, noise), no_state, oracle_update)


def paper_probe(
    theta: PerCoordinate, state: State, grad: PerCoordinate, count: PerCoordinate, t: int, params: paper.Paper
) -> PerCoordinate:
    return paper.probe(state, grad, count, params)


def paper_update(
    theta: PerCoordinate, state: State, batch: Moments, count: PerCoordinate, t: int, params: paper.Paper
) -> Updated:
    theta, state, info = paper.update(theta, state, batch, count, params)
    return theta, state, info.rate


def vsgd_fd(config: paper.Paper = paper.PAPER) -> Algorithm:
    """Return vSGD-fd, Algorithm 1 of the paper."""
    return Algorithm("vSGD-fd", config, paper.init, paper_update, FINITE_DIFFERENCES, paper_probe, config.bootstrap)


def vsgd(config: paper.Paper = paper.VSGD_2012) -> Algorithm:
    """Return vSGD of 2012, which uses the second derivative of each sample."""
    return Algorithm("vSGD", config, paper.init, paper_update, SAMPLE_CURVATURE, paper_probe, config.bootstrap)


def networks_probe(
    theta: PerCoordinate,
    state: one_coordinate.State,
    grad: PerCoordinate,
    count: PerCoordinate,
    t: int,
    params: networks.Networks,
) -> PerCoordinate:
    return networks.probe(networks.probe_size(state.scale, params), networks.random_bit(np.int64(t), np.int64(0)))


def networks_update(
    theta: PerCoordinate,
    state: one_coordinate.State,
    batch: Moments,
    count: PerCoordinate,
    t: int,
    params: networks.Networks,
) -> Updated:
    """Update a tensor of one coordinate. Without a second gradient, the average curvature is used."""
    mean = state.inner.mean
    due = networks.probe_due((t - 1) % params.probe_interval, False, params) | (state.inner.seen < params.bootstrap)
    batch = Moments(
        grad=batch.grad,
        grad_sq=batch.grad_sq,
        curv=mean.curv + due * (batch.curv - mean.curv),
        curv_sq=mean.curv_sq + due * (batch.curv_sq - mean.curv_sq),
    )
    theta, state, info = one_coordinate.update(theta, state, batch, count, params)
    return theta, state, info.rate


def vsgd_networks(config: networks.Networks = networks.NETWORKS) -> Algorithm:
    """Return the default for networks, for a tensor of one coordinate."""
    return Algorithm(
        "vSGD, networks",
        config,
        one_coordinate.init,
        networks_update,
        SIGNED_DIFFERENCES,
        networks_probe,
        config.bootstrap,
        one_coordinate.evaluation_point,
    )


def sharing(algorithm: Algorithm, share: Callable[[Moments], Moments], name: str) -> Algorithm:
    """Return the algorithm with statistics shared between coordinates; see `paper.share_within`."""

    def update(
        theta: PerCoordinate, state: State, batch: Moments, count: PerCoordinate, t: int, params: paper.Paper
    ) -> Updated:
        theta, state, info = paper.update(theta, state, batch, count, params, share)
        return theta, state, info.rate

    return algorithm._replace(update=update, name=name)
