"""The engine for tensors on a CPU: compiled loops over flat arrays. `loops.py` has the loops.

Arrays are cut into pieces of at most `PIECE` coordinates of one segment. Threads share the pieces, and sums are taken
over a piece at a time, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vsgd.algorithms.strategy import Config, Sums, strategy_of
from vsgd.jit import cached_jit
from vsgd.torch.coordinates import BatchMoments, Checks, Coordinates, Inputs, Learned, are_equal
from vsgd.torch.devices import share_range
from vsgd.torch.distributed.shards import summed
from vsgd.torch.loops import (
    COUNT,
    DECAY,
    LENGTH,
    OUTLIERS,
    PENALTY,
    PRODUCTS,
    SAMPLES,
    SCALE,
    SEEN,
    SEGMENT,
    WEIGHT,
    check_loop,
    learn_loop,
    move_loop,
    norm_loop,
    probe_loop,
)

PIECE = 1 << 13
MIN_PIECES_PER_THREAD = 8
"""Waking a second thread for less work takes longer than doing it."""


class Plan(NamedTuple):
    """What does not change of coordinates from step to step. Arrays are in the memory of the tensors."""

    pieces: Any
    """Of all segments, see `pieces_of`."""
    means: tuple[Any, Any]
    """ḡ and v̄."""
    curvs: tuple[Any, Any]
    memory: Any
    theta: Any
    average: Any
    """Empty if there is none."""
    seen: Any
    totals: Any
    segments: Any
    """Numbers per segment, for the step: see `SEGMENT`."""
    sums: Any
    """Memory for the sums over pieces."""
    nothing: Any
    is_compact: tuple[bool, bool]
    """Whether `means` and `curvs` are bfloat16."""


def make_plan(coordinates: Coordinates) -> Plan:
    pieces = pieces_of(coordinates.lengths, (True,) * len(coordinates.lengths))
    segments = np.zeros((len(SEGMENT), len(coordinates.lengths)))
    segments[LENGTH] = coordinates.whole_lengths
    nothing = coordinates.theta[:0].numpy()
    return Plan(
        pieces,
        (array(coordinates.grad), array(coordinates.grad_sq)),
        (array(coordinates.curv), array(coordinates.curv_sq)),
        array(coordinates.memory),
        coordinates.theta.numpy(),
        nothing if coordinates.average is None else coordinates.average.numpy(),
        coordinates.seen.numpy(),
        coordinates.totals.numpy(),
        segments,
        np.zeros((len(pieces), len(Sums._fields))),
        nothing,
        (coordinates.grad.dtype == torch.bfloat16, coordinates.curv.dtype == torch.bfloat16),
    )


def plan_of(coordinates: Coordinates) -> Plan:
    """Return the plan of coordinates, which is made once if they have a workspace."""
    workspace = coordinates.workspace
    if workspace is None:
        return make_plan(coordinates)
    if workspace.plan is None:
        workspace.plan = make_plan(coordinates)
    plan: Plan = workspace.plan
    return plan


class NumbaEngine:
    """Runs compiled loops on the memory of CPU tensors. Implements `Engine`."""

    def numbers(self, values: Tensor) -> Any:
        return values.numpy()

    def squared_norms(self, values: Tensor, coordinates: Coordinates) -> Any:
        plan = plan_of(coordinates)
        return run(cached_jit(norm_loop), coordinates, plan.pieces, np.empty((len(plan.pieces), 1)), values.numpy())[0]

    def check(self, grad: Tensor, counts: Tensor, limit: float, coordinates: Coordinates, config: Config) -> Checks:
        norms = self.squared_norms(grad, coordinates)
        found = np.empty(len(Checks._fields))
        check_loop(strategy_of(config).is_long)(
            norms, plan_of(coordinates).totals, counts.numpy(), limit, config, found
        )
        return Checks(found[0] > 0, found[1], found[2])

    def probe(self, coordinates: Coordinates, batch: BatchMoments, seeds: list[int] | None, config: Config) -> Tensor:
        strategy = strategy_of(config)
        plan, delta = plan_of(coordinates), coordinates.memory_for("delta")
        dtype = plan.theta.dtype
        offsets = (0,) * len(coordinates.lengths) if coordinates.shards is None else coordinates.shards.offsets
        starts = np.cumsum([0, *coordinates.lengths[:-1]]) - np.array(offsets)
        sizes = strategy.probe_size(plan.totals[:, SCALE], config)
        segments = np.array([plan.seen, batch.counts.numpy(), sizes], dtype)
        on_threads(
            probe_loop(strategy.probe, plan.is_compact[0], seeds is not None),
            plan.pieces,
            (*plan.means, *plan.curvs, plan.memory),
            array(batch.grad),
            segments,
            starts,
            np.array(seeds or [0], np.int64),
            in_precision(config, dtype),
            array(delta),
        )
        return delta

    def learn(self, coordinates: Coordinates, inputs: Inputs, config: Config, moves: bool) -> Learned:
        batch, delta, rates, weight, samples, _ = inputs
        plan, counts = plan_of(coordinates), batch.counts.numpy()
        dtype, nothing, segments = plan.theta.dtype, plan.nothing, plan.segments
        segments[SEEN], segments[COUNT], segments[WEIGHT] = plan.seen, counts, weight
        segments[SAMPLES] = 0 if samples is None else samples
        several, is_complete = batch.grad_sq is not None, counts.all()
        pieces = plan.pieces if is_complete else pieces_of(coordinates.lengths, tuple(counts > 0))
        steps = None if moves else coordinates.memory_for("steps")
        if steps is not None and not is_complete:
            steps.zero_()
        flags = several, delta is not None, inputs.measures_curvature, moves
        parts = (
            batch.grad,
            batch.grad_sq,
            batch.diff if several else batch.probed_grad,
            batch.diff_sq,
            batch.grad if batch.direction is None else batch.direction,
        )
        sums = run(
            learn_loop(strategy_of(config), coordinates.decoupled, plan.is_compact, flags),
            coordinates,
            pieces,
            plan.sums[: len(pieces)],
            plan.means,
            plan.curvs,
            plan.memory,
            tuple([nothing if part is None else part.numpy() for part in parts]),
            nothing if delta is None else delta.numpy(),
            segments,
            plan.totals,
            rates,
            config,
            in_precision(config, dtype),
            nothing if steps is None else steps.numpy(),
            plan.theta,
            plan.average,
        )
        return Learned(steps, segments[DECAY], sums[OUTLIERS], sums[PRODUCTS], sums[PENALTY])

    def move(self, coordinates: Coordinates, inputs: Inputs, steps: Tensor, decay: Any, config: Config) -> Any:
        plan = plan_of(coordinates)
        plan.segments[WEIGHT], plan.segments[DECAY] = inputs.weight, decay
        sums = run(
            move_loop(strategy_of(config).momentum),
            coordinates,
            plan.pieces,
            np.zeros((len(plan.pieces), 1)),
            plan.theta,
            plan.average,
            steps.numpy(),
            inputs.batch.plain_grad.numpy(),
            plan.segments,
            plan.totals,
            inputs.rates,
            config,
        )
        return sums[0]

    def moves_at_once(self, coordinates: Coordinates) -> bool:
        return coordinates.average is not None

    def adopt(self, held: list[Tensor], weights: list[Tensor], iterates: list[Tensor], coordinates: Coordinates) -> Any:
        if are_same(held, weights):
            return False
        changed = False
        for parameter, weight, iterate in zip(held, weights, iterates, strict=True):
            if not torch.equal(parameter, weight.to(parameter)):
                changed = True
                weight.copy_(parameter)
                iterate.copy_(parameter)
        return changed


def are_same(held: list[Tensor], weights: list[Tensor]) -> bool:
    """Return whether parameters hold these weights; False also if they have another precision or are on a device."""
    try:
        if len(held) > 1:
            return all(map(torch.equal, held, weights))
        # NumPy compares a large tensor in half the time
        return held[0].dtype == weights[0].dtype and np.array_equal(held[0].detach().numpy(), weights[0].numpy())
    except (RuntimeError, TypeError):
        return False


def array(part: Tensor) -> Any:
    """Return the memory of a tensor as an array; that of a bfloat16 as its bits."""
    return part.view(torch.int16).numpy().view(np.uint16) if part.dtype == torch.bfloat16 else part.numpy()


@functools.lru_cache(256)
def in_precision(config: Config, dtype: np.dtype[Any]) -> Config:
    """Return constants in the precision of the loop, so that float32 stays float32."""
    return type(config)._make(value if isinstance(value, bool) else dtype.type(value) for value in config)


def pieces_of(lengths: tuple[int, ...], active: tuple[bool, ...]) -> Any:
    """Return the segment, begin and end of every piece of the active segments.

    Pieces of table rows are not cached, because the number of touched rows differs in each step.
    """
    if are_equal(lengths) and 0 < lengths[0] <= PIECE:
        segments = np.flatnonzero(active)
        return np.stack([segments, segments * lengths[0], (segments + 1) * lengths[0]], axis=1)
    return cached_pieces(lengths, active)


@functools.lru_cache(256)
def cached_pieces(lengths: tuple[int, ...], active: tuple[bool, ...]) -> Any:
    starts = itertools.accumulate(lengths, initial=0)
    table = [
        (segment, begin, min(begin + PIECE, start + length))
        for segment, (start, length, wanted) in enumerate(zip(starts, lengths, active, strict=False))
        if wanted
        for begin in range(start, start + length, PIECE)
    ]
    return np.array(table, np.int64).reshape(-1, 3)


def run(loop: Callable[..., Any], coordinates: Coordinates, pieces: Any, sums: Any, *arguments: Any) -> Any:
    """Run a loop over pieces, which takes sums over each, and let it finish with the sums over segments.

    Args:
        loop: called with the range of its pieces, whether it is to finish, pieces, sums over these, memory for sums
            over segments, and the arguments.
        coordinates: that it runs on.
        pieces: to share among threads.
        sums: memory for the sums over pieces: pieces × kinds of sums.
        arguments: of the loop.

    Returns:
        Sums over segments, of all processes: kinds of sums × segments.
    """
    count, totals = len(pieces), np.zeros((sums.shape[1], len(coordinates.lengths)))
    if coordinates.shards is None and thread_count(count) == 1:
        loop(0, count, True, pieces, sums, totals, *arguments)
        return totals
    on_threads(loop, pieces, sums, totals, *arguments)
    if coordinates.shards is not None:  # continue with one piece per segment
        segments = np.arange(len(coordinates.lengths))
        np.add.at(totals.T, pieces[:, 0], sums)
        sums = summed(torch.from_numpy(totals), coordinates.shards).numpy().T.copy()
        pieces = np.stack([segments, segments, segments], axis=1)
        totals = np.zeros_like(totals)
    loop(0, 0, True, pieces, sums, totals, *arguments)
    return totals


def thread_count(pieces: int) -> int:
    return max(min(torch.get_num_threads(), pieces // MIN_PIECES_PER_THREAD), 1)


def on_threads(loop: Callable[..., Any], pieces: Any, *arguments: Any) -> None:
    """Share the pieces among as many threads as torch uses."""

    def run_part(first: int, last: int) -> None:
        loop(first, last, False, pieces, *arguments)

    share_range(run_part, len(pieces), thread_count(len(pieces)))
