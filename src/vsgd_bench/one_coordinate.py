"""The default for networks on tensors of one coordinate each, for the simulator.

The front ends call the same functions of `vsgd.algorithms.networks` for tensors of any size.
"""

from __future__ import annotations

from typing import NamedTuple

from vsgd.algorithms.networks import (
    NETWORKS,
    Averaging,
    Networks,
    averaging,
    context,
    learn,
    length_scale,
    limited_step,
    probe_size,
)
from vsgd.core import Info, Moments, PerCoordinate, ema, square_root, zero_state
from vsgd.core import State as CoreState


class State(NamedTuple):
    """Statistics, the average θ̄ of the iterates and its window, the length scale, and the number of steps."""

    inner: CoreState
    average: PerCoordinate
    averaging: Averaging
    scale: PerCoordinate
    steps: PerCoordinate


def init(theta: PerCoordinate, config: Networks = NETWORKS) -> State:
    """Return the state before the first sample. Each entry of `theta` is a separate tensor."""
    zero = abs(theta - theta)
    inner = zero_state(theta, config.memory)
    return State(inner, theta, Averaging(zero + config.min_window, zero), length_scale(zero, theta, config), zero)


def update(
    theta: PerCoordinate, state: State, batch: Moments, count: PerCoordinate, config: Networks
) -> tuple[PerCoordinate, State, Info]:
    """Take one step. In a batch without a second gradient, the curvatures are the averages so far.

    The loss is not known here, so rates are optimal for a single step.
    """
    mean = state.inner.mean
    size = probe_size(state.scale, config)
    tensor = context(abs(mean.curv), mean.curv_sq, abs(mean.grad), square_root(mean.grad_sq), size, config)
    inner, info = learn(state.inner, batch, count, config, tensor, True)
    off = theta - state.average
    steps = state.steps + (count > 0)
    new = averaging(state.averaging, off * (batch.grad - abs(inner.mean.curv) * off / 2), steps, config)
    window = ema(state.averaging.window, new.window, count > 0)
    better = ema(state.averaging.advantage, new.advantage, count > 0)
    theta = theta - limited_step(info.rate, batch.grad, mean.grad_sq, tensor)
    started = state.inner.seen >= config.bootstrap
    weight = (count > 0) * (started / state.averaging.window + (started == 0))
    average = ema(state.average, theta, weight)
    scale = length_scale(state.scale, theta, config)
    return theta, State(inner, average, Averaging(window, better), scale, steps), info


def evaluation_point(theta: PerCoordinate, state: State) -> PerCoordinate:
    """Return the average of the iterates."""
    return state.average
