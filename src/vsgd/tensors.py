"""What the optimizers for whole tensors share, in torch and in JAX: how a tensor learns, and what it is told of itself.

Plain arithmetic, as `vsgd.core` explains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vsgd.algorithms import networks, paper
from vsgd.algorithms.networks import Networks, TensorContext
from vsgd.algorithms.paper import Paper
from vsgd.core import Array, Info, Moments, State, larger, square_root

Config = Paper | Networks

LEAST_PROBE = 1e-5
"""No usual probe is smaller; differences of gradients will be divided by it, and squared."""

UNLIMITED = 1e18
"""Stands for no limit, and one over it for the smallest probe; squares of both are still a float32."""

LEAST_SIZE = 1e-30
"""Stands for the size of a probe before the first one."""

LEAST_NORM = 1e-30
"""Stands for the norm of a gradient that is zero."""


ROUNDING = 1e-5
"""A gradient whose norm is below this fraction of the largest is rounding, as that of a bias before BatchNorm."""


class Totals(NamedTuple):
    """Numbers per tensor: sums over its coordinates, and more."""

    grad_sq: Array
    """Σ v̄"""
    signal: Array
    """Σ ḡ²"""
    curv: Array
    """Σ |h̄^fd|"""
    curv_sq: Array
    probe_size: Array
    scale: Array
    """The largest RMS that the tensor has had."""


def averages_iterates(config: Config) -> bool:
    """Are the weights to evaluate an average of the iterates?"""
    return isinstance(config, Networks) and bool(config.average_iterates)


# The three ways to learn that there are, with one signature.


def learn_decoupled(state: State, batch: Moments, count: Any, config: Any, tensor: Any) -> tuple[State, Info]:
    return networks.learn(state, batch, count, config, tensor, True)


def learn_coupled(state: State, batch: Moments, count: Any, config: Any, tensor: Any) -> tuple[State, Info]:
    unsigned = Moments(batch.grad, batch.grad_sq, abs(batch.curv), batch.curv_sq)
    return networks.learn(state, unsigned, count, config, tensor, False)


def learn_paper(state: State, batch: Moments, count: Any, config: Any, tensor: Any) -> tuple[State, Info]:
    unsigned = Moments(batch.grad, batch.grad_sq, abs(batch.curv), batch.curv_sq)
    return paper.learn(state, unsigned, count, config)


def learn_of(config: Config, decoupled: bool) -> Callable[..., tuple[State, Info]]:
    """How a tensor learns, whose coordinates are `decoupled` or not."""
    if isinstance(config, Paper):
        return learn_paper
    return learn_decoupled if decoupled else learn_coupled


def context(totals: Totals, length: Array, config: Config, horizon: Array) -> TensorContext:
    """What coordinates are told of their tensor, which has `length` of them, and of the horizon.

    Those of the paper share nothing, have no limit, and look one step ahead.
    """
    if isinstance(config, Paper):
        zero = 0 * totals.scale
        return TensorContext(zero, zero, grad_clip=zero + UNLIMITED, step_limit=zero + UNLIMITED, horizon=zero + 1)
    signal_rms, grad_rms = square_root(totals.signal / length), square_root(totals.grad_sq / length)
    size = larger(totals.probe_size, LEAST_SIZE)
    return networks.context(totals.curv / length, totals.curv_sq / length, signal_rms, grad_rms, size, config, horizon)


def probe_size(scale: Array, config: Networks) -> Array:
    """|δ|, never so small that its square vanishes."""
    return larger(networks.probe_size(scale, config), 1 / UNLIMITED)


def expected_norm_sq(totals: Totals, count: Array) -> Array:
    """E‖∇‖² of the mean gradient over `count` samples."""
    return (totals.grad_sq + (count - 1) * totals.signal) / (count + (count < 1) * (1 - count))


def gradient_limit(largest: float) -> float:
    """No gradient, and no square of one, is usable beyond this, where `largest` is the largest number there is."""
    return largest * LEAST_PROBE**2


def averaging_weight(seen: Array, window: Array, config: Networks) -> Array:
    """The weight with which a new iterate enters the average: all of it until the bootstrap is over.

    `seen` are the samples before the step.
    """
    return (seen >= config.bootstrap) / window + (seen < config.bootstrap)


def weight_decay(strength: Array, step_norm_sq: Array, length: Array) -> Array:
    """Return the decay d of a tensor in θ ← (θ − step) / (1 + d): `strength` times the RMS of its step.

    AdamW shrinks weights by `strength` times its learning rate, which is about the RMS of its steps, so a `strength`
    chosen for AdamW has the same effect here. The RMS does not depend on the basis.

    Args:
        strength: weight decay as in AdamW.
        step_norm_sq: squared norm of the tensor's step.
        length: number of its coordinates.
    """
    return strength * square_root(step_norm_sq / length)


def probe_seed(step: Any, place: int) -> Any:
    """Of the random signs, 63 bits: different for every step and every parameter, which `place` numbers."""
    return (step * 0x9E3779B97F4A7C15 + place * 0xBF58476D1CE4E5B9) & ((1 << 63) - 1)
