"""The engine for tensors on a CPU: compiled loops over flat arrays. Each loop's body is the text of an algorithm.

Arrays are cut into pieces of at most `PIECE` coordinates of one segment. Threads share the pieces, and sums are taken
over a piece at a time, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vsgd.algorithms.networks import TensorContext, add_momentum, random_bit
from vsgd.algorithms.strategy import Config, Strategy, limited_step
from vsgd.core import Moments, State, descend, ema, measured_curvature
from vsgd.jit import cached_jit
from vsgd.torch.coordinates import (
    CURV,
    CURV_SQ,
    GRAD_SQ,
    OUTLIERS,
    PENALTY,
    PRODUCTS,
    SIGNAL,
    SUMS,
    BatchMoments,
    Coordinates,
    LearnInputs,
    Motion,
    are_equal,
)
from vsgd.torch.distributed import summed

PIECE = 1 << 13
MIN_PIECES_PER_THREAD = 8
"""Waking a second thread for less work takes longer than doing it."""


class Plan(NamedTuple):
    """What does not change of coordinates from step to step. Arrays are in the memory of the tensors."""

    pieces: Any
    """Of all segments, see `pieces_of`."""
    firsts: Any
    """The first piece of each segment; None if a segment is empty."""
    means: tuple[Any, Any]
    """ḡ and v̄."""
    curvs: tuple[Any, Any]
    memory: Any
    theta: Any
    average: Any
    """Empty if there is none."""
    nothing: Any
    is_compact: tuple[bool, bool]
    """Whether `means` and `curvs` are bfloat16."""


def make_plan(coordinates: Coordinates) -> Plan:
    pieces = pieces_of(coordinates.lengths, (True,) * len(coordinates.lengths))
    nothing = coordinates.theta[:0].numpy()
    return Plan(
        pieces,
        np.searchsorted(pieces[:, 0], np.arange(len(coordinates.lengths))) if all(coordinates.lengths) else None,
        (array(coordinates.grad), array(coordinates.grad_sq)),
        (array(coordinates.curv), array(coordinates.curv_sq)),
        array(coordinates.memory),
        coordinates.theta.numpy(),
        nothing if coordinates.average is None else coordinates.average.numpy(),
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
        sums = np.empty(len(plan.pieces))
        on_threads(cached_jit(norm_loop), plan.pieces, values.numpy(), sums)
        return per_segment(sums, plan.pieces, plan, coordinates)

    def dots(self, a: Tensor, b: Tensor, coordinates: Coordinates) -> Any:
        plan = plan_of(coordinates)
        sums = np.empty(len(plan.pieces))
        on_threads(cached_jit(dot_loop), plan.pieces, a.numpy(), b.numpy(), sums)
        return per_segment(sums, plan.pieces, plan, coordinates)

    def probe(
        self, coordinates: Coordinates, batch: BatchMoments, seeds: list[int] | None, strategy: Strategy, config: Config
    ) -> Tensor:
        plan, delta = plan_of(coordinates), torch.empty_like(coordinates.theta)
        dtype = plan.theta.dtype
        offsets = (0,) * len(coordinates.lengths) if coordinates.shards is None else coordinates.shards.offsets
        starts = np.cumsum([0, *coordinates.lengths[:-1]]) - np.array(offsets)
        sizes = strategy.probe_size(coordinates.total_columns().scale, config)
        segments = np.array([coordinates.seen.numpy(), batch.counts.numpy(), sizes.numpy()], dtype)
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

    def learn(
        self, coordinates: Coordinates, inputs: LearnInputs, strategy: Strategy, config: Config
    ) -> tuple[Tensor | None, Any]:
        batch, delta, context, lr, writes_curvature, motion = inputs
        plan, counts = plan_of(coordinates), batch.counts.numpy()
        dtype, nothing = plan.theta.dtype, plan.nothing
        several, moves, is_complete = batch.grad_sq is not None, motion is not None, counts.all()
        pieces = plan.pieces if is_complete else pieces_of(coordinates.lengths, tuple(counts > 0))
        steps = None if moves else self._memory_for_steps(coordinates)
        if steps is not None and not is_complete:
            steps.zero_()
        sums = np.zeros((len(pieces), len(SUMS)))
        flags = several, delta is not None, writes_curvature, moves
        parts = (
            batch.grad,
            batch.grad_sq,
            batch.diff if several else batch.probed_grad,
            batch.diff_sq,
            batch.grad if batch.direction is None else batch.direction,
        )
        on_threads(
            learn_loop(strategy.learn(coordinates.decoupled), *plan.is_compact, *flags),
            pieces,
            plan.means,
            plan.curvs,
            plan.memory,
            tuple([nothing if part is None else part.numpy() for part in parts]),
            nothing if delta is None else delta.numpy(),
            np.array((coordinates.seen.numpy(), counts, *context, *(motion or ())), dtype),
            dtype.type(lr),
            in_precision(config, dtype),
            nothing if steps is None else steps.numpy(),
            plan.theta,
            plan.average,
            sums,
        )
        return steps, per_segment(sums, pieces, plan, coordinates)

    def _memory_for_steps(self, coordinates: Coordinates) -> Tensor:
        workspace, theta = coordinates.workspace, coordinates.theta
        return torch.empty_like(theta) if workspace is None else workspace.buffer("steps", theta)

    def move(self, coordinates: Coordinates, grad: Tensor, steps: Tensor, motion: Motion) -> Any:
        plan = plan_of(coordinates)
        sums = np.zeros(len(plan.pieces))
        segments = np.array(motion, plan.theta.dtype)
        on_threads(
            cached_jit(move_loop), plan.pieces, plan.theta, plan.average, steps.numpy(), grad.numpy(), segments, sums
        )
        return per_segment(sums, plan.pieces, plan, coordinates)

    def moves_at_once(self, coordinates: Coordinates) -> bool:
        return coordinates.average is not None

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        torch._foreach_copy_(targets, sources)

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

    Those of rows are not cached: a step touches ever different numbers of rows.
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


def per_segment(sums: Any, pieces: Any, plan: Plan, coordinates: Coordinates) -> Any:
    """Return sums over segments, of all processes, from sums over pieces."""
    if pieces is plan.pieces and plan.firsts is not None:
        totals = sums if len(pieces) == len(plan.firsts) else np.add.reduceat(sums, plan.firsts)
    else:
        totals = np.zeros((len(coordinates.lengths), *sums.shape[1:]))
        np.add.at(totals, pieces[:, 0], sums)
    return totals if coordinates.shards is None else summed(torch.from_numpy(totals), coordinates.shards).numpy()


def on_threads(loop: Callable[..., Any], pieces: Any, *arguments: Any) -> None:
    """Share the pieces among torch's threads; the calling one takes its part."""
    count = len(pieces)
    threads = min(torch.get_num_threads(), count // MIN_PIECES_PER_THREAD)
    if threads < 2:
        loop(0, count, pieces, *arguments)
        return
    own, *others = itertools.pairwise(count * k // threads for k in range(threads + 1))
    tasks = [pool(threads - 1).submit(loop, *part, pieces, *arguments) for part in others]
    try:
        loop(*own, pieces, *arguments)
    finally:
        wait(tasks)  # whatever happens here, they still write to these arrays
    for task in tasks:
        task.result()


@functools.cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="vsgd")


# --- everything below is compiled ---------------------------------------------------------------------------------


def widen(bits: Any) -> Any:
    """A float32 from the 16 bits of a bfloat16, which numba does not know."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def narrow(value: Any) -> Any:
    """The 16 bits of the nearest bfloat16."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def identity(value: Any) -> Any:
    return value


def total(values: Any, load: Callable[..., Any]) -> Any:
    """Sum over a piece."""
    result = load(values[0])
    for i in range(1, len(values)):
        result += load(values[i])
    return result


def total_sq(values: Any, load: Callable[..., Any]) -> Any:
    """Sum of squares over a piece."""
    result = load(values[0]) * load(values[0])
    for i in range(1, len(values)):
        x = load(values[i])
        result += x * x
    return result


def norm_loop(first: int, last: int, pieces: Any, values: Any, sums: Any) -> None:
    """Squared norms of the pieces."""
    for piece in range(first, last):
        sums[piece] = total_sq(values[pieces[piece, 1] : pieces[piece, 2]], identity)


def dot_loop(first: int, last: int, pieces: Any, a: Any, b: Any, sums: Any) -> None:
    """Σ a·b of the pieces."""
    for piece in range(first, last):
        begin, end = pieces[piece, 1], pieces[piece, 2]
        sums[piece] = total_product(a[begin:end], b[begin:end])


def total_product(a: Any, b: Any) -> Any:
    """Σ a·b over a piece."""
    result = a[0] * b[0]
    for i in range(1, len(a)):
        result += a[i] * b[i]
    return result


def total_abs(values: Any, load: Callable[..., Any]) -> Any:
    """Sum of absolute values over a piece."""
    result = abs(load(values[0]))
    for i in range(1, len(values)):
        result += abs(load(values[i]))
    return result


def total_along(grad: Any, theta: Any, average: Any) -> Any:
    """∇·(θ − θ̄) over a piece."""
    result = grad[0] * (theta[0] - average[0])
    for i in range(1, len(grad)):
        result += grad[i] * (theta[i] - average[i])
    return result


# any order will do within a piece, and that of the processor's lanes is the fastest
for _function in (total, total_sq, total_abs, total_along, total_product):
    vars(_function)["jit_options"] = {"fastmath": {"reassoc", "nsz"}}


def make_probe_loop(probe: Callable[..., Any], load: Callable[..., Any], is_random: bool) -> Callable[..., None]:
    """Return the loop that computes offsets δ, with random signs or with those opposite to the gradient's."""

    def probe_loop(
        first: int,
        last: int,
        pieces: Any,
        statistics: Any,
        batch_grad: Any,
        segments: Any,
        starts: Any,
        seeds: Any,
        config: Any,
        delta: Any,
    ) -> None:
        for piece in range(first, last):
            segment, begin, end = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
            seen, count, size = segments[0, segment], segments[1, segment], segments[2, segment]
            seed = seeds[segment] if is_random else 0
            offset = begin - starts[segment]
            grad, mean, memory, part = (
                batch_grad[begin:end],
                statistics[0][begin:end],
                statistics[4][begin:end],
                delta[begin:end],
            )
            for i in range(len(part)):
                g = load(mean[i])
                # of the statistics, probes depend on ḡ and τ only
                state = State(Moments(g, g, g, g), load(memory[i]), seen)
                positive = random_bit(offset + i, seed) if is_random else np.int64(grad[i] < 0)
                part[i] = probe(state, grad[i], count, size, positive, config)

    return probe_loop


@functools.cache
def probe_loop(probe: Callable[..., Any], compact: bool, is_random: bool) -> Callable[..., None]:
    """Return the compiled loop for a probe, the precision of the statistics (compact: bfloat16), and its signs."""
    return cached_jit(make_probe_loop(probe, widen if compact else identity, is_random))


def make_learn_loop(
    learn: Callable[..., Any],
    load: Callable[..., Any],
    store: Callable[..., Any],
    load_curv: Callable[..., Any],
    store_curv: Callable[..., Any],
    several: bool,
    probed: bool,
    writes_curvature: bool,
    moves: bool,
) -> Callable[..., None]:
    """The loop that learns from a minibatch and, if it `moves`, descends and averages the iterates right away.

    All that is known beforehand is a constant of its code.
    """

    def learn_loop(
        first: int,
        last: int,
        pieces: Any,
        means: Any,
        curvs: Any,
        memory: Any,
        batch: Any,
        delta: Any,
        segments: Any,
        lr: Any,
        config: Any,
        steps: Any,
        theta: Any,
        average: Any,
        sums: Any,
    ) -> None:
        for piece in range(first, last):
            segment, begin, end = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
            seen = segments[0, segment]
            # one sample is said to be one, since the compiler then saves a division
            count = segments[1, segment] if several else segments.dtype.type(1)
            tensor = TensorContext(
                segments[2, segment],
                segments[3, segment],
                segments[4, segment],
                segments[5, segment],
                segments[6, segment],
            )
            # slices, since only an index that counts from 0 is known not to be negative; other loops stay scalar
            me, de, st = memory[begin:end], delta[begin:end], steps[begin:end]
            th, av = theta[begin:end], average[begin:end]
            decay, weight, momentum = segments[-3, segment], segments[-2, segment], segments[-1, segment]
            penalties = np.empty(len(th) if moves and probed else 0, theta.dtype)
            gr, gr_sq = means[0][begin:end], means[1][begin:end]
            cu, cu_sq = curvs[0][begin:end], curvs[1][begin:end]
            b_grad, b_grad_sq, b_direction = batch[0][begin:end], batch[1][begin:end], batch[4][begin:end]
            b_diff, b_diff_sq = batch[2][begin:end], batch[3][begin:end]
            outliers = np.int32(0)
            if moves:
                sums[piece, PRODUCTS] = total_along(b_grad, th, av)
            for i in range(len(me)):
                mean = Moments(load(gr[i]), load(gr_sq[i]), load_curv(cu[i]), load_curv(cu_sq[i]))
                g = b_grad[i]
                h, h_sq = mean.curv, mean.curv_sq
                if probed:
                    diff = b_diff[i] if several else b_diff[i] - g
                    h, h_sq = measured_curvature(mean, diff, b_diff_sq[i] if several else diff * diff, de[i])
                moments = Moments(g, b_grad_sq[i] if several else g * g, h, h_sq)
                state, info = learn(State(mean, load(me[i]), seen), moments, count, config, tensor)
                step = limited_step(lr * info.rate, b_direction[i] if several else g, mean.grad_sq, tensor)
                gr[i] = store(state.mean.grad)
                gr_sq[i] = store(state.mean.grad_sq)
                if writes_curvature:
                    cu[i] = store_curv(state.mean.curv)
                    cu_sq[i] = store_curv(state.mean.curv_sq)
                if moves:
                    if probed:
                        offset = th[i] - av[i]
                        penalties[i] = abs(load_curv(cu[i])) * offset * offset
                    moved = descend(th[i], add_momentum(step, th[i], av[i], momentum), decay)
                    av[i] = ema(av[i], moved, weight)
                    th[i] = moved
                else:
                    st[i] = step
                me[i] = store(state.memory)
                # a counter as wide as the numbers, so that as many coordinates as possible are treated at once
                outliers = np.int32(outliers + np.int32(info.outlier))
            sums[piece, GRAD_SQ] = total(gr_sq, load)
            sums[piece, SIGNAL] = total_sq(gr, load)
            if writes_curvature:
                sums[piece, CURV] = total_abs(cu, load_curv)
                sums[piece, CURV_SQ] = total(cu_sq, load_curv)
            sums[piece, OUTLIERS] = outliers
            if moves and probed:
                sums[piece, PENALTY] = total(penalties, identity) / 2

    return learn_loop


@functools.cache
def learn_loop(learn: Callable[..., Any], compact: bool, compact_curv: bool, *flags: bool) -> Callable[..., None]:
    """The loop for an algorithm, the precision of its state (compact: bfloat16), and what there is in a minibatch."""
    conversions = {True: (widen, narrow), False: (identity, identity)}
    return cached_jit(make_learn_loop(learn, *conversions[compact], *conversions[compact_curv], *flags))


def move_loop(
    first: int, last: int, pieces: Any, theta: Any, average: Any, steps: Any, grad: Any, segments: Any, sums: Any
) -> None:
    """Descend by the steps and average the iterates. Sums are ∇·(θ − θ̄) before that."""
    for piece in range(first, last):
        segment, begin, end = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
        decay, weight, momentum = segments[0, segment], segments[1, segment], segments[2, segment]
        th, av, st = theta[begin:end], average[begin:end], steps[begin:end]
        if len(av):
            sums[piece] = total_along(grad[begin:end], th, av)
            for i in range(len(th)):
                moved = descend(th[i], add_momentum(st[i], th[i], av[i], momentum), decay)
                av[i] = ema(av[i], moved, weight)
                th[i] = moved
        else:
            for i in range(len(th)):
                th[i] = descend(th[i], st[i], decay)
