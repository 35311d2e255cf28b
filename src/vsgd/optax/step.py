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
from vsgd.algorithms import networks
from vsgd.algorithms.networks import Averaging, Progress, TensorContext
from vsgd.algorithms.strategy import (
    Config,
    Totals,
    distance_to_zero_loss,
    gradient_limit,
    limited_step,
    probe_seed,
    strategy_of,
    weight_decay,
)
from vsgd.core import Moments, descend, ema, measured_curvature
from vsgd.core import State as CoreState
from vsgd.eigenbasis import Basis
from vsgd.optax.checks import check_like_parameters
from vsgd.optax.coordinates import Tensor, back, into, observed_basis, turned_basis
from vsgd.optax.groups import Group
from vsgd.optax.int64 import Int64
from vsgd.optax.samples import GradFn, Params, SampleGradients


class Settings(NamedTuple):
    """Arguments of `vsgd` that are used in a step. All but `algorithm` may be traced."""

    algorithm: Config
    lr: Any
    weight_decay: Any
    seed: Any


class State(NamedTuple):
    """State of the optimizer.

    Statistics of coordinates are tuples with one array per group of tensors, see `vsgd.optax.groups`. Trees have the
    structure of the parameters.
    """

    step: Array
    """Steps so far, without those that were skipped."""
    skipped: Array
    """Steps that were skipped because a gradient was not finite, or too large to be squared."""
    seen: Array
    """Samples so far."""
    mean: Moments
    """Four tuples."""
    memory: tuple[Array, ...]
    totals: tuple[Array, ...]
    """`Totals` of the tensors of each group, one column per tensor."""
    basis: Basis
    """Four trees. A side that stays as it is has a basis of a single number."""
    average: Params
    """Tree: average of the iterates before the parameters, the newest, enter it with `weight`; None if not averaged."""
    weight: Array
    averaging: Averaging
    curvature_penalty: Array
    """½ (θ−θ̄)ᵀ|H|(θ−θ̄), as it was at the last probe."""
    progress: Progress
    unprobed: Array
    """Steps since the last probe. Length scales are measured after that one."""


class Local(NamedTuple):
    """A group of tensors in a step: its state, and the statistics of the minibatch."""

    group: Group
    theta: list[Array]
    offset: list[Array]
    """θ − θ̄ per tensor; empty if iterates are not averaged."""
    plain_grad: list[Array]
    """Mean gradient of each tensor in its own coordinates; the rest is in those of the bases."""
    basis: list[Basis]
    grad: Array
    grad_sq: Any
    """Mean square over the samples; None if the minibatch is one."""
    norm_sq: Array
    """Squared norm of the gradient of each tensor."""
    mean: Moments
    """In the precision of the state."""
    memory: Array
    seen: Array
    totals: Totals

    @property
    def precision(self) -> Any:
        return self.group.tensors[0].precision

    @property
    def state(self) -> CoreState:
        """The statistics in the precision of the computation."""
        mean = Moments(*(part.astype(self.precision) for part in self.mean))
        return CoreState(mean, self.memory, self.seen)


class Learned(NamedTuple):
    """New statistics of a group after a minibatch, and the step of each coordinate."""

    mean: Moments
    memory: Array
    step: Array
    totals: Totals


def curvature_dtype(tensor: Tensor, config: Config) -> Any:
    """Return the precision of curvatures. Those of networks have errors of some percent, so bfloat16 suffices."""
    coarse = strategy_of(config).coarse_curvature and tensor.precision == jnp.float32
    return jnp.bfloat16 if coarse else tensor.precision


def take_step(
    settings: Settings,
    groups: list[Group],
    grads: Params,
    state: State,
    params: Params,
    grad_fn: GradFn,
    value: Array | None,
) -> tuple[Params, State]:
    """Return the updates, to be added to the parameters, and the new state."""
    config = settings.algorithm
    structure: Any = jax.tree.structure(params)
    samples = grad_fn.count if isinstance(grad_fn, SampleGradients) else 1
    count = jnp.asarray(samples, state.seen.dtype)
    work, averages = collect(groups, grads, state, params, grad_fn)
    usable = all_of(is_usable(part, w) for w in work for part in (w.norm_sq, w.grad_sq))
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
        lambda: measure(work, state, params, grad_fn, count, settings),
        lambda: ([(w.state.mean.curv, w.state.mean.curv_sq, w.totals.probe_size) for w in work], usable),
    )
    horizon = state.progress.horizon
    learned = [
        learn(w, curvature, count * usable, horizon, settings) for w, curvature in zip(work, probed, strict=True)
    ]
    new_curvature_penalty = lax.cond(
        due, lambda: curvature_penalty(work, learned, state), lambda: state.curvature_penalty
    )
    bases, means = turn_bases(work, learned, state, usable)
    averaging, progress = state.averaging, state.progress
    if state.average is not None:
        products = total(w.group.sums(w.group.join(w.plain_grad) * w.group.join(w.offset)).sum() for w in work)
        weight = usable * strategy_of(config).averaging_weight(state.seen, state.averaging.window, config)
        averaging, progress = networks.update_window_and_horizon(
            averaging,
            progress,
            products,
            new_curvature_penalty,
            value,
            state.step,
            config,  # type: ignore[arg-type]
        )
    else:
        weight = state.weight

    def tree(per_group: Iterable[Iterable[Any]]) -> Params:
        return structure.unflatten(in_leaf_order(groups, per_group))

    def if_usable(new: Array, old: Array) -> Array:
        return jnp.where(usable, new, old).astype(old.dtype)

    return tree(moves(w, each.step, settings.weight_decay) for w, each in zip(work, learned, strict=True)), State(
        step=jnp.where(usable, optax.safe_increment(state.step), state.step),
        skipped=jnp.where(usable, state.skipped, optax.safe_increment(state.skipped)),
        seen=state.seen + count * usable,
        mean=Moments(tuple(means), *(tuple(each.mean[k] for each in learned) for k in (1, 2, 3))),
        memory=tuple(each.memory for each in learned),
        totals=tuple(
            jnp.where(usable, jnp.stack(each.totals), jnp.stack(w.totals))
            for w, each in zip(work, learned, strict=True)
        ),
        basis=Basis(*(tree([basis[k] for basis in group] for group in bases) for k in range(len(Basis._fields)))),
        average=None if state.average is None else tree(averages),
        weight=weight.astype(state.weight.dtype),
        averaging=jax.tree.map(if_usable, averaging, state.averaging),
        curvature_penalty=if_usable(new_curvature_penalty, state.curvature_penalty),
        progress=jax.tree.map(if_usable, progress, state.progress),
        unprobed=jnp.where(usable, jnp.where(due, 0, state.unprobed + 1), state.unprobed),
    )


def in_leaf_order(groups: list[Group], per_group: Iterable[Iterable[Any]]) -> list[Any]:
    """Return values of the tensors of each group in the order of the leaves of the parameters."""
    places = [tensor.place for group in groups for tensor in group.tensors]
    values = [value for part in per_group for value in part]
    return [value for _, value in sorted(zip(places, values, strict=True), key=operator.itemgetter(0))]


# --- statistics ---------------------------------------------------------------------------------------------------


def collect(
    groups: list[Group], grads: Params, state: State, params: Params, grad_fn: GradFn
) -> tuple[list[Local], list[list[Array]]]:
    """Return the state and the gradients of each group, and the averages after the parameters have entered them."""
    all_params, all_grads, *all_sides = map(jax.tree.leaves, (params, grads, *state.basis))
    all_averages = jax.tree.leaves(state.average)
    work, averages = [], []
    for k, group in enumerate(groups):
        dtype, places = group.tensors[0].precision, [tensor.place for tensor in group.tensors]
        theta = [jnp.asarray(all_params[place], dtype) for place in places]
        plain = [jnp.asarray(all_grads[place], dtype) for place in places]
        basis = [Basis(*(side[place] for side in all_sides)) for place in places]
        weight = state.weight.astype(dtype)
        averages.append(
            [ema(all_averages[place], p, weight) for place, p in zip(places, theta, strict=True) if all_averages]
        )
        offset = [p - average for p, average in zip(theta, averages[-1], strict=False)]
        grad = group.join([into(*each) for each in zip(group.tensors, plain, basis, strict=True)])
        mean, totals = Moments(*(part[k] for part in state.mean)), Totals(*state.totals[k])
        norm_sq, seen = group.sums(grad * grad), state.seen.astype(dtype)
        work.append(Local(group, theta, offset, plain, basis, grad, None, norm_sq, mean, state.memory[k], seen, totals))
    if isinstance(grad_fn, SampleGradients):
        squares = grad_fn.mean(lambda gradient_at: [g * g for g in in_coordinates(work, gradient_at(params))])
        work = [w._replace(grad_sq=square) for w, square in zip(work, squares, strict=True)]
    return work, averages


def in_coordinates(work: list[Local], grads: Params) -> list[Array]:
    """Return gradients in the coordinates of the bases, one array per group."""
    leaves = jax.tree.leaves(grads)

    def rotated(w: Local) -> Array:
        pairs = zip(w.group.tensors, w.basis, strict=True)
        return w.group.join([into(t, jnp.asarray(leaves[t.place], w.precision), basis) for t, basis in pairs])

    return [rotated(w) for w in work]


def is_usable(values: Array | None, w: Local) -> Array:
    """Return whether all numbers are finite, and small enough to be divided by a squared probe."""
    if values is None:
        return jnp.asarray(True)
    largest = jnp.max(abs(values), initial=0)
    return largest < gradient_limit(float(np.finfo(w.precision).max))


def all_of(answers: Iterable[Array]) -> Array:
    return functools.reduce(operator.and_, answers, jnp.asarray(True))


def total(numbers: Iterable[Array]) -> Array:
    return functools.reduce(operator.add, numbers, jnp.zeros((), jnp.result_type(float)))


def length_scales(work: list[Local], state: State, value: Array | None, config: Config) -> list[Array]:
    """Return the length scales of each group: the largest RMS so far, of a tensor or of all parameters together.

    Where all parameters are zero at the start it is how far, per coordinate, the loss takes to vanish at its slope.
    """
    size = sum(tensor.size for w in work for tensor in w.group.tensors)
    joined = [w.group.join(w.theta) for w in work]
    norms = [w.group.sums(theta * theta) for w, theta in zip(work, joined, strict=True)]
    overall = total(norm.sum() for norm in norms) / size
    least = jnp.zeros_like(overall)
    if value is not None:
        distance = distance_to_zero_loss(value, total(w.norm_sq.sum() for w in work), size)
        least = jnp.where(state.step == 0, distance, 0)

    def scale_of(w: Local, norm: Array) -> Array:
        scale = strategy_of(config).length_scale(w.totals.scale, norm / w.group.sizes, overall, least, config)
        return jnp.asarray(scale, w.totals.scale.dtype)

    return [scale_of(w, norm) for w, norm in zip(work, norms, strict=True)]


# --- the probe ----------------------------------------------------------------------------------------------------


def probe_is_due(work: list[Local], state: State, count: Array, config: Config) -> Array:
    """By the schedule, because averages are just being started, or because a gradient is unusually long."""
    strategy = strategy_of(config)
    usual = all_of(~strategy.is_long(w.norm_sq, w.totals, count, config).any() for w in work)
    return jnp.asarray(strategy.probe_due(state.seen < config.bootstrap, state.unprobed, ~usual, config))


def measure(
    work: list[Local], state: State, params: Params, grad_fn: GradFn, count: Array, settings: Settings
) -> tuple[list[tuple[Array, Array, Array]], Array]:
    """Return mean h^fd, its mean square and the probe size of each group, and whether these numbers are usable.

    Both gradients of a difference come from `grad_fn`. The one that was passed to `update` may have been clipped or
    accumulated on its way.
    """
    structure: Any = jax.tree.structure(params)
    deltas, moved = [], []
    for w in work:
        delta = offsets(w, state, count, settings)
        shifts = [back(*each) for each in zip(w.group.tensors, w.group.split(delta), w.basis, strict=True)]
        moved.append(shifts)
        if not w.group.tensors[0].decoupled:
            ends = [probed_point(*each, 1) for each in zip(w.group.tensors, w.theta, shifts, strict=True)]
            delta = w.group.join([end.astype(w.precision) - p for end, p in zip(ends, w.theta, strict=True)])
        deltas.append(delta)

    def point(share: Any) -> Params:
        ends = [
            [probed_point(*each, share) for each in zip(w.group.tensors, w.theta, shifts, strict=True)]
            for w, shifts in zip(work, moved, strict=True)
        ]
        return structure.unflatten(in_leaf_order([w.group for w in work], ends))

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
    measured = []
    for w, diff, square, delta in zip(work, diffs, squares, deltas, strict=True):
        diff, square = jnp.where(usable, diff, 0), jnp.where(usable, square, 0)
        size = jnp.sqrt(w.group.sums(delta * delta) / w.group.sizes.astype(w.precision))
        measured.append((*measured_curvature(w.state.mean, diff, square, delta), size))
    return measured, usable


def probed_point(tensor: Tensor, theta: Array, shift: Array, share: Any) -> Array:
    """Return θ + share · shift in the precision of the parameter."""
    return (theta + jnp.asarray(share, theta.dtype) * shift).astype(tensor.dtype)


def offsets(w: Local, state: State, count: Array, settings: Settings) -> Array:
    """Return δ of every coordinate, 0 where it is padding."""
    config, strategy = settings.algorithm, strategy_of(settings.algorithm)
    places: Any = Int64.of(settings.seed) * (1 << 20) + Int64.array([tensor.place for tensor in w.group.tensors])
    seeds = probe_seed(Int64.of(state.step), places)
    seed = Int64(*w.group.spread(jnp.stack([seeds.high, seeds.low])))
    bits = networks.random_bit(Int64.of(w.group.positions()), seed).low
    size = w.group.spread(strategy.probe_size(w.totals.scale, config))
    delta = strategy.probe(w.state, w.grad, count.astype(w.precision), size, bits, config)
    return jnp.where(w.group.is_padding(), 0, delta)


def differences(work: list[Local], first: Params, second: Params) -> tuple[list[Array], list[Array]]:
    """Return ∇_{θ+δ} − ∇_θ of a sample, or its size where coordinates are not decoupled, and its square."""
    pairs = zip(work, in_coordinates(work, first), in_coordinates(work, second), strict=True)
    diffs = [b - a if w.group.tensors[0].decoupled else abs(b - a) for w, a, b in pairs]
    return diffs, [diff * diff for diff in diffs]


# --- learning -----------------------------------------------------------------------------------------------------


def learn(w: Local, measured: tuple[Array, Array, Array], count: Array, horizon: Array, settings: Settings) -> Learned:
    """Learn from the minibatch, whose curvature is that of the averages so far if it was not measured.

    A count of 0 changes nothing, whatever the gradient is.
    """
    config, state, kept = settings.algorithm, w.state, curvature_dtype(w.group.tensors[0], settings.algorithm)
    curv, curv_sq, size = measured
    totals = w.totals._replace(probe_size=size)
    strategy = strategy_of(config)
    per_tensor = strategy.context(totals, w.group.sizes.astype(w.precision), config, horizon.astype(w.precision))
    shared = TensorContext(*w.group.spread(jnp.stack(per_tensor)))
    count = count.astype(w.precision)
    grad = jnp.where(count > 0, w.grad, 0)
    grad_sq = grad * grad if w.grad_sq is None else jnp.where(count > 0, w.grad_sq, 0)
    batch = Moments(grad, grad_sq, curv, curv_sq)
    new, info = strategy.learn(w.group.tensors[0].decoupled)(state, batch, count, config, shared)
    step = limited_step(settings.lr * info.rate, grad, state.mean.grad_sq, shared)
    mean = new.mean._replace(curv=new.mean.curv.astype(kept), curv_sq=new.mean.curv_sq.astype(kept))
    rounded = w._replace(mean=mean).state.mean
    sums = w.group.sums(jnp.stack([rounded.grad_sq, rounded.grad**2, abs(rounded.curv), rounded.curv_sq]))
    totals = totals._replace(grad_sq=sums[0], signal=sums[1], curv=sums[2], curv_sq=sums[3])
    return Learned(mean, new.memory, step.astype(w.precision), totals)


def curvature_penalty(work: list[Local], learned: list[Learned], state: State) -> Array:
    """Return ½ (θ−θ̄)ᵀ|H|(θ−θ̄), in coordinates in which H is nearly diagonal."""
    if state.average is None:
        return state.curvature_penalty

    def of_group(w: Local, curv: Array) -> Array:
        off = w.group.join([into(*each) for each in zip(w.group.tensors, w.offset, w.basis, strict=True)])
        return w.group.sums(abs(curv.astype(off.dtype)) * off * off).sum() / 2

    return total(of_group(w, each.mean.curv) for w, each in zip(work, learned, strict=True))


def moves(w: Local, step: Array, strength: Any) -> list[Array]:
    """Return what is added to each parameter, in its own coordinates; weight decay with this `strength` included."""
    plain = [back(*each) for each in zip(w.group.tensors, w.group.split(step), w.basis, strict=True)]
    if isinstance(strength, int | float) and strength == 0:
        new = [-each for each in plain]
    else:
        decays = weight_decay(strength, w.group.sums(step * step), w.group.sizes.astype(w.precision))
        new = [
            jnp.where(decay > 0, descend(p, each, decay) - p, -each)
            for p, each, decay in zip(w.theta, plain, decays, strict=True)
        ]
    return [each.astype(tensor.dtype) for each, tensor in zip(new, w.group.tensors, strict=True)]


def turn_bases(
    work: list[Local], learned: list[Learned], state: State, usable: Array
) -> tuple[list[list[Basis]], list[Array]]:
    """Return the bases after the minibatch, and ḡ in them."""
    bases, means = [w.basis for w in work], [each.mean.grad for each in learned]
    is_rotated = [[tensor.blocks != (1, 1) for tensor in w.group.tensors] for w in work]
    if not any(map(any, is_rotated)):
        return bases, means

    def observed() -> tuple[list[list[Basis]], list[Array]]:
        new = [
            [
                observed_basis(tensor, basis, grad, state.step) if tensor.blocks != (1, 1) else basis
                for tensor, basis, grad in zip(w.group.tensors, w.basis, w.plain_grad, strict=True)
            ]
            for w in work
        ]
        result: tuple[list[list[Basis]], list[Array]] = lax.cond(
            eigenbasis.is_refresh_step(state.step), lambda: turned(new), lambda: (new, means)
        )
        return result

    def turned(bases: list[list[Basis]]) -> tuple[list[list[Basis]], list[Array]]:
        new_bases, new_means = [], []
        for w, basis, mean, rotated in zip(work, bases, means, is_rotated, strict=True):
            new = [turned_basis(*each) for each in zip(w.group.tensors, basis, strict=True)]
            new_bases.append(new)
            if any(rotated):
                parts = zip(w.group.tensors, w.group.split(mean), basis, new, strict=True)
                mean = w.group.join([into(t, back(t, part, before), after) for t, part, before, after in parts])
            new_means.append(mean)
        return new_bases, new_means

    new: tuple[list[list[Basis]], list[Array]] = lax.cond(
        usable & eigenbasis.is_covariance_step(state.step), observed, lambda: (bases, means)
    )
    return new
