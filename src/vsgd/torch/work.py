"""What a step does to each storage: collect statistics, probe, learn in coordinates, move in the parameters' own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.algorithms import networks, paper
from vsgd.algorithms.networks import Networks
from vsgd.algorithms.paper import Paper
from vsgd.tensors import LEAST_NORM, ROUNDING, probe_seed
from vsgd.torch import engine
from vsgd.torch.closure import Evaluation
from vsgd.torch.engine import BatchStatistics, Block
from vsgd.torch.loops import BEND, GAIN, OUTLIERS, identity
from vsgd.torch.noise import StepNoise, of_samples
from vsgd.torch.replicas import ALONE, Replicas
from vsgd.torch.shards import is_sharded
from vsgd.torch.statistics import OTHER_ROWS, SampleTotals, of_dense, of_table
from vsgd.torch.storage import Dense, Storage, Table

Group = dict[str, Any]
"""A parameter group of the optimizer."""


class Work(NamedTuple):
    """One block of a step: where it is stored, what the minibatch says of it, and the offset at which it was probed."""

    group: Group
    storage: Storage
    rows: Tensor | None
    """Touched rows of a table; None for dense tensors."""
    block: Block
    batch: BatchStatistics
    delta: Tensor | None = None


def collect(
    storages: Iterable[tuple[Group, Storage]],
    first: list[Evaluation],
    totals: SampleTotals | None,
    replicas: Replicas = ALONE,
) -> list[Work]:
    """What the evaluations say of each storage that they have a gradient of."""
    grads, work = [e.grads for e in first], []
    for group, storage in storages:
        if isinstance(storage, Dense):
            batch = of_dense(storage, grads, None, totals, replicas)
            if bool(batch.counts.any()):
                work.append(Work(group, storage, None, storage.block, batch))
        else:
            found = of_table(storage, grads, None, totals, replicas)
            if found is not None:
                work.append(Work(group, storage, found.rows, storage.rows(found.rows), found.batch))
    return work


def collect_again(
    w: Work,
    first: list[Evaluation],
    second: list[Evaluation] | None,
    totals: SampleTotals | None,
    replicas: Replicas = ALONE,
) -> Work:
    """The same with second gradients, or with all sums over samples. What has lost its gradient does not count."""
    grads = [e.grads for e in first]
    probed = None if second is None else [e.grads for e in second]
    if isinstance(w.storage, Dense):
        return w._replace(batch=of_dense(w.storage, grads, probed, totals, replicas))
    found = of_table(w.storage, grads, probed, totals, replicas)
    if found is None:
        return w._replace(batch=w.batch._replace(counts=w.batch.counts * 0))
    if not torch.equal(found.rows, w.rows):  # type: ignore[arg-type]
        raise RuntimeError(OTHER_ROWS)
    return w._replace(batch=found.batch)


def probe_is_due(work: list[Work], long: bool = False) -> bool:
    """In the first step, by the schedule, which a `long` gradient brings forward, or because averages are just being
    started; rows of a table start whenever they come."""

    def is_due(w: Work) -> bool:
        config = w.group["algorithm"]
        if isinstance(config, Paper):
            return paper.probe_due(w.group["steps"], config)
        starting = isinstance(w.storage, Dense) and engine.is_starting(w.block, w.batch, config)
        return w.group["steps"] == 0 or starting or networks.probe_due(w.group["unprobed"], long, config)

    return any(map(is_due, work))


def verdict(work: list[Work], losses: list[Tensor]) -> tuple[bool, bool]:
    """Return whether every number is usable, and whether a gradient is unusually long. Waits for the device."""
    answers = [engine.verdict(w.block, w.batch, w.group["algorithm"], not isinstance(w.storage, Dense)) for w in work]
    numbers = [*(number for answer in answers for number in answer), *map(torch.isfinite, losses)]
    known = torch.stack([torch.as_tensor(n, device=losses[0].device).double() for n in numbers]).tolist()
    usable, norms, long = (known[start : 3 * len(answers) : 3] for start in range(3))
    # the norm of a gradient that is rounding, as that of a bias before BatchNorm, varies without a reason
    is_long = max(long, default=0) > ROUNDING**2 * max(norms, default=0)
    return all(usable) and all(known[3 * len(answers) :]), is_long


def probe(w: Work, places: dict[Tensor, int]) -> Work:
    """Move parameters to θ + δ. `places` number the parameters, whose random signs depend on it.

    Outside an eigenbasis δ is what came out in the precision of the parameter.
    """
    config = w.group["algorithm"]
    if isinstance(w.storage, Dense):
        seeds = torch.tensor([probe_seed(w.group["steps"], places[p]) for p in w.storage.parameters])
        delta = engine.probe(w.block, w.batch, seeds, config)
        w.storage.shift(w.storage.back(delta))
        if not w.block.decoupled:
            w.storage.measure_shift(delta)
    else:
        assert w.rows is not None
        probed = w.block.theta + engine.probe(w.block, w.batch, None, config)
        delta = w.storage.move_to(w.rows, w.block, probed) - w.block.theta
    return w._replace(delta=delta)


def take_step(w: Work) -> tuple[list[Any], dict[Tensor, Any]]:
    """Learn from the minibatch and move. Returns what `averaging_after` needs, and how many outliers there were."""
    config, counts, storage = w.group["algorithm"], w.batch.counts, w.storage
    lr, strength, horizon = float(w.group["lr"]), float(w.group["weight_decay"]), horizon_of(w.group)
    dense = storage if isinstance(storage, Dense) else None
    weight = engine.averaging_weights(w.block, counts, w.group["averaging"][0] if dense else None, config)
    if engine.moves_at_once(w.block, counts, strength) and not (dense and dense.rotated()):
        _, sums = engine.learn(w.block, w.batch, w.delta, lr, horizon, config, weight)
        gains = [sums[:, column].sum() for column in ((GAIN,) if w.delta is None else (GAIN, BEND))]
    else:
        steps, sums = engine.learn(w.block, w.batch, w.delta, lr, horizon, config)
        into, back = (dense.into, dense.back) if dense else (identity, identity)
        bend = [engine.bend(w.block, into)] if w.delta is not None else []
        decay = engine.weight_decay(w.block, steps, strength)
        gains = [engine.move(w.block, w.batch.plain_grad, back(steps), decay, weight).sum(), *bend]
    outliers = sums[:, OUTLIERS]
    if isinstance(storage, Table):
        assert w.rows is not None
        storage.store(w.rows, w.block)
        return [0.0], {storage.parameter: outliers.sum()}
    storage.turn(w.batch.plain_grad, counts)
    w.group["samples"] = float(counts.max()) or w.group["samples"]
    return gains, dict(zip(storage.parameters, outliers, strict=True))


def noise_of(work: list[Work]) -> StepNoise | None:
    """What the samples of a step say of the noise, where dense tensors have several."""
    dense = [w.batch for w in work if isinstance(w.storage, Dense)]
    several = [(batch.grad_sq, batch.grad) for batch in dense if batch.grad_sq is not None]
    if not several:  # the usual step: a minibatch is one sample
        return None
    count = max(float(batch.counts.max()) for batch in dense)
    if count <= 1:
        return None
    sums = torch.stack([torch.stack([squares.sum(), grad.square().sum()]) for squares, grad in several]).sum(0)
    return of_samples(sums[0], sums[1], count)


def horizon_of(group: Group) -> float:
    """The number of steps that rates are optimal for."""
    return float(networks.Progress(*group["progress"]).horizon)


def settle(group: Group, gains: list[Any], loss: float, has_tables: bool) -> None:
    """Let window and horizon follow the last step: gains of `take_step`, and the loss, which is to become less.

    ½ (θ−θ̄)ᵀ|H|(θ−θ̄) is known after a probe, and kept until the next. Rows of tables have no part in it, so with tables
    the cost of noise is not known, and rates are optimal for a single step.
    """
    config, steps, (window, better, bend) = group["algorithm"], group["steps"], group["averaging"]
    bends = [float(each[1]) for each in gains if len(each) > 1]
    bend = sum(bends) if bends else bend
    gain = sum(float(each[0]) for each in gains) - bend
    averaging = networks.averaging(networks.Averaging(window, better), gain, steps, config)
    group["averaging"] = [float(averaging.window), float(averaging.advantage), bend]
    if not has_tables:
        progress = networks.progress(networks.Progress(*group["progress"]), loss, bend, steps - 1, config)
        group["progress"] = [float(number) for number in progress]
    else:
        group["progress"] = [*networks.Progress(*group["progress"])._replace(horizon=1.0)]


def measure_scales(storages: Iterable[tuple[Group, Storage]], least: float = 0.0) -> None:
    """The length scale of each tensor: the largest RMS so far, of the tensor or of all parameters together.

    `least` stands in where all parameters are zero.
    """
    blocks = [(group["algorithm"], storage.block) for group, storage in storages if isinstance(storage, Dense)]
    norms = [engine.squared_norms(block.theta, block) for _, block in blocks]
    coordinates = sum(sum(engine.whole_lengths(block)) for _, block in blocks)
    sums = [norm.sum() for norm in norms]
    overall_on = {
        device: torch.stack([each.to(device) for each in sums]).sum() / coordinates
        for device in {norm.device for norm in norms}
    }
    for (config, block), norm in zip(blocks, norms, strict=True):
        if isinstance(config, Networks):
            overall = overall_on[norm.device]
            rms = torch.maximum(norm / engine.lengths_of(block), overall).sqrt()
            scale = engine.totals_of(block).scale
            scale.copy_(networks.length_scale(scale, torch.where(overall > 0, rms, least), config))


def distance_to_go(evaluation: Evaluation, replicas: Replicas) -> float:
    """How far, per coordinate, the loss would take to vanish at its slope: a scale for parameters that are all zero.

    All processes use the mean loss, and the gradient of process 0, which may be sharded over all.
    """
    squares = {p: float(grad.norm().double().square()) for p, grad in evaluation.grads.items()}
    sharded = sum(square for p, square in squares.items() if is_sharded(p))
    rows = replicas.numbers("distance to go", float(evaluation.loss), sum(squares.values()) - sharded, sharded)
    square = rows[0][1] + sum(row[2] for row in rows)
    slope = math.sqrt(square * sum(p.numel() for p in evaluation.grads))
    return abs(sum(row[0] for row in rows) / len(rows)) / max(slope, LEAST_NORM)
