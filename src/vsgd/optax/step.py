"""One step: collect the gradient, probe if that is due, learn in coordinates, move in the parameters' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from vsgd import eigenbasis
from vsgd.algorithms import networks
from vsgd.algorithms.networks import Momentum, TensorContext, add_momentum, momentum_weight
from vsgd.algorithms.strategy import (
    Config,
    Totals,
    estimated_decay,
    limited_step,
    strategy_of,
    weight_decay,
)
from vsgd.core import Moments, descend, ema
from vsgd.eigenbasis import Basis
from vsgd.optax.coordinates import rotated_bases, updated_covariances
from vsgd.optax.groups import Group
from vsgd.optax.minibatch import Local, all_of, collect, in_leaf_order, is_usable, total
from vsgd.optax.probe import Curvature, Scales, is_due, known_curvature, known_scales, measure, measure_scales
from vsgd.optax.samples import GradFn, Params, SampleGradients
from vsgd.optax.state import Counters, Numbers, State, as_tuple, curvature_dtype

Bases = tuple[tuple[Basis, ...], list[Array]]
"""Bases of all parameters, and ḡ of each group in them."""


class Settings(NamedTuple):
    """Arguments of `vsgd` that are used in a step. All but `algorithm` may be traced."""

    algorithm: Config
    lr: Any
    weight_decay: Any
    steps_per_epoch: Any
    seed: Any


class Learned(NamedTuple):
    """New statistics of a group after a minibatch, the step of each coordinate, and the decay of each tensor."""

    mean: Moments
    memory: Array
    step: Array
    totals: Totals
    decay: Array | None
    """d in θ ← (θ − step) / (1 + d); None if no tensor decays."""


class Drift(NamedTuple):
    """θ − θ̄ of a group, along which momentum moves."""

    average: list[Array]
    """θ̄ of each tensor."""
    products: Array
    """∇·(θ − θ̄) of each tensor."""
    weight: Array
    """`networks.momentum_weight` of each tensor."""


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
    counters, numbers = Counters(*state.counters), Numbers(*state.numbers)
    count = jnp.asarray(grad_fn.count if isinstance(grad_fn, SampleGradients) else 1, numbers.seen.dtype)
    average = state.average
    if average is not None:
        average = jax.tree.map(lambda mean, p: entered(mean, p, numbers.weight), average, params)

    work = collect(groups, grads, state, numbers.seen, params, grad_fn)
    usable = all_of(is_usable(part, w) for w in work for part in (w.norm_sq, w.grad_sq))
    if value is not None:
        usable &= jnp.isfinite(value)
    scales: list[Scales] = lax.cond(
        (counters.unprobed == 0) & usable,
        lambda: measure_scales(work, counters.step, value, config),
        lambda: [known_scales(w) for w in work],
    )
    work = [w._replace(totals=w.totals._replace(**each._asdict())) for w, each in zip(work, scales, strict=True)]
    due = usable & is_due(work, counters.unprobed, numbers.seen, count, config)
    # the compiler runs a branch on one processor, so it contains only the work to be saved
    curvatures, usable = lax.cond(
        due,
        lambda: measure(work, params, grad_fn, count, counters.step, config, settings.seed),
        lambda: ([known_curvature(w) for w in work], usable),
    )
    learned = [
        learn(w, curvature, count * usable, numbers.horizon, counters.step, settings)
        for w, curvature in zip(work, curvatures, strict=True)
    ]
    bases, means = update_bases(work, [each.mean.grad for each in learned], state.basis, counters.step, usable)
    new = skipped = numbers
    drifts: Sequence[Drift | None] = [None for _ in work]
    if average is not None:
        weight = strategy_of(config).averaging_weight(numbers.seen, numbers.window, config)
        drifts = along = [drift_of(w, average, weight * usable, settings.lr) for w in work]
        new = update_numbers(work, learned, along, due, numbers._replace(weight=weight), value, counters.step, config)
        skipped = numbers._replace(weight=jnp.zeros_like(numbers.weight))  # the newest iterate has entered
        obstacle = networks.momentum_obstacle(numbers.averaging, numbers.progress)
        learned = [
            each._replace(totals=update_momentum(each.totals, drift.products, obstacle, config))
            for each, drift in zip(learned, along, strict=True)
        ]
    updates = [moves(*each) for each in zip(work, learned, drifts, strict=True)]
    return structure.unflatten(in_leaf_order(work, updates)), State(
        counters=jnp.where(usable, counted(counters, due), state.counters.at[1].set(counters.skipped + 1)),
        numbers=jnp.where(usable, as_array(new._replace(seen=numbers.seen + count)), as_array(skipped)),
        mean=Moments(as_tuple(means), *(as_tuple(each.mean[k] for each in learned) for k in (1, 2, 3))),
        memory=as_tuple(each.memory for each in learned),
        totals=as_tuple(
            jnp.where(usable, jnp.stack(each.totals), before)
            for each, before in zip(learned, state.totals, strict=False)
        ),
        basis=bases,
        average=average,
    )


def entered(mean: Array, newest: Any, weight: Array) -> Array:
    """Return the average of the iterates after the newest has entered it."""
    result: Array = ema(mean, jnp.asarray(newest, mean.dtype), weight.astype(mean.dtype))
    return result


def learn(w: Local, measured: Curvature, count: Array, horizon: Array, steps: Array, settings: Settings) -> Learned:
    """Return the statistics after the minibatch, and the steps. A count of 0 changes nothing, whatever the gradient."""
    config, state = settings.algorithm, w.state
    strategy, stored = strategy_of(config), curvature_dtype(w.group.tensors[0], config)
    totals = w.totals._replace(probe_size=measured.probe_size)
    per_tensor = strategy.context(totals, w.sizes, config, horizon.astype(w.precision))
    shared = TensorContext(*w.group.spread(jnp.stack(per_tensor)))
    count = count.astype(w.precision)
    grad = jnp.where(count > 0, w.grad, 0)
    grad_sq = grad * grad if w.grad_sq is None else jnp.where(count > 0, w.grad_sq, 0)
    batch = Moments(grad, grad_sq, measured.curv, measured.curv_sq)
    new, info = strategy.learn(w.group.tensors[0].decoupled)(state, batch, count, config, shared)
    step = limited_step(settings.lr * info.rate, grad, state.mean.grad_sq, shared)
    mean = new.mean._replace(curv=new.mean.curv.astype(stored), curv_sq=new.mean.curv_sq.astype(stored))
    rounded = w._replace(mean=mean).state.mean
    sums = w.group.sums(rounded.grad_sq, rounded.grad**2, abs(rounded.curv), rounded.curv_sq)
    totals = totals._replace(grad_sq=sums[0], signal=sums[1], curv=sums[2], curv_sq=sums[3])
    step = step.astype(w.precision)
    return Learned(mean, new.memory, step, totals, decay_of(w, totals, step, grad, count, steps, settings))


def decay_of(
    w: Local, totals: Totals, step: Array, grad: Array, count: Array, steps: Array, settings: Settings
) -> Array | None:
    """Return the weight decay of each tensor, as the user has set it or estimated; None if no tensor decays.

    Args:
        w: state of the group.
        totals: of the group after the minibatch.
        step: step of each coordinate.
        grad: gradient of each coordinate.
        count: samples in the minibatch.
        steps: number of steps before this one.
        settings: arguments of `vsgd`.
    """
    strength, steps_per_epoch = settings.weight_decay, settings.steps_per_epoch
    if steps_per_epoch is None and isinstance(strength, int | float) and strength == 0:
        return None
    grad_norm_sq, step_norm_sq = w.group.sums(grad * grad, step * step)
    decay: Array = weight_decay(strength, step_norm_sq, w.sizes)
    if steps_per_epoch is None:
        return decay
    # biases and scales of normalization layers, which are vectors, do not decay
    is_matrix = np.array([len(tensor.shape) > 1 for tensor in w.group.tensors])
    begun = strategy_of(settings.algorithm).decay_has_begun(steps, steps_per_epoch, settings.algorithm)
    samples = is_matrix * begun * count * jnp.asarray(steps_per_epoch, w.precision)
    estimate = estimated_decay(totals, w.sizes, samples, step_norm_sq, grad_norm_sq)
    return jnp.where(strength > 0, decay, estimate)


def drift_of(w: Local, average: Params, weight: Array, lr: Any) -> Drift:
    """Return θ̄ of a group and its momentum in this step.

    Args:
        w: state and gradients of the group.
        average: tree of the averages of the iterates.
        weight: weight with which the next iterate enters the average; 0 if the step is skipped.
        lr: the user's factor on the rates.
    """
    means = w.select(jax.tree.leaves(average))
    offset = w.group.join([p - mean for p, mean in zip(w.theta, means, strict=True)])
    products = w.group.sums(w.group.join(w.plain_grad) * offset)[0]
    return Drift(means, products, momentum_weight(w.totals.momentum, weight.astype(w.precision), lr))


def update_momentum(totals: Totals, products: Array, obstacle: Array, config: Config) -> Totals:
    """Return totals with the momentum after the step. See `networks.momentum` for the arguments."""
    before = Momentum(totals.momentum, totals.agreement)
    after = strategy_of(config).momentum(before, products, obstacle.astype(products.dtype), config)
    return totals._replace(momentum=after.coefficient, agreement=after.agreement)


def update_numbers(
    work: list[Local],
    learned: list[Learned],
    drifts: list[Drift],
    due: Array,
    numbers: Numbers,
    value: Array | None,
    step: Array,
    config: Any,
) -> Numbers:
    """Return the window of the average and the horizon of the rates after the minibatch.

    Args:
        work: state and gradients of each group.
        learned: new statistics of each group.
        drifts: θ − θ̄ of each group.
        due: whether the minibatch was probed.
        numbers: numbers before the step, with the weight of the next iterate.
        value: loss of the minibatch, or None.
        step: number of steps before this one.
        config: constants of the algorithm.
    """

    def penalty(w: Local, curv: Array, drift: Drift) -> Array:
        offset = w.rotate([p - mean for p, mean in zip(w.theta, drift.average, strict=True)])
        return (abs(curv.astype(offset.dtype)) * offset * offset).sum() / 2

    curvature_penalty = lax.cond(
        due,
        lambda: total(penalty(w, each.mean.curv, drift) for w, each, drift in zip(work, learned, drifts, strict=True)),
        lambda: numbers.curvature_penalty,
    )
    products = total(drift.products.sum() for drift in drifts)
    averaging, progress = networks.update_window_and_horizon(
        numbers.averaging, numbers.progress, products, curvature_penalty, value, step, config
    )
    return Numbers(numbers.seen, numbers.weight, curvature_penalty, *averaging, *progress)


def moves(w: Local, learned: Learned, drift: Drift | None) -> list[Array]:
    """Return the update of each parameter in its own coordinates, with momentum and weight decay."""
    steps = w.rotate_back(learned.step)
    if drift is not None:
        steps = [add_momentum(*each) for each in zip(steps, w.theta, drift.average, drift.weight, strict=True)]
    new = [-step for step in steps]
    if learned.decay is not None:
        new = [
            jnp.where(decay > 0, descend(p, step, decay) - p, -step)
            for p, step, decay in zip(w.theta, steps, learned.decay, strict=True)
        ]
    return [each.astype(tensor.dtype) for each, tensor in zip(new, w.group.tensors, strict=True)]


def update_bases(work: list[Local], means: list[Array], bases: tuple[Basis, ...], step: Array, usable: Array) -> Bases:
    """Return the bases after the minibatch, and ḡ of each group in them."""
    grads = in_leaf_order(work, [w.plain_grad for w in work])
    tensors = in_leaf_order(work, [w.group.tensors for w in work])
    if not any(tensor.is_rotated for tensor in tensors):
        return bases, means

    def observe() -> Bases:
        each = zip(tensors, bases, grads, strict=True)
        new = tuple(updated_covariances(tensor, basis, grad, step) for tensor, basis, grad in each)
        result: Bases = lax.cond(eigenbasis.is_refresh_step(step), lambda: refresh(new), lambda: (new, means))
        return result

    def refresh(before: tuple[Basis, ...]) -> Bases:
        after = tuple(rotated_bases(before))

        def in_new_basis(w: Local, mean: Array) -> Array:
            if not any(tensor.is_rotated for tensor in w.group.tensors):
                return mean
            return w._replace(basis=[after[tensor.place] for tensor in w.group.tensors]).rotate(w.rotate_back(mean))

        return after, [in_new_basis(w, mean) for w, mean in zip(work, means, strict=True)]

    updated: Bases = lax.cond(usable & eigenbasis.is_covariance_step(step), observe, lambda: (bases, means))
    return updated


def counted(counters: Counters, due: Array) -> Array:
    """Return the counters after a step that was not skipped."""
    return jnp.stack([optax.safe_increment(counters.step), counters.skipped, jnp.where(due, 0, counters.unprobed + 1)])


def as_array(numbers: Numbers) -> Array:
    return jnp.stack([jnp.asarray(number, numbers.seen.dtype) for number in numbers])
