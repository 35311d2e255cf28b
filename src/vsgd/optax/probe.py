"""The probe: its length scale, where the second gradient is taken, and the curvature that follows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from vsgd.algorithms import networks
from vsgd.algorithms.strategy import Config, distance_to_zero_loss, probe_seed, strategy_of
from vsgd.core import measured_curvature
from vsgd.optax.checks import check_like_parameters
from vsgd.optax.coordinates import Tensor
from vsgd.optax.int64 import Int64
from vsgd.optax.minibatch import Local, in_coordinates, in_leaf_order, is_usable, products, tensors_of
from vsgd.optax.samples import GradFn, Params, SampleGradients

Curvature = tuple[Array, Array]
"""Mean h^fd of each coordinate of a group, and mean square of h^fd."""


def measure_scales(
    work: list[Local], sizes: Array, scale: Array, norm_sq: Array, step: Array, value: Array | None, config: Config
) -> tuple[Array, Array]:
    """Return length scale and RMS of each tensor.

    The length scale is the largest RMS so far, of the tensor or of all parameters together. If all parameters are zero
    at the start it is the distance per coordinate to a loss of zero.

    Args:
        work: parameters of each group.
        sizes: number of coordinates of each tensor.
        scale: length scale of each tensor before the step.
        norm_sq: squared norm of the gradient of each tensor.
        step: number of steps before this one.
        value: loss of the minibatch, or None.
        config: constants of the algorithm.
    """
    theta = [p for w in work for p in w.theta]
    (norms,) = products(work, theta, theta)
    size = sum(p.size for p in theta)
    overall = norms.sum() / size
    least = jnp.zeros_like(overall)
    if value is not None:
        least = jnp.where(step == 0, distance_to_zero_loss(value, norm_sq.sum(), size), 0)
    mean_sq = norms / sizes
    new = strategy_of(config).length_scale(scale, mean_sq, overall, least, config)
    return jnp.asarray(new, scale.dtype), jnp.sqrt(mean_sq)


def measure(
    work: list[Local],
    scale: Array,
    params: Params,
    grad_fn: GradFn,
    count: Array,
    step: Array,
    config: Config,
    seed: Any,
) -> tuple[list[Curvature], Array, Array]:
    """Return the curvature of each group, the mean of δ² of each tensor, and whether the gradients were usable.

    Both gradients of a difference come from `grad_fn`, because the one that was passed to `update` may have been
    clipped or accumulated.
    """
    structure: Any = jax.tree.structure(params)
    deltas, shifts = [], []
    sizes = strategy_of(config).probe_size(scale, config)
    for w in work:
        delta = offsets(w, sizes[w.columns].astype(w.precision), step, count, config, seed)
        shift = w.rotate_back(delta)
        if not w.group.tensors[0].decoupled:  # the offset after rounding to the precision of the parameters
            ends = [probed_point(*each, 1) for each in zip(w.group.tensors, w.theta, shift, strict=True)]
            delta = w.group.join([end.astype(w.precision) - p for end, p in zip(ends, w.theta, strict=True)])
        deltas.append(delta)
        shifts += shift
    theta = [p for w in work for p in w.theta]

    def point(share: Any) -> Params:
        ends = [probed_point(*each, share) for each in zip(tensors_of(work), theta, shifts, strict=True)]
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
    usable = jnp.stack([is_usable(square, w.precision) for square, w in zip(squares, work, strict=True)]).all()

    def curvature(w: Local, diff: Array, square: Array, delta: Array) -> Curvature:
        return measured_curvature(w.state.mean, jnp.where(usable, diff, 0), jnp.where(usable, square, 0), delta)

    sums = jnp.concatenate([w.group.sums(delta * delta)[0] for w, delta in zip(work, deltas, strict=True)])
    return [curvature(*each) for each in zip(work, diffs, squares, deltas, strict=True)], sums, usable


def probed_point(tensor: Tensor, theta: Array, shift: Array, share: Any) -> Array:
    """Return θ + share · shift in the precision of the parameter."""
    return (theta + jnp.asarray(share, theta.dtype) * shift).astype(tensor.dtype)


def offsets(w: Local, size: Array, step: Array, count: Array, config: Config, seed: Any) -> Array:
    """Return δ of every coordinate, 0 for padding; `size` is |δ| of each tensor."""
    places: Any = Int64.of(seed) * (1 << 20) + Int64.array([tensor.place for tensor in w.group.tensors])
    seeds = probe_seed(Int64.of(step), places)
    spread = Int64(*w.group.spread(jnp.stack([seeds.high, seeds.low])))
    bits = networks.random_bit(Int64.of(w.group.positions()), spread).low
    count = count.astype(w.precision)
    delta = strategy_of(config).probe(w.state, w.grad, count, w.group.spread(size), bits, config)
    return jnp.where(w.group.is_padding(), 0, delta)


def differences(work: list[Local], first: Params, second: Params) -> tuple[list[Array], list[Array]]:
    """Return ∇_{θ+δ} − ∇_θ of a sample and its square; its absolute value where coordinates are not decoupled."""
    leaves = [jax.tree.leaves(grads) for grads in (first, second)]
    diffs = [w.rotate([b - a for a, b in zip(*map(w.select, leaves), strict=True)]) for w in work]
    diffs = [diff if w.group.tensors[0].decoupled else abs(diff) for w, diff in zip(work, diffs, strict=True)]
    return diffs, [diff * diff for diff in diffs]
