"""The update of one block: check the numbers of a minibatch, learn from them in coordinates, move the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.algorithms.networks import Momentum, TensorContext, momentum_weight
from vsgd.algorithms.strategy import (
    Config,
    Strategy,
    Totals,
    estimated_decay,
    gradient_limit,
    strategy_of,
    weight_decay,
)
from vsgd.torch.coordinates import (
    OUTLIERS,
    PENALTY,
    PRODUCTS,
    BatchMoments,
    Coordinates,
    Engine,
    LearnInputs,
    Motion,
    Rates,
    lengths_on,
    spread,
)
from vsgd.torch.distributed import summed

Rotation = Callable[[Tensor], Tensor]


class Checks(NamedTuple):
    """What the numbers of a minibatch say before anything is learned from them. Each is a number on any device."""

    usable: Any
    """Whether every number is finite and can be squared."""
    norm_sq: Any
    """Largest squared norm of a gradient."""
    long_norm_sq: Any
    """The same of unusually long gradients; 0 if there is none."""


class Moved(NamedTuple):
    """What an update reports of a block."""

    products: Any
    """∇·(θ − θ̄)."""
    penalty: Any
    """½ (θ−θ̄)ᵀ|H|(θ−θ̄); None if the curvature was not measured."""
    outliers: Any
    """Outliers per segment."""


class Rule(NamedTuple):
    """How a block learns: its engine, and its algorithm with the constants of that."""

    engine: Engine
    strategy: Strategy
    config: Config


def rule_of(engine: Engine, config: Config) -> Rule:
    return Rule(engine, strategy_of(config), config)


def lengths_of(coordinates: Coordinates) -> Tensor:
    """Return the coordinates of each segment, those in other processes included."""
    return lengths_on(coordinates.whole_lengths, coordinates.totals.device, coordinates.totals.dtype)


def totals_of(coordinates: Coordinates, engine: Engine) -> Totals:
    return Totals(*engine.numbers(coordinates.totals).T)


def check(coordinates: Coordinates, batch: BatchMoments, rule: Rule, by_rows: bool) -> Checks:
    """Return the checks of a minibatch. Rows of tables have no unusually long gradients."""
    engine, strategy, config = rule
    norms = engine.squared_norms(batch.grad, coordinates)
    limit, longest = largest_square(coordinates.theta.dtype), norms.max()
    usable = longest < limit
    if batch.probed_grad is not None:
        usable = usable & (engine.squared_norms(batch.probed_grad, coordinates).max() < limit)
    for part in (batch.grad_sq, batch.diff_sq):
        if part is not None and part.numel():
            least, most = map(engine.numbers, part.aminmax())
            usable = usable & (-limit < least) & (most < limit)
    if coordinates.shards is not None:
        unusable = torch.as_tensor(usable == 0, dtype=coordinates.totals.dtype, device=coordinates.totals.device)
        usable = coordinates.shards.add_up(unusable) == 0
    if by_rows:
        return Checks(usable, longest, 0.0)
    counts = engine.numbers(batch.counts.to(coordinates.totals, non_blocking=True))
    long = strategy.is_long(norms, totals_of(coordinates, engine), counts, config)
    return Checks(usable, longest, (norms * (long & (counts > 0))).max())


@functools.cache
def largest_square(dtype: torch.dtype) -> float:
    """Return the size beyond which squares of gradients are not usable in this precision."""
    return gradient_limit(torch.finfo(dtype).max)


def is_starting(coordinates: Coordinates, batch: BatchMoments, config: Config) -> bool:
    """Return whether a segment with a gradient has averages that are just being started."""
    seen: Any = coordinates.seen
    counts: Any = batch.counts
    if seen.is_cpu:  # NumPy takes less time for a few numbers
        seen, counts = seen.numpy(), counts.numpy()
    return bool(((seen < config.bootstrap) & (counts > 0)).any())


def context(coordinates: Coordinates, rule: Rule, horizon: float) -> TensorContext:
    """Return what the coordinates of each segment share."""
    lengths = rule.engine.numbers(lengths_of(coordinates))
    return rule.strategy.context(totals_of(coordinates, rule.engine), lengths, rule.config, horizon)


def learning_rates(coordinates: Coordinates, count: float, rule: Rule, horizon: float) -> Tensor:
    """Return η* of every coordinate for a minibatch of `count` samples, from the statistics so far."""
    shared = context(coordinates, rule, horizon)
    parts = (torch.as_tensor(part, device=coordinates.totals.device) for part in shared)
    tensor = TensorContext(*(spread(part, coordinates) for part in parts))
    rate: Tensor = rule.strategy.rate(
        coordinates.state(coordinates.seen), count, rule.config, tensor, coordinates.decoupled
    )
    return rate


def learn(
    coordinates: Coordinates,
    batch: BatchMoments,
    delta: Tensor | None,
    rates: Rates,
    rule: Rule,
    motion: Motion | None = None,
) -> tuple[Tensor | None, Any]:
    """Update the statistics and totals. Return what `Engine.learn` returns."""
    engine, strategy, config = rule
    totals, counts = engine.numbers(coordinates.totals), batch.counts
    if delta is not None:
        size = (engine.squared_norms(delta, coordinates) / engine.numbers(lengths_of(coordinates))) ** 0.5
        totals[:, Totals._fields.index("probe_size")] = size
    # reading the counts of rows on a device would wait for it
    may_start = not coordinates.seen.is_cpu or is_starting(coordinates, batch, config)
    writes_curvature = delta is not None or may_start
    shared = context(coordinates, rule, rates.horizon)
    inputs = LearnInputs(batch, delta, shared, rates.lr, writes_curvature, motion)
    steps, sums = engine.learn(coordinates, inputs, strategy, config)
    known = totals[:, : 4 if writes_curvature else 2]
    if counts.is_cpu and all(counts.tolist()):
        known[:] = sums[:, : known.shape[1]]
    else:
        active = engine.numbers(counts.to(coordinates.totals, non_blocking=True))[:, None] > 0
        known[:] = active * sums[:, : known.shape[1]] + (active == 0) * known
    coordinates.seen.add_(counts)
    return steps, sums


def learn_and_move(
    coordinates: Coordinates,
    batch: BatchMoments,
    delta: Tensor | None,
    rates: Rates,
    weight: Any,
    samples: Tensor | None,
    rule: Rule,
    rotation: tuple[Rotation, Rotation] | None,
) -> Moved:
    """Learn from a minibatch in coordinates, and move in the parameters' own.

    Args:
        coordinates: of the block; they change in place.
        batch: moments of the minibatch.
        delta: offset of the probe, if there was one.
        rates: settings of the group.
        weight: per segment, with which the new iterates enter the average.
        samples: number of samples in the data per segment, 0 where no weight decay is estimated; None if nowhere.
        rule: of the block.
        rotation: from the parameters' own coordinates to those of the block, and back; None if these are the same.
    """
    # counts are read last, since those of rows may be on a device
    engine, no_decay = rule.engine, 0 * rule.engine.numbers(lengths_of(coordinates))
    own_weight = on_device(weight, coordinates, engine)
    momentum = momentum_weight(totals_of(coordinates, engine).momentum, own_weight, rates.lr)
    decays = samples is not None or rates.weight_decay > 0
    at_once = engine.moves_at_once(coordinates) and rotation is None and not decays
    if at_once and bool(batch.counts.all()):
        _, sums = learn(coordinates, batch, delta, rates, rule, Motion(no_decay, weight, momentum))
        products, penalty = sums[:, PRODUCTS], None if delta is None else sums[:, PENALTY].sum()
    else:
        steps, sums = learn(coordinates, batch, delta, rates, rule)
        assert steps is not None
        into, back = (identity, identity) if rotation is None else rotation
        # before the penalty, because `into` may write to the buffer of the rotated gradient
        decay = decay_of(coordinates, batch, steps, rates, samples, engine) if decays else no_decay
        penalty = None if delta is None else curvature_penalty(coordinates, into)
        products = engine.move(coordinates, batch.plain_grad, back(steps), Motion(decay, weight, momentum))
    update_momentum(coordinates, products, own_weight > 0, rates, rule)
    return Moved(products.sum(), penalty, sums[:, OUTLIERS])


def on_device(values: Any, coordinates: Coordinates, engine: Engine) -> Any:
    """Return numbers per segment, which may be on the CPU, in the precision and on the device of the totals."""
    return engine.numbers(torch.as_tensor(values).to(coordinates.totals, non_blocking=True))


def decay_of(
    coordinates: Coordinates,
    batch: BatchMoments,
    steps: Tensor,
    rates: Rates,
    samples: Tensor | None,
    engine: Engine,
) -> Any:
    """Return the weight decay per segment: of the strength that the user has set, or estimated; see `descend`."""
    lengths = engine.numbers(lengths_of(coordinates))
    if samples is None:
        return weight_decay(rates.weight_decay, engine.squared_norms(steps, coordinates), lengths)
    step_norms, grad_norms = (engine.squared_norms(part, coordinates) for part in (steps, batch.grad))
    known = on_device(samples, coordinates, engine)
    return estimated_decay(totals_of(coordinates, engine), lengths, known, step_norms, grad_norms)


def update_momentum(coordinates: Coordinates, products: Any, active: Any, rates: Rates, rule: Rule) -> None:
    """Let the momentum of the active segments follow a step."""
    engine, strategy, config = rule
    columns = engine.numbers(coordinates.totals)[:, -2:]
    after = strategy.momentum(Momentum(columns[:, 0], columns[:, 1]), products, rates.advantage, config)
    for k, new in enumerate(after):
        columns[:, k] = active * new + (active == 0) * columns[:, k]


def identity(values: Tensor) -> Tensor:
    return values


def curvature_penalty(coordinates: Coordinates, into: Rotation) -> Any:
    """Return ½ (θ−θ̄)ᵀ |H| (θ−θ̄), in coordinates in which H is nearly diagonal; 0 if nothing is averaged."""
    if coordinates.average is None:
        return 0.0
    offset = into(coordinates.theta - coordinates.average)
    terms = offset.mul_(offset).mul_(coordinates.curv).abs_()
    return summed(terms.sum().to(coordinates.totals.dtype) / 2, coordinates.shards)
