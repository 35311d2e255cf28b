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

from vsgd.algorithms.networks import Momentum, TensorContext, add_momentum, momentum_weight, random_bit
from vsgd.algorithms.strategy import Config, Strategy, Sums, Totals, decay_of, limited_step
from vsgd.core import Moments, State, descend, ema, measured_curvature
from vsgd.jit import cached_jit
from vsgd.torch.coordinates import BatchMoments, Checks, Coordinates, Inputs, Learned, are_equal
from vsgd.torch.distributed import summed

PIECE = 1 << 13
MIN_PIECES_PER_THREAD = 8
"""Waking a second thread for less work takes longer than doing it."""


SEEN, COUNT, LENGTH, SAMPLES, WEIGHT, DECAY = SEGMENT = range(6)
"""Rows of an array of numbers per segment."""

GRAD_SQ, SIGNAL, CURV, CURV_SQ, OUTLIERS, STEP_SQ, BATCH_SQ, PRODUCTS, PENALTY = range(len(Sums._fields))
"""Columns of an array of sums."""

MOMENTUM, AGREEMENT = (Totals._fields.index(name) for name in ("momentum", "agreement"))


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


def memory_for(name: str, coordinates: Coordinates) -> Tensor:
    """Return memory for one number per coordinate. It is the same in every step if there is a workspace."""
    workspace, theta = coordinates.workspace, coordinates.theta
    return torch.empty_like(theta) if workspace is None else workspace.buffer(name, theta)


class NumbaEngine:
    """Runs compiled loops on the memory of CPU tensors. Implements `Engine`."""

    def numbers(self, values: Tensor) -> Any:
        return values.numpy()

    def squared_norms(self, values: Tensor, coordinates: Coordinates) -> Any:
        plan = plan_of(coordinates)
        return run(cached_jit(norm_loop), coordinates, plan.pieces, np.empty((len(plan.pieces), 1)), values.numpy())[0]

    def check(
        self, grad: Tensor, counts: Tensor, limit: float, coordinates: Coordinates, strategy: Strategy, config: Config
    ) -> Checks:
        norms = self.squared_norms(grad, coordinates)
        found = np.empty(len(Checks._fields))
        check_loop(strategy.is_long)(norms, plan_of(coordinates).totals, counts.numpy(), limit, config, found)
        return Checks(found[0] > 0, found[1], found[2])

    def probe(
        self, coordinates: Coordinates, batch: BatchMoments, seeds: list[int] | None, strategy: Strategy, config: Config
    ) -> Tensor:
        plan, delta = plan_of(coordinates), memory_for("delta", coordinates)
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
        self, coordinates: Coordinates, inputs: Inputs, strategy: Strategy, config: Config, moves: bool, starts: bool
    ) -> Learned:
        batch, delta, rates, weight, samples = inputs
        plan, counts = plan_of(coordinates), batch.counts.numpy()
        dtype, nothing, segments = plan.theta.dtype, plan.nothing, plan.segments
        segments[SEEN], segments[COUNT], segments[WEIGHT] = plan.seen, counts, weight
        segments[SAMPLES] = 0 if samples is None else samples
        several, is_complete = batch.grad_sq is not None, counts.all()
        pieces = plan.pieces if is_complete else pieces_of(coordinates.lengths, tuple(counts > 0))
        steps = None if moves else memory_for("steps", coordinates)
        if steps is not None and not is_complete:
            steps.zero_()
        flags = several, delta is not None, delta is not None or starts, moves
        parts = (
            batch.grad,
            batch.grad_sq,
            batch.diff if several else batch.probed_grad,
            batch.diff_sq,
            batch.grad if batch.direction is None else batch.direction,
        )
        sums = run(
            learn_loop(strategy, coordinates.decoupled, plan.is_compact, flags),
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

    def move(
        self, coordinates: Coordinates, inputs: Inputs, steps: Tensor, decay: Any, strategy: Strategy, config: Config
    ) -> Any:
        plan = plan_of(coordinates)
        plan.segments[WEIGHT], plan.segments[DECAY] = inputs.weight, decay
        sums = run(
            move_loop(strategy.momentum),
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


def add_pieces(pieces: Any, sums: Any, totals: Any) -> None:
    """Add sums over pieces, pieces × kinds, to those over segments, kinds × segments."""
    for piece in range(len(pieces)):
        for kind in range(len(totals)):
            totals[kind, pieces[piece, 0]] += sums[piece, kind]


def thread_count(pieces: int) -> int:
    return max(min(torch.get_num_threads(), pieces // MIN_PIECES_PER_THREAD), 1)


def on_threads(loop: Callable[..., Any], pieces: Any, *arguments: Any) -> None:
    """Share the pieces among torch's threads; the calling one takes its part."""
    threads = thread_count(len(pieces))
    own, *others = itertools.pairwise(len(pieces) * k // threads for k in range(threads + 1))
    tasks = [pool(threads - 1).submit(loop, *part, False, pieces, *arguments) for part in others]
    try:
        loop(*own, False, pieces, *arguments)
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


def norm_loop(first: int, last: int, finishes: bool, pieces: Any, sums: Any, totals: Any, values: Any) -> None:
    """Squared norms."""
    for piece in range(first, last):
        sums[piece, 0] = total_sq(values[pieces[piece, 1] : pieces[piece, 2]], identity)
    if finishes:
        add_pieces(pieces, sums, totals)


@functools.cache
def check_loop(is_long: Callable[..., Any]) -> Callable[..., None]:
    """Return the compiled loop that computes `Checks` from squared norms."""

    def check_loop(norms: Any, totals: Any, counts: Any, limit: float, config: Any, found: Any) -> None:
        usable, longest, long = 1.0, 0.0, 0.0
        for segment in range(len(norms)):
            norm = norms[segment]
            usable = usable if norm < limit else 0.0  # NaN is not
            longest = max(longest, norm)
            if counts[segment] > 0 and is_long(norm, totals_of(totals[segment]), counts[segment], config):
                long = max(long, norm)
        found[0], found[1], found[2] = usable, longest, long

    return cached_jit(check_loop)


def totals_of(row: Any) -> Totals:
    """Return the totals of a segment."""
    return Totals(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8])


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
for _function in (total, total_sq, total_abs, total_along):
    vars(_function)["jit_options"] = {"fastmath": {"reassoc", "nsz"}}


def make_probe_loop(probe: Callable[..., Any], load: Callable[..., Any], is_random: bool) -> Callable[..., None]:
    """Return the loop that computes offsets δ, with random signs or with those opposite to the gradient's."""

    def probe_loop(
        first: int,
        last: int,
        finishes: bool,
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
    context: Callable[..., Any],
    update_momentum: Callable[..., Any],
    load: Callable[..., Any],
    store: Callable[..., Any],
    load_curv: Callable[..., Any],
    store_curv: Callable[..., Any],
    several: bool,
    probed: bool,
    writes_curvature: bool,
    moves: bool,
) -> Callable[..., None]:
    """Return the loop that learns from a minibatch and, if it `moves`, descends and averages the iterates right away.

    All that is known beforehand is a constant of its code.
    """

    def learn_loop(
        first: int,
        last: int,
        finishes: bool,
        pieces: Any,
        sums: Any,
        found: Any,
        means: Any,
        curvs: Any,
        memory: Any,
        batch: Any,
        delta: Any,
        segments: Any,
        totals: Any,
        rates: Any,
        constants: Any,
        config: Any,
        steps: Any,
        theta: Any,
        average: Any,
    ) -> None:
        number = theta.dtype.type
        lr = number(rates.lr)
        for piece in range(first, last):
            segment, begin, end = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
            seen = number(segments[SEEN, segment])
            # one sample is a constant, since the compiler then saves a division
            count = number(segments[COUNT, segment]) if several else number(1)
            shared = context(totals_of(totals[segment]), segments[LENGTH, segment], constants, rates.horizon)
            tensor = TensorContext(
                number(shared.curv),
                number(shared.curv_sq),
                number(shared.grad_clip),
                number(shared.step_limit),
                number(shared.horizon),
            )
            # slices, since only an index that counts from 0 is known not to be negative; other loops stay scalar
            me, de, st = memory[begin:end], delta[begin:end], steps[begin:end]
            th, av = theta[begin:end], average[begin:end]
            weight = number(segments[WEIGHT, segment])
            momentum = number(momentum_weight(totals[segment, MOMENTUM], segments[WEIGHT, segment], rates.lr))
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
                    moved = th[i] - add_momentum(step, th[i], av[i], momentum)
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
            if rates.weight_decay > 0 or segments[SAMPLES, segment] > 0:
                sums[piece, STEP_SQ] = total_sq(st, identity)
                sums[piece, BATCH_SQ] = total_sq(b_grad, identity)
            sums[piece, OUTLIERS] = outliers
            if moves and probed:
                sums[piece, PENALTY] = total(penalties, identity) / 2
        if finishes:
            add_pieces(pieces, sums, found)
            for segment in range(len(totals)):
                if segments[COUNT, segment] > 0:
                    totals[segment, :2] = found[:2, segment]
                    if writes_curvature:
                        totals[segment, 2:4] = found[2:4, segment]
                segments[DECAY, segment] = 0.0
                if rates.weight_decay > 0 or segments[SAMPLES, segment] > 0:
                    segments[DECAY, segment] = decay_of(
                        totals_of(totals[segment]),
                        sums_of(found[:, segment]),
                        segments[LENGTH, segment],
                        segments[SAMPLES, segment],
                        rates,
                    )
                if moves:
                    follow(update_momentum, totals[segment], found[PRODUCTS, segment], rates.advantage, constants)

    return learn_loop


def sums_of(column: Any) -> Sums:
    """Return the sums over a segment."""
    return Sums(column[0], column[1], column[2], column[3], column[4], column[5], column[6], column[7], column[8])


def follow(update_momentum: Callable[..., Any], row: Any, product: float, advantage: float, config: Any) -> None:
    """Let the momentum in the totals of a segment follow a step."""
    after = update_momentum(Momentum(row[MOMENTUM], row[AGREEMENT]), product, advantage, config)
    row[MOMENTUM], row[AGREEMENT] = after.coefficient, after.agreement


@functools.cache
def learn_loop(
    strategy: Strategy, decoupled: bool, is_compact: tuple[bool, bool], flags: tuple[bool, ...]
) -> Callable[..., None]:
    """Return the loop for an algorithm, the precision of its state (compact: bfloat16), and what a minibatch has."""
    conversions = {True: (widen, narrow), False: (identity, identity)}
    own = strategy.learn(decoupled), strategy.context, strategy.momentum
    return cached_jit(make_learn_loop(*own, *conversions[is_compact[0]], *conversions[is_compact[1]], *flags))


@functools.cache
def move_loop(update_momentum: Callable[..., Any]) -> Callable[..., None]:
    """Return the compiled loop that descends by the steps and averages the iterates. Sums are ∇·(θ − θ̄) before."""

    def move_loop(
        first: int,
        last: int,
        finishes: bool,
        pieces: Any,
        sums: Any,
        products: Any,
        theta: Any,
        average: Any,
        steps: Any,
        grad: Any,
        segments: Any,
        totals: Any,
        rates: Any,
        config: Any,
    ) -> None:
        number = theta.dtype.type
        for piece in range(first, last):
            segment, begin, end = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
            decay, weight = number(segments[DECAY, segment]), number(segments[WEIGHT, segment])
            momentum = number(momentum_weight(totals[segment, MOMENTUM], segments[WEIGHT, segment], rates.lr))
            th, av, st = theta[begin:end], average[begin:end], steps[begin:end]
            if len(av):
                sums[piece, 0] = total_along(grad[begin:end], th, av)
                for i in range(len(th)):
                    moved = descend(th[i], add_momentum(st[i], th[i], av[i], momentum), decay)
                    av[i] = ema(av[i], moved, weight)
                    th[i] = moved
            else:
                for i in range(len(th)):
                    th[i] = descend(th[i], st[i], decay)
        if finishes:
            add_pieces(pieces, sums, products)
            for segment in range(len(totals)):
                if segments[WEIGHT, segment] > 0:
                    follow(update_momentum, totals[segment], products[0, segment], rates.advantage, config)

    return cached_jit(move_loop)
