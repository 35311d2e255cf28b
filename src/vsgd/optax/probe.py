"""The probe: when a second gradient is due, where it is taken, and the curvature that follows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from vsgd.algorithms import networks
from vsgd.algorithms.strategy import Config, distance_to_zero_loss, probe_seed, strategy_of
from vsgd.core import measured_curvature
from vsgd.optax.checks import check_like_parameters
from vsgd.optax.coordinates import Tensor
from vsgd.optax.int64 import Int64
from vsgd.optax.minibatch import Local, all_of, in_coordinates, in_leaf_order, is_usable, total
from vsgd.optax.samples import GradFn, Params, SampleGradients


class Curvature(NamedTuple):
    """Curvature of a group that a probe has measured, or the averages so far."""

    curv: Array
    """Mean h^fd of each coordinate."""
    curv_sq: Array
    """Mean square of h^fd."""
    probe_size: Array
    """RMS of δ of each tensor."""


class Scales(NamedTuple):
    """Sizes of the tensors of a group, which are columns of its `Totals`."""

    scale: Array
    """Length scale."""
    rms: Array
    """RMS of the weights."""


def known_scales(w: Local) -> Scales:
    """Return the sizes that were measured last."""
    return Scales(w.totals.scale, w.totals.rms)


def measure_scales(work: list[Local], step: Array, value: Array | None, config: Config) -> list[Scales]:
    """Return length scale and RMS of each tensor.

    The length scale is the largest RMS so far, of the tensor or of all parameters together. If all parameters are zero
    at the start it is the distance per coordinate to a loss of zero.
    """
    size = sum(tensor.size for w in work for tensor in w.group.tensors)
    norms = [w.group.sums(w.group.join([p * p for p in w.theta]))[0] for w in work]
    overall = total(norm.sum() for norm in norms) / size
    least = jnp.zeros_like(overall)
    if value is not None:
        distance = distance_to_zero_loss(value, total(w.norm_sq.sum() for w in work), size)
        least = jnp.where(step == 0, distance, 0)

    def scales_of(w: Local, norm: Array) -> Scales:
        mean_sq = norm / w.sizes
        scale = strategy_of(config).length_scale(w.totals.scale, mean_sq, overall, least, config)
        return Scales(jnp.asarray(scale, w.totals.scale.dtype), jnp.sqrt(mean_sq))

    return [scales_of(w, norm) for w, norm in zip(work, norms, strict=True)]


def is_due(work: list[Local], unprobed: Array, seen: Array, count: Array, config: Config) -> Array:
    """Return whether a probe is due: by the schedule, in the bootstrap, or because a gradient is unusually long."""
    strategy = strategy_of(config)
    usual = all_of(~strategy.is_long(w.norm_sq, w.totals, count, config).any() for w in work)
    return jnp.asarray(strategy.probe_due(seen < config.bootstrap, unprobed, ~usual, config))


def known_curvature(w: Local) -> Curvature:
    """Return the averages so far, which stand in for a measurement."""
    mean = w.state.mean
    return Curvature(mean.curv, mean.curv_sq, w.totals.probe_size)


def measure(
    work: list[Local], params: Params, grad_fn: GradFn, count: Array, step: Array, config: Config, seed: Any
) -> tuple[list[Curvature], Array]:
    """Return the curvature of each group, and whether the gradients were usable.

    Both gradients of a difference come from `grad_fn`, because the one that was passed to `update` may have been
    clipped or accumulated.
    """
    structure: Any = jax.tree.structure(params)
    deltas, shifts = [], []
    for w in work:
        delta = offsets(w, step, count, config, seed)
        shift = w.rotate_back(delta)
        if not w.group.tensors[0].decoupled:  # the offset after rounding to the precision of the parameters
            ends = [probed_point(*each, 1) for each in zip(w.group.tensors, w.theta, shift, strict=True)]
            delta = w.group.join([end.astype(w.precision) - p for end, p in zip(ends, w.theta, strict=True)])
        deltas.append(delta)
        shifts.append(shift)

    def point(share: Any) -> Params:
        ends = [
            [probed_point(*each, share) for each in zip(w.group.tensors, w.theta, shift, strict=True)]
            for w, shift in zip(work, shifts, strict=True)
        ]
        return structure.unflatten(in_leaf_order(work, ends))

    if isinstance(grad_fn, SampleGradients):
        there = point(1)
        diffs, squares = grad_fn.mean(lambda gradient_at: differences(work, gradient_at(params), gradient_at(there)))
    else:

        def subtract(earlier: list[Array], share: Array) -> tuple[list[Array], None]:
            grads = grad_fn(point(share))
            check_like_parameters("the result of grad_fn", grads, params)
            return [g - first for g, first in zip(in_coordinates(work, grads), earlier, strict=True)], None

        # a loop of two turns, so that the gradient is compiled once
        diffs, _ = lax.scan(subtract, [jnp.zeros_like(w.grad) for w in work], jnp.arange(2))
        squares = [diff * diff for diff in diffs]
    usable = all_of(is_usable(square, w) for square, w in zip(squares, work, strict=True))

    def curvature(w: Local, diff: Array, square: Array, delta: Array) -> Curvature:
        diff, square = jnp.where(usable, diff, 0), jnp.where(usable, square, 0)
        size = jnp.sqrt(w.group.sums(delta * delta)[0] / w.sizes)
        return Curvature(*measured_curvature(w.state.mean, diff, square, delta), size)

    return [curvature(*each) for each in zip(work, diffs, squares, deltas, strict=True)], usable


def probed_point(tensor: Tensor, theta: Array, shift: Array, share: Any) -> Array:
    """Return θ + share · shift in the precision of the parameter."""
    return (theta + jnp.asarray(share, theta.dtype) * shift).astype(tensor.dtype)


def offsets(w: Local, step: Array, count: Array, config: Config, seed: Any) -> Array:
    """Return δ of every coordinate, 0 for padding."""
    strategy = strategy_of(config)
    places: Any = Int64.of(seed) * (1 << 20) + Int64.array([tensor.place for tensor in w.group.tensors])
    seeds = probe_seed(Int64.of(step), places)
    spread = Int64(*w.group.spread(jnp.stack([seeds.high, seeds.low])))
    bits = networks.random_bit(Int64.of(w.group.positions()), spread).low
    size = w.group.spread(strategy.probe_size(w.totals.scale, config))
    delta = strategy.probe(w.state, w.grad, count.astype(w.precision), size, bits, config)
    return jnp.where(w.group.is_padding(), 0, delta)


def differences(work: list[Local], first: Params, second: Params) -> tuple[list[Array], list[Array]]:
    """Return ∇_{θ+δ} − ∇_θ of a sample and its square; its absolute value where coordinates are not decoupled."""
    pairs = zip(work, in_coordinates(work, first), in_coordinates(work, second), strict=True)
    diffs = [b - a if w.group.tensors[0].decoupled else abs(b - a) for w, a, b in pairs]
    return diffs, [diff * diff for diff in diffs]
