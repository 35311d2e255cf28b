"""One step: collect the gradient, probe if that is due, learn in coordinates, move in the parameters' own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from vsgd import eigenbasis
from vsgd.algorithms import networks, paper
from vsgd.algorithms.networks import Averaging, Networks, Progress
from vsgd.algorithms.paper import Paper
from vsgd.core import Moments, descend, ema, measured_curvature
from vsgd.core import State as CoreState
from vsgd.eigenbasis import Basis
from vsgd.optax.checks import check_like_parameters
from vsgd.optax.coordinates import Tensor, back, into, signs_of_size, turn
from vsgd.optax.samples import GradFn, Params, SampleGradients
from vsgd.tensors import (
    LEAST_NORM,
    Config,
    Totals,
    averaging_weight,
    context,
    expected_norm_sq,
    gradient_limit,
    learn_of,
    probe_size,
    weight_decay,
)


class State(NamedTuple):
    """What the optimizer remembers. Trees have the structure of the parameters, and one array for each."""

    step: Array
    """Steps so far, without those that were skipped."""
    skipped: Array
    """Steps that were skipped because a gradient was not finite, or too large to be squared."""
    seen: Array
    """Samples so far."""
    mean: Moments
    """Four trees."""
    memory: Params
    totals: Params
    """`Totals` of each tensor, as one array."""
    basis: Basis
    """Four trees. A side that stays as it is has a basis of a single number."""
    average: Params
    """The average of the iterates before the newest, the parameters, enters it with `weight`; None if there is none."""
    weight: Array
    averaging: Averaging
    bend: Array
    """½ (θ−θ̄)ᵀ|H|(θ−θ̄), as it was at the last probe."""
    progress: Progress
    unprobed: Array
    """Steps since the last that took a second gradient. Length scales are measured after that one."""


class Local(NamedTuple):
    """One tensor in a step: what it remembers, and what the minibatch says of it."""

    tensor: Tensor
    theta: Array
    average: Any
    """None if iterates are not averaged."""
    plain_grad: Array
    """The mean gradient in the parameter's own coordinates; the rest is in those of its basis."""
    grad: Array
    grad_sq: Any
    """Mean square over the samples; None if the minibatch is one."""
    mean: Moments
    """In the precision in which it is kept."""
    memory: Array
    seen: Array
    totals: Totals
    basis: Basis

    @property
    def state(self) -> CoreState:
        """The statistics in the precision of the computation."""
        mean = Moments(*(part.astype(self.tensor.precision) for part in self.mean))
        return CoreState(mean, self.memory, self.seen)


class Learned(NamedTuple):
    """What one tensor has learned from a minibatch."""

    mean: Moments
    memory: Array
    step: Array
    totals: Totals


def curvature_dtype(tensor: Tensor, config: Config) -> Any:
    """Curvature of networks is known to a few percent at best, so bfloat16 will do for it."""
    coarse = isinstance(config, Networks) and tensor.precision == jnp.float32
    return jnp.bfloat16 if coarse else tensor.precision


def take_step(
    config: Config,
    tensors: list[Tensor],
    grads: Params,
    state: State,
    params: Params,
    grad_fn: GradFn,
    value: Array | None,
    strength: float,
) -> tuple[Params, State]:
    """The updates, to be added to the parameters, and the new state."""
    structure: Any = jax.tree.structure(params)
    samples = grad_fn.count if isinstance(grad_fn, SampleGradients) else 1
    count = jnp.asarray(samples, state.seen.dtype)
    work = collect(tensors, grads, state, params, grad_fn)
    usable = all_of(is_usable(part, w.tensor) for w in work for part in (squared_norm(w.grad), w.grad_sq))
    if value is not None:
        usable &= jnp.isfinite(value)
    scales = lax.cond(
        (state.unprobed == 0) & usable,
        lambda: length_scales(work, state, value, config),
        lambda: [w.totals.scale for w in work],
    )
    work = [w._replace(totals=w.totals._replace(scale=scale)) for w, scale in zip(work, scales, strict=True)]

    due = usable & probe_is_due(work, state, count, config)
    # the compiler runs a branch on one processor, so there is only in it what is to be saved
    probed, usable = lax.cond(
        due,
        lambda: measure(work, state, params, grad_fn, count, config),
        lambda: ([(w.state.mean.curv, w.state.mean.curv_sq, w.totals.probe_size) for w in work], usable),
    )
    horizon = state.progress.horizon
    learned = [learn(w, curvature, count * usable, horizon, config) for w, curvature in zip(work, probed, strict=True)]
    new_bend = lax.cond(due, lambda: bend(work, learned, state), lambda: state.bend)
    bases, means = turn_bases(work, learned, state, usable)
    averaging, progress = state.averaging, state.progress
    if isinstance(config, Networks) and state.average is not None:
        gain = total(jnp.sum(w.plain_grad * (w.theta - w.average)) for w in work)
        averaging = networks.averaging(averaging, gain - new_bend, state.step + 1, config)
        weight = usable * averaging_weight(state.seen, state.averaging.window, config)
        if value is not None:
            progress = networks.progress(progress, value, new_bend, state.step, config)
    else:
        weight = state.weight

    def tree(leaves: Iterable[Any]) -> Params:
        return structure.unflatten(leaves)

    def if_usable(new: Array, old: Array) -> Array:
        return jnp.where(usable, new, old).astype(old.dtype)

    moves = (move(w, each.step, strength) for w, each in zip(work, learned, strict=True))
    updates = [move.astype(w.tensor.dtype) for w, move in zip(work, moves, strict=True)]
    return tree(updates), State(
        step=jnp.where(usable, optax.safe_increment(state.step), state.step),
        skipped=jnp.where(usable, state.skipped, optax.safe_increment(state.skipped)),
        seen=state.seen + count * usable,
        mean=Moments(tree(means), *(tree(each.mean[k] for each in learned) for k in (1, 2, 3))),
        memory=tree(each.memory for each in learned),
        totals=tree(
            jnp.where(usable, jnp.stack(each.totals), jnp.stack(w.totals))
            for w, each in zip(work, learned, strict=True)
        ),
        basis=Basis(*(tree(basis[k] for basis in bases) for k in range(len(Basis._fields)))),
        average=None if state.average is None else tree(w.average for w in work),
        weight=weight.astype(state.weight.dtype),
        averaging=jax.tree.map(if_usable, averaging, state.averaging),
        bend=if_usable(new_bend, state.bend),
        progress=jax.tree.map(if_usable, progress, state.progress),
        unprobed=jnp.where(usable, jnp.where(due, 0, state.unprobed + 1), state.unprobed),
    )


# --- statistics ---------------------------------------------------------------------------------------------------


def collect(tensors: list[Tensor], grads: Params, state: State, params: Params, grad_fn: GradFn) -> list[Local]:
    """What there is of each tensor. The newest iterate, which is the parameter, enters its average."""
    columns = (params, grads, *state.mean, state.memory, state.totals, *state.basis)
    averages = [None] * len(tensors) if state.average is None else jax.tree.leaves(state.average)
    work = []
    for tensor, average, p, grad, *rest in zip(tensors, averages, *map(jax.tree.leaves, columns), strict=True):
        dtype = tensor.precision
        mean, (memory, totals), basis = Moments(*rest[:4]), rest[4:6], Basis(*rest[6:])
        theta, plain = jnp.asarray(p, dtype), jnp.asarray(grad, dtype)
        if average is not None:
            average = ema(average, theta, state.weight.astype(dtype))
        rotated, seen = into(tensor, plain, basis), state.seen.astype(dtype)
        work.append(Local(tensor, theta, average, plain, rotated, None, mean, memory, seen, Totals(*totals), basis))
    if isinstance(grad_fn, SampleGradients):
        squares = grad_fn.mean(lambda gradient_at: [g * g for g in in_coordinates(work, gradient_at(params))])
        work = [w._replace(grad_sq=square) for w, square in zip(work, squares, strict=True)]
    return work


def in_coordinates(work: list[Local], grads: Params) -> list[Array]:
    """Gradients in the coordinates of the bases."""
    leaves = jax.tree.leaves(grads)
    return [into(w.tensor, jnp.asarray(g, w.tensor.precision), w.basis) for w, g in zip(work, leaves, strict=True)]


def is_usable(values: Array | None, tensor: Tensor) -> Array:
    """Are all numbers finite, and small enough for what will be done with them?"""
    if values is None:
        return jnp.asarray(True)
    largest = jnp.max(abs(values), initial=0)
    return largest < gradient_limit(float(np.finfo(tensor.precision).max))


def squared_norm(values: Array) -> Array:
    return jnp.sum(values * values)


def all_of(answers: Iterable[Array]) -> Array:
    return functools.reduce(operator.and_, answers, jnp.asarray(True))


def total(numbers: Iterable[Array]) -> Array:
    return functools.reduce(operator.add, numbers, jnp.zeros((), jnp.result_type(float)))


def length_scales(work: list[Local], state: State, value: Array | None, config: Config) -> list[Array]:
    """The length scale of each tensor: the largest RMS so far, of the tensor or of all parameters together.

    Where all parameters are zero at the start it is how far, per coordinate, the loss takes to vanish at its slope.
    """
    if not isinstance(config, Networks):
        return [w.totals.scale for w in work]
    size = sum(w.tensor.size for w in work)
    norms = [squared_norm(w.theta) for w in work]
    overall = total(norms) / size
    least = jnp.zeros_like(overall)
    if value is not None:
        slope = jnp.sqrt(total(squared_norm(w.plain_grad) for w in work) * size)
        least = jnp.where(state.step == 0, abs(value) / jnp.maximum(slope, LEAST_NORM), 0)

    def scale_of(w: Local, norm: Array) -> Array:
        rms = jnp.sqrt(jnp.maximum(norm / max(w.tensor.size, 1), overall))
        scale = networks.length_scale(w.totals.scale, jnp.where(overall > 0, rms, least), config)
        return jnp.asarray(scale, w.totals.scale.dtype)

    return [scale_of(w, norm) for w, norm in zip(work, norms, strict=True)]


# --- the probe ----------------------------------------------------------------------------------------------------


def probe_is_due(work: list[Local], state: State, count: Array, config: Config) -> Array:
    """By the schedule, because averages are just being started, or because a gradient is unusually long."""
    if isinstance(config, Paper):
        return jnp.asarray(paper.probe_due(0, config))
    usual = all_of(~networks.is_long(squared_norm(w.grad), expected_norm_sq(w.totals, count), config) for w in work)
    return jnp.asarray(networks.probe_due(state.unprobed, ~usual, config) | (state.seen < config.bootstrap))


def measure(
    work: list[Local], state: State, params: Params, grad_fn: GradFn, count: Array, config: Config
) -> tuple[list[tuple[Array, Array, Array]], Array]:
    """Mean h^fd and its mean square of each tensor, the size of its probe, and whether these numbers are usable."""
    structure: Any = jax.tree.structure(params)
    deltas, held = [], []
    for w in work:
        delta = offset(w, state, count, config)
        probed = (w.theta + back(w.tensor, delta, w.basis)).astype(w.tensor.dtype)
        deltas.append(delta if w.tensor.decoupled else probed.astype(w.tensor.precision) - w.theta)
        held.append(probed)
    there = structure.unflatten(held)
    if isinstance(grad_fn, SampleGradients):
        diffs, squares = grad_fn.mean(lambda gradient_at: differences(work, gradient_at(params), gradient_at(there)))
    else:
        second = grad_fn(there)
        check_like_parameters("the result of grad_fn", second, params)
        diffs = [b - w.grad for b, w in zip(in_coordinates(work, second), work, strict=True)]
        squares = [diff * diff for diff in diffs]
    usable = all_of(is_usable(square, w.tensor) for square, w in zip(squares, work, strict=True))
    measured = []
    for w, diff, square, delta in zip(work, diffs, squares, deltas, strict=True):
        diff, square = jnp.where(usable, diff, 0), jnp.where(usable, square, 0)
        size = jnp.sqrt(squared_norm(delta) / max(w.tensor.size, 1))
        measured.append((*measured_curvature(w.state.mean, diff, square, delta), size))
    return measured, usable


def offset(w: Local, state: State, count: Array, config: Config) -> Array:
    """δ of every coordinate."""
    if isinstance(config, Paper):
        return jnp.asarray(paper.probe(w.state, w.grad, count.astype(w.tensor.precision), config))
    return signs_of_size(w.tensor, probe_size(w.totals.scale, config), state.step)


def differences(work: list[Local], first: Params, second: Params) -> tuple[list[Array], list[Array]]:
    """∇_{θ+δ} − ∇_θ of a sample, or its size where coordinates are not decoupled, and its square."""
    pairs = zip(work, in_coordinates(work, first), in_coordinates(work, second), strict=True)
    diffs = [b - a if w.tensor.decoupled else abs(b - a) for w, a, b in pairs]
    return diffs, [diff * diff for diff in diffs]


# --- learning -----------------------------------------------------------------------------------------------------


def learn(w: Local, measured: tuple[Array, Array, Array], count: Array, horizon: Array, config: Config) -> Learned:
    """Learn from the minibatch, whose curvature is that of the averages so far if it was not measured.

    A count of 0 changes nothing, whatever the gradient is.
    """
    state, kept = w.state, curvature_dtype(w.tensor, config)
    curv, curv_sq, size = measured
    totals = w.totals._replace(probe_size=size)
    shared = context(totals, max(w.tensor.size, 1), config, horizon.astype(w.tensor.precision))
    count = count.astype(w.tensor.precision)
    grad = jnp.where(count > 0, w.grad, 0)
    grad_sq = grad * grad if w.grad_sq is None else jnp.where(count > 0, w.grad_sq, 0)
    batch = Moments(grad, grad_sq, curv, curv_sq)
    new, info = learn_of(config, w.tensor.decoupled)(state, batch, count, config, shared)
    step = networks.limited_step(info.rate, grad, state.mean.grad_sq, shared)
    mean = new.mean._replace(curv=new.mean.curv.astype(kept), curv_sq=new.mean.curv_sq.astype(kept))
    rounded = w._replace(mean=mean).state.mean
    totals = totals._replace(
        grad_sq=jnp.sum(rounded.grad_sq),
        signal=squared_norm(rounded.grad),
        curv=jnp.sum(abs(rounded.curv)),
        curv_sq=jnp.sum(rounded.curv_sq),
    )
    return Learned(mean, new.memory, step, totals)


def bend(work: list[Local], learned: list[Learned], state: State) -> Array:
    """½ (θ−θ̄)ᵀ|H|(θ−θ̄), in coordinates in which H is nearly diagonal."""
    if state.average is None:
        return state.bend

    def of_tensor(w: Local, curv: Array) -> Array:
        off = into(w.tensor, w.theta - w.average, w.basis)
        return jnp.sum(abs(curv.astype(off.dtype)) * off * off) / 2

    return total(of_tensor(w, each.mean.curv) for w, each in zip(work, learned, strict=True))


def move(w: Local, step: Array, strength: float) -> Array:
    """What is added to the parameter, in its own coordinates; weight decay with this `strength` included."""
    plain = back(w.tensor, step, w.basis)
    if strength == 0:
        return -plain
    decay = weight_decay(strength, squared_norm(step), max(w.tensor.size, 1))
    return jnp.where(decay > 0, descend(w.theta, plain, decay) - w.theta, -plain)


def turn_bases(
    work: list[Local], learned: list[Learned], state: State, usable: Array
) -> tuple[list[Basis], list[Array]]:
    """The bases after the minibatch, and ḡ in them."""
    bases, means = [w.basis for w in work], [each.mean.grad for each in learned]
    rotated = [k for k, w in enumerate(work) if w.tensor.blocks != (1, 1)]

    def turned() -> list[tuple[Basis, Array]]:
        return [turn(work[k].tensor, bases[k], work[k].plain_grad, means[k], state.step) for k in rotated]

    def kept() -> list[tuple[Basis, Array]]:
        return [(bases[k], means[k]) for k in rotated]

    if rotated:
        new = lax.cond(usable & eigenbasis.observes(state.step), turned, kept)
        for k, (basis, mean) in zip(rotated, new, strict=True):
            bases[k], means[k] = basis, mean
    return bases, means
