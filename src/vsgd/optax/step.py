"""One step: collect the gradient, probe if that is due, learn in coordinates, move in the parameters' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from vsgd import eigenbasis
from vsgd.algorithms import networks
from vsgd.algorithms.networks import Momentum, Networks, TensorContext, add_momentum, momentum_weight
from vsgd.algorithms.strategy import Config, Totals, estimated_decay, limited_step, strategy_of, weight_decay
from vsgd.core import Moments, descend, ema
from vsgd.eigenbasis import Basis
from vsgd.optax.coordinates import rotated_bases, updated_covariances
from vsgd.optax.groups import Group
from vsgd.optax.minibatch import Local, are_usable, collect, in_leaf_order, products, tensors_of
from vsgd.optax.probe import Curvature, measure, measure_scales
from vsgd.optax.samples import GradFn, Params, SampleGradients
from vsgd.optax.state import Counters, Numbers, State, curvature_dtype

Bases = tuple[tuple[Basis, ...], list[Array]]
"""Bases of all parameters, and ḡ of each group in them."""


class Settings(NamedTuple):
    """Arguments of `vsgd` that are used in a step. All but `algorithm` may be traced."""

    algorithm: Config
    lr: Any
    weight_decay: Any
    steps_per_epoch: Any
    seed: Any


class Minibatch(NamedTuple):
    """Quantities of a step that learning needs. Numbers per tensor are in the order of `tensors_of(work)`."""

    work: list[Local]
    samples: Array
    """Number of samples."""
    sizes: Array
    """Number of coordinates of each tensor."""
    norm_sq: Array
    """Squared norm of the gradient of each tensor."""
    average: list[Array]
    """θ̄ of each tensor; empty if iterates are not averaged."""
    step: Array
    """Number of steps before this one."""
    horizon: Array


class Learned(NamedTuple):
    """Statistics of a group after a minibatch, and the step of each coordinate."""

    mean: Moments
    memory: Array
    step: Array
    """The gradient in coordinates until the group has learned."""


class Outcome(NamedTuple):
    """What a step computes, in arrays that are updated in place."""

    learned: list[Learned]
    totals: Array
    """`Totals`, one column per tensor."""
    usable: Array
    """Whether all gradients are usable."""
    penalty: Array
    """`Numbers.curvature_penalty`"""


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
    if not groups:
        return grads, state
    config, strategy = settings.algorithm, strategy_of(settings.algorithm)
    counters, numbers = Counters(*state.counters), Numbers(*state.numbers)
    count = jnp.asarray(grad_fn.count if isinstance(grad_fn, SampleGradients) else 1, numbers.seen.dtype)
    work = collect(groups, grads, state, numbers.seen, params, grad_fn)
    theta, plain_grads = [p for w in work for p in w.theta], [g for w in work for g in w.plain_grad]
    (before,) = state.totals
    sizes = jnp.asarray(np.concatenate([group.sizes for group in groups]), before.dtype)
    average, averages = state.average, []
    if average is None:
        (norm_sq,) = products(work, plain_grads, plain_grads)
        drift = jnp.zeros_like(norm_sq)
    else:
        average = jax.tree.map(lambda mean, p: entered(mean, p, numbers.weight), average, params)
        averages = [mean for w in work for mean in w.select(jax.tree.leaves(average))]
        # the compiler would store the negative, θ − θ̄, as arrays, because momentum needs it too
        offsets = [mean - p for mean, p in zip(averages, theta, strict=True)]
        norm_sq, drift = products(work, plain_grads, plain_grads, offsets)
        drift = -drift
    usable = are_usable(work, norm_sq, value) & jnp.isfinite(drift).all()
    batch = Minibatch(work, count, sizes, norm_sq, averages, counters.step, numbers.horizon)

    totals = Totals(*before)
    scale, rms = lax.cond(
        (counters.unprobed == 0) & usable,
        lambda: measure_scales(work, sizes, totals.scale, norm_sq, counters.step, value, config),
        lambda: (totals.scale, totals.rms),
    )
    totals = totals._replace(scale=scale, rms=rms)
    is_long = strategy.is_long(norm_sq, totals, count, config).any()
    due = usable & strategy.probe_due(numbers.seen < config.bootstrap, counters.unprobed, is_long, config)
    learned = [Learned(w.mean, w.memory, w.grad) for w in work]
    outcome = Outcome(learned, jnp.stack(totals), usable, numbers.curvature_penalty)
    outcome = update_if(due, lambda before: probe_and_learn(batch, before, params, grad_fn, settings), outcome)
    bases = update_covariances(work, state.basis, counters.step, outcome.usable)
    # gradients are not needed from here on, so temporary arrays of the next part can take their memory
    outcome, bases = lax.optimization_barrier((outcome, bases))
    outcome = learn_all(batch, outcome, [None for _ in work], ~due, settings)
    learned, totals, usable = outcome.learned, Totals(*outcome.totals), outcome.usable

    steps = [step for w, new in zip(work, learned, strict=True) for step in w.rotate_back(new.step)]
    decays = decay_of(batch, steps, totals, count * usable, settings)
    new = skipped = numbers
    if average is not None:
        weight = strategy.averaging_weight(numbers.seen, numbers.window, config)
        pull = momentum_weight(totals.momentum, weight * usable, settings.lr)
        steps = [add_momentum(*each) for each in zip(steps, theta, averages, pull, strict=True)]
        averaging, progress = networks.update_window_and_horizon(
            numbers.averaging,
            numbers.progress,
            drift.sum(),
            outcome.penalty,
            value,
            counters.step,
            cast(Networks, config),
        )
        new = Numbers(numbers.seen, weight, outcome.penalty, *averaging, *progress)
        skipped = numbers._replace(weight=jnp.zeros_like(numbers.weight))  # the newest iterate has entered
        obstacle = networks.momentum_obstacle(numbers.averaging, numbers.progress)
        after = strategy.momentum(Momentum(totals.momentum, totals.agreement), drift, obstacle, config)
        totals = totals._replace(momentum=after.coefficient, agreement=after.agreement)
    updates = [-step for step in steps]
    if decays is not None:
        updates = [
            jnp.where(decay > 0, descend(p, step, decay) - p, -step)
            for p, step, decay in zip(theta, steps, decays, strict=True)
        ]
    updates = [each.astype(tensor.dtype) for each, tensor in zip(updates, tensors_of(work), strict=True)]
    bases, means = refreshed(work, [each.mean.grad for each in learned], bases, counters.step, usable)
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(in_leaf_order(work, updates)), State(
        counters=jnp.where(usable, counted(counters, due), state.counters.at[1].set(counters.skipped + 1)),
        numbers=jnp.where(usable, as_array(new._replace(seen=numbers.seen + count)), as_array(skipped)),
        mean=Moments(tuple(means), *(tuple(each.mean[k] for each in learned) for k in (1, 2, 3))),
        memory=tuple(each.memory for each in learned),
        totals=(jnp.where(usable, jnp.stack(totals), before),),
        basis=bases,
        average=average,
    )


def update_if(due: Array, update: Callable[[Any], Any], value: Any) -> Any:
    """Return `update(value)` if that is due, else `value`.

    A loop of at most one turn changes arrays in place. A branch of `lax.cond` would copy those that it does not change.
    """
    _, new = lax.while_loop(lambda carry: carry[0], lambda carry: (jnp.zeros_like(due), update(carry[1])), (due, value))
    return new


def probe_and_learn(batch: Minibatch, before: Outcome, params: Params, grad_fn: GradFn, settings: Settings) -> Outcome:
    """Return the outcome after the curvature was measured and all groups have learned.

    Args:
        batch: the minibatch.
        before: outcome before the probe.
        params: tree of the parameters.
        grad_fn: gradient function of the user.
        settings: arguments of `vsgd`.
    """
    work = [
        w._replace(mean=each.mean, memory=each.memory, grad=each.step)
        for w, each in zip(batch.work, before.learned, strict=True)
    ]
    scale = Totals(*before.totals).scale
    curvatures, delta_sq, usable = measure(
        work, scale, params, grad_fn, batch.samples, batch.step, settings.algorithm, settings.seed
    )
    totals = replace_rows(before.totals, "probe_size", jnp.sqrt(delta_sq / batch.sizes)[None])
    before = before._replace(totals=totals, usable=usable)
    new = learn_all(batch, before, curvatures, jnp.ones_like(usable), settings)
    totals, penalty, averages = new.totals, jnp.zeros_like(before.penalty), iter(batch.average)
    for w, each in zip(work, new.learned, strict=True):
        curv, curv_sq = (part.astype(w.precision) for part in (each.mean.curv, each.mean.curv_sq))
        sums = w.group.sums(abs(curv), curv_sq)
        totals = replace_rows(totals, "curv", sums, w.columns.start)
        if batch.average:
            offset = w.rotate([p - next(averages) for p in w.theta])
            penalty += (abs(curv) * offset * offset).sum() / 2
    return new._replace(totals=totals, penalty=penalty)


def replace_rows(totals: Array, field: str, rows: Array, column: int = 0) -> Array:
    """Return `Totals` as an array with new rows, from those of a field on, for the tensors from a column on."""
    return lax.dynamic_update_slice(totals, rows.astype(totals.dtype), (Totals._fields.index(field), column))


def learn_all(batch: Minibatch, before: Outcome, curvatures: list[Any], due: Array, settings: Settings) -> Outcome:
    """Return the outcome after all groups have learned if that is due, else `before`.

    Groups learn one after the other, because each receives the totals of the last, so their temporary arrays share
    memory.

    Args:
        batch: the minibatch.
        before: outcome before the groups learn.
        curvatures: measured curvature of each group, or None for each.
        due: whether groups learn.
        settings: arguments of `vsgd`.
    """
    config = settings.algorithm
    context = strategy_of(config).context(Totals(*before.totals), batch.sizes, config, batch.horizon)
    contexts, totals, learned = jnp.stack(context), before.totals, []
    for w, old, curvature in zip(batch.work, before.learned, curvatures, strict=True):

        def learn_group(carry: tuple[Learned, Array], w: Local = w, curvature: Curvature | None = curvature) -> Any:
            old, totals = carry
            new = learn(w, old, curvature, contexts[:, w.columns], batch.samples * before.usable, settings)
            sums = w.group.sums(new.mean.grad_sq, new.mean.grad**2)
            return new, replace_rows(totals, "grad_sq", sums, w.columns.start)

        new, totals = update_if(due, learn_group, (old, totals))
        learned.append(new)
    return before._replace(learned=learned, totals=totals)


def entered(mean: Array, newest: Any, weight: Array) -> Array:
    """Return the average of the iterates after the newest has entered it."""
    result: Array = ema(mean, jnp.asarray(newest, mean.dtype), weight.astype(mean.dtype))
    return result


def learn(
    w: Local, before: Learned, curvature: Curvature | None, context: Array, count: Array, settings: Settings
) -> Learned:
    """Return the statistics after the minibatch, and the steps. A count of 0 changes nothing, whatever the gradient.

    Args:
        w: the group.
        before: its statistics and its gradient.
        curvature: curvature that a probe has measured; None leaves the averages of the curvature unchanged.
        context: `TensorContext` of each tensor, one column per tensor.
        count: samples in the minibatch.
        settings: arguments of `vsgd`.
    """
    w = w._replace(mean=before.mean, memory=before.memory, grad=before.step)
    config, state, tensor = settings.algorithm, w.state, w.group.tensors[0]
    shared = TensorContext(*w.group.spread(context.astype(w.precision)))
    count = count.astype(w.precision)
    grad = jnp.where(count > 0, w.grad, 0)
    grad_sq = grad * grad if w.grad_sq is None else jnp.where(count > 0, w.grad_sq, 0)
    batch = Moments(grad, grad_sq, *(state.mean[2:] if curvature is None else curvature))
    new, info = strategy_of(config).learn(tensor.decoupled)(state, batch, count, config, shared)
    step = limited_step(settings.lr * info.rate, grad, state.mean.grad_sq, shared).astype(w.precision)
    stored = curvature_dtype(tensor, config)
    curv, curv_sq = w.mean[2:] if curvature is None else (part.astype(stored) for part in new.mean[2:])
    return Learned(Moments(new.mean.grad, new.mean.grad_sq, curv, curv_sq), new.memory, step)


def decay_of(batch: Minibatch, steps: list[Array], totals: Totals, count: Array, settings: Settings) -> Array | None:
    """Return the weight decay of each tensor, as the user has set it or estimated; None if no tensor decays.

    Args:
        batch: the minibatch.
        steps: step of each tensor.
        totals: of each tensor after the minibatch.
        count: samples in the minibatch; 0 if it is skipped.
        settings: arguments of `vsgd`.
    """
    strength, steps_per_epoch = settings.weight_decay, settings.steps_per_epoch
    if steps_per_epoch is None and isinstance(strength, int | float) and strength == 0:
        return None
    (step_norm_sq,) = products(batch.work, steps, steps)
    decay: Array = weight_decay(strength, step_norm_sq, batch.sizes)
    if steps_per_epoch is None:
        return decay
    # biases and scales of normalization layers, which are vectors, do not decay
    is_matrix = np.array([len(tensor.shape) > 1 for tensor in tensors_of(batch.work)])
    begun = strategy_of(settings.algorithm).decay_has_begun(batch.step, steps_per_epoch, settings.algorithm)
    samples = is_matrix * begun * count * jnp.asarray(steps_per_epoch, batch.sizes.dtype)
    estimate = estimated_decay(totals, batch.sizes, samples, step_norm_sq, jnp.where(count > 0, batch.norm_sq, 0))
    return jnp.where(strength > 0, decay, estimate)


def update_covariances(work: list[Local], bases: tuple[Basis, ...], step: Array, usable: Array) -> tuple[Basis, ...]:
    """Return the bases with covariances after the minibatch."""
    grads = in_leaf_order(work, [grad for w in work for grad in w.plain_grad])
    tensors = in_leaf_order(work, tensors_of(work))
    if not any(tensor.is_rotated for tensor in tensors):
        return bases

    def observe(bases: tuple[Basis, ...]) -> tuple[Basis, ...]:
        each = zip(tensors, bases, grads, strict=True)
        return tuple(updated_covariances(tensor, basis, grad, step) for tensor, basis, grad in each)

    updated: tuple[Basis, ...] = update_if(usable & eigenbasis.is_covariance_step(step), observe, bases)
    return updated


def refreshed(work: list[Local], means: list[Array], bases: tuple[Basis, ...], step: Array, usable: Array) -> Bases:
    """Return the bases after the minibatch, and ḡ of each group in them."""
    if not any(tensor.is_rotated for tensor in tensors_of(work)):
        return bases, means

    def refresh(before: Bases) -> Bases:
        bases, means = before
        after = tuple(rotated_bases(bases, step))

        def in_new_basis(w: Local, mean: Array) -> Array:
            if not any(tensor.is_rotated for tensor in w.group.tensors):
                return mean
            old, new = ([basis[tensor.place] for tensor in w.group.tensors] for basis in (bases, after))
            return w._replace(basis=new).rotate(w._replace(basis=old).rotate_back(mean))

        return after, [in_new_basis(w, mean) for w, mean in zip(work, means, strict=True)]

    updated: Bases = update_if(usable & eigenbasis.is_refresh_step(step), refresh, (bases, means))
    return updated


def counted(counters: Counters, due: Array) -> Array:
    """Return the counters after a step that was not skipped."""
    return jnp.stack([optax.safe_increment(counters.step), counters.skipped, jnp.where(due, 0, counters.unprobed + 1)])


def as_array(numbers: Numbers) -> Array:
    """Return the numbers as one array."""
    return jnp.stack([jnp.asarray(number, numbers.seen.dtype) for number in numbers])
