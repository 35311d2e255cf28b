"""The opponents, and the method itself, each a small pure pair of `init` and `update`.

Like the rule they are plain arithmetic on arrays or compiled scalars. `update` returns the parameter, the
state and the rate it used. Those that look at a second gradient also say at which `shift`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vsgd.options import NETWORKS, PAPER, VSGD_2012, Options
from vsgd.probe import guessed_curvature, probe_size, random_sign, tensor_shift
from vsgd.probe import shift as probe_shift
from vsgd.rule import Array, Moments, Neighbours, State, averaging_weight, follow
from vsgd.rule import init as rule_init
from vsgd.rule import step as rule_step

NO_CURVATURE, SAMPLE_CURVATURE, SHIFTED_GRADIENT = range(3)

EPSILON = 1e-8


def no_shift(state: Any, grad: Array, count: Array, t: int, params: Any) -> Array:
    return grad


def as_it_is(theta: Array, state: Any) -> Array:
    return theta


class Algorithm(NamedTuple):
    """An optimizer as a simulation runs it."""

    name: str
    params: Any
    init: Callable[..., Any]
    """(theta, params) → state"""
    update: Callable[..., Any]
    """(theta, state, batch: Moments, count, t, params) → theta, state, rate"""
    curvature: int = NO_CURVATURE
    shift: Callable[..., Any] = no_shift
    """(state, grad, count, t, params) → δ; asked only with SHIFTED_GRADIENT"""
    bootstrap: float = 0.0
    """How many samples it looks at before the first update."""
    look: Callable[..., Any] = as_it_is
    """(theta, state) → the parameter to judge it by"""


class Decay(NamedTuple):
    rate: float
    decay: float


def no_state(theta: Array, params: Any) -> Array:
    return 0 * theta


def sgd_update(theta: Array, state: Array, batch: Moments, count: Array, t: int, params: Decay) -> Any:
    eta = params.rate / (1 + params.decay * t)
    return theta - eta * batch.grad, state, eta


def sgd(rate: float, decay: float = 0.0) -> Algorithm:
    """η0 / (1 + γt)."""
    return Algorithm(f"SGD η={rate:g} γ={decay:g}", Decay(rate, decay), no_state, sgd_update)


def adagrad_update(theta: Array, state: Array, batch: Moments, count: Array, t: int, params: Decay) -> Any:
    total = state + batch.grad * batch.grad
    eta = params.rate / (total**0.5 + EPSILON)
    return theta - eta * batch.grad, total, eta


def adagrad(rate: float) -> Algorithm:
    """η0 / √Σ∇² (Duchi, Hazan & Singer 2011)."""
    return Algorithm(f"AdaGrad η={rate:g}", Decay(rate, 0.0), no_state, adagrad_update)


def natural_update(theta: Array, state: Array, batch: Moments, count: Array, t: int, params: Decay) -> Any:
    fisher = state + (batch.grad_sq - state) / (t + 1)
    eta = params.rate / (fisher + EPSILON)
    return theta - eta * batch.grad, fisher, eta


def natural_gradient(rate: float) -> Algorithm:
    """η0 over the diagonal of the Fisher matrix, the mean of all squared sample gradients (Amari 2000)."""
    return Algorithm(f"natural η={rate:g}", Decay(rate, 0.0), no_state, natural_update)


def secant_state(theta: Array, params: Decay) -> Array:
    return 0 * theta + 1 / params.rate


def secant_shift(state: Array, grad: Array, count: Array, t: int, params: Decay) -> Array:
    """The step about to be taken: the secant is measured along it."""
    step = grad / (state * (1 + t))
    return EPSILON * (step <= 0) - EPSILON * (step > 0) - step


def secant_update(theta: Array, state: Array, batch: Moments, count: Array, t: int, params: Decay) -> Any:
    eta = 1 / (state * (1 + t))
    curvature = state + (batch.curv - state) * 2 / (t + 2)
    floor = 1 / (100 * params.rate)
    curvature = curvature + (floor - curvature) * (curvature < floor)
    return theta - eta * batch.grad, curvature, eta


def sgd_qn(rate: float = 1.0) -> Algorithm:
    """1/(1+t) over a decaying average of secant curvatures (Bordes, Bottou & Gallinari 2009).

    The curvature starts at 1/η0 and is kept above a hundredth of that, as theirs is kept within λ's range.
    """
    params = Decay(rate, 1.0)
    return Algorithm(f"SGD-QN η={rate:g}", params, secant_state, secant_update, SHIFTED_GRADIENT, secant_shift)


class AdamState(NamedTuple):
    mean: Array
    square: Array


def adam_init(theta: Array, params: Decay) -> AdamState:
    return AdamState(mean=0 * theta, square=0 * theta)


def adam_update(theta: Array, state: AdamState, batch: Moments, count: Array, t: int, params: Decay) -> Any:
    mean = 0.9 * state.mean + 0.1 * batch.grad
    square = 0.999 * state.square + 0.001 * batch.grad * batch.grad
    eta = params.rate / ((square / (1 - 0.999 ** (t + 1))) ** 0.5 + EPSILON)
    return theta - eta * mean / (1 - 0.9 ** (t + 1)), AdamState(mean=mean, square=square), eta


def adam(rate: float = 1e-3) -> Algorithm:
    """Kingma & Ba (2015) at its usual β."""
    return Algorithm(f"Adam η={rate:g}", Decay(rate, 0.0), adam_init, adam_update)


class Truth(NamedTuple):
    curvature: float
    noise: float


def oracle_update(theta: Array, state: Array, batch: Moments, count: Array, t: int, params: Truth) -> Any:
    signal = theta * theta
    eta = signal / (signal + params.noise / (count + (count == 0))) / params.curvature
    return theta - eta * batch.grad, state, eta


def oracle(curvature: float, noise: float) -> Algorithm:
    """Eq. 1 and 3 with the true curvature h, noise σ² and distance to an optimum at 0: the limit on quad."""
    return Algorithm("oracle", Truth(curvature, noise), no_state, oracle_update)


def vsgd_shift(state: State, grad: Array, count: Array, t: int, params: Options) -> Array:
    return probe_shift(state, grad, count, params)


def vsgd_update(theta: Array, state: State, batch: Moments, count: Array, t: int, params: Options) -> Any:
    theta, state, info = rule_step(theta, state, batch, count, params)
    return theta, state, info.rate


def vsgd_fd(options: Options = PAPER) -> Algorithm:
    """Algorithm 1."""
    return Algorithm("vSGD-fd", options, rule_init, vsgd_update, SHIFTED_GRADIENT, vsgd_shift, options.bootstrap)


def vsgd(options: Options = VSGD_2012) -> Algorithm:
    """The predecessor, which takes each sample's own curvature."""
    return Algorithm("vSGD", options, rule_init, vsgd_update, SAMPLE_CURVATURE, vsgd_shift, options.bootstrap)


class Averaged(NamedTuple):
    """What the default for networks remembers of a coordinate."""

    inner: State
    iterate: Array
    average: Array


def averaged_init(theta: Array, params: Options) -> Averaged:
    return Averaged(inner=rule_init(theta, params), iterate=theta, average=theta)


def averaged_look(theta: Array, state: Averaged) -> Array:
    return state.average


def averaged_size(state: Averaged, params: Options) -> Array:
    return probe_size(abs(state.iterate), params)


def averaged_shift(state: Averaged, grad: Array, count: Array, t: int, params: Options) -> Array:
    return tensor_shift(averaged_size(state, params), random_sign(np.int64(t), np.int64(0)))


def averaged_update(theta: Array, state: Averaged, batch: Moments, count: Array, t: int, params: Options) -> Any:
    """The rule, its curvature seen at some steps only, and the average of where it went."""
    known = state.inner.mean
    due = (t % params.curvature_every == 0) | (state.inner.seen < params.bootstrap)
    curv = known.curv + due * (batch.curv - known.curv)
    curv_sq = known.curv_sq + due * (batch.curv_sq - known.curv_sq)
    weight = averaging_weight(state.inner.seen, count, params)
    seen = Moments(grad=batch.grad, grad_sq=batch.grad_sq, curv=curv, curv_sq=curv_sq)
    guess = guessed_curvature(known.curv, known.grad, averaged_size(state, params))
    own = Neighbours(params.neighbours * (known.curv + guess), params.neighbours * (known.curv_sq + guess * guess))
    theta, inner, info = rule_step(theta, state.inner, seen, count, params, None, own)
    return theta, Averaged(inner=inner, iterate=theta, average=follow(state.average, theta, weight)), info.rate


def vsgd_networks(options: Options = NETWORKS) -> Algorithm:
    """What networks are trained with by default, for a tensor of one coordinate: it has no neighbours but itself."""
    return Algorithm(
        "vSGD, networks",
        options,
        averaged_init,
        averaged_update,
        SHIFTED_GRADIENT,
        averaged_shift,
        options.bootstrap,
        averaged_look,
    )


def sharing(algorithm: Algorithm, share: Callable[[Moments], Moments], name: str) -> Algorithm:
    """The same with statistics shared between coordinates; see `vsgd.blocks`."""

    def update(theta: Array, state: State, batch: Moments, count: Array, t: int, params: Options) -> Any:
        theta, state, info = rule_step(theta, state, batch, count, params, share)
        return theta, state, info.rate

    return algorithm._replace(update=update, name=name)
