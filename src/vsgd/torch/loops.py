"""Compiled loops over flat arrays: the engine for tensors on a CPU. The body of each loop is an algorithm's own text.

Arrays are cut into pieces of at most `PIECE` coordinates of one segment. Threads share the pieces, and sums are taken
over a piece at a time, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from vsgd.algorithms.networks import TensorContext, limited_step, random_bit
from vsgd.algorithms.networks import probe as probe_of_size
from vsgd.core import Moments, State, descend, ema, measured_curvature
from vsgd.jit import kept

PIECE = 1 << 13
MIN_PIECES_PER_THREAD = 8
"""Waking a second thread for less work takes longer than doing it."""

GRAD_SQ, SIGNAL, CURV, CURV_SQ, OUTLIERS, GAIN, BEND = range(7)
"""Columns of the sums over a piece: v̄, ḡ², |h̄^fd|, v̄^fd, outliers, ∇·(θ − θ̄) and ½|h̄^fd|(θ − θ̄)²."""


@functools.lru_cache(256)
def pieces_of(lengths: tuple[int, ...], active: tuple[bool, ...]) -> Any:
    """Number of the segment, begin and end of every piece of the active segments."""
    starts = itertools.accumulate(lengths, initial=0)
    table = [
        (segment, begin, min(begin + PIECE, start + length))
        for segment, (start, length, wanted) in enumerate(zip(starts, lengths, active, strict=False))
        if wanted
        for begin in range(start, start + length, PIECE)
    ]
    return np.array(table, np.int64).reshape(-1, 3)


def on_threads(loop: Callable[..., Any], pieces: Any, *arguments: Any) -> None:
    """Share the pieces among torch's threads; the calling one takes its part."""
    count = len(pieces)
    threads = min(torch.get_num_threads(), max(1, count // MIN_PIECES_PER_THREAD))
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


def probe_loop(first: int, last: int, pieces: Any, delta: Any, starts: Any, sizes: Any, seeds: Any) -> None:
    """`networks.probe` with random signs."""
    for piece in range(first, last):
        segment, begin, end = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
        size, seed, offset = sizes[segment], seeds[segment], begin - starts[segment]
        part = delta[begin:end]
        for i in range(len(part)):
            part[i] = probe_of_size(size, random_bit(offset + i, seed))


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


def make_learn_loop(
    learn: Callable[..., Any],
    load: Callable[..., Any],
    store: Callable[..., Any],
    load_curv: Callable[..., Any],
    store_curv: Callable[..., Any],
    several: bool,
    probed: bool,
    keeps_curv: bool,
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
            weight, no_decay = segments[-1, segment], segments.dtype.type(0)
            bends = np.empty(len(th) if moves and probed else 0, theta.dtype)
            gr, gr_sq = means[0][begin:end], means[1][begin:end]
            cu, cu_sq = curvs[0][begin:end], curvs[1][begin:end]
            b_grad, b_grad_sq, b_direction = batch[0][begin:end], batch[1][begin:end], batch[4][begin:end]
            b_diff, b_diff_sq = batch[2][begin:end], batch[3][begin:end]
            outliers = np.int32(0)
            if moves:
                sums[piece, GAIN] = total_along(b_grad, th, av)
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
                if keeps_curv:
                    cu[i] = store_curv(state.mean.curv)
                    cu_sq[i] = store_curv(state.mean.curv_sq)
                if moves:
                    if probed:
                        offset = th[i] - av[i]
                        bends[i] = abs(load_curv(cu[i])) * offset * offset
                    moved = descend(th[i], step, no_decay)
                    av[i] = ema(av[i], moved, weight)
                    th[i] = moved
                else:
                    st[i] = step
                me[i] = store(state.memory)
                # a counter as wide as the numbers, so that as many coordinates as possible are treated at once
                outliers = np.int32(outliers + np.int32(info.outlier))
            sums[piece, GRAD_SQ] = total(gr_sq, load)
            sums[piece, SIGNAL] = total_sq(gr, load)
            if keeps_curv:
                sums[piece, CURV] = total_abs(cu, load_curv)
                sums[piece, CURV_SQ] = total(cu_sq, load_curv)
            sums[piece, OUTLIERS] = outliers
            if moves and probed:
                sums[piece, BEND] = total(bends, identity) / 2

    return learn_loop


@functools.cache
def learn_loop(learn: Callable[..., Any], compact: bool, compact_curv: bool, *flags: bool) -> Callable[..., None]:
    """The loop for an algorithm, the precision of its state (compact: bfloat16), and what there is in a minibatch."""
    conversions = {True: (widen, narrow), False: (identity, identity)}
    return kept(make_learn_loop(learn, *conversions[compact], *conversions[compact_curv], *flags))


def move_loop(
    first: int, last: int, pieces: Any, theta: Any, average: Any, steps: Any, grad: Any, segments: Any, sums: Any
) -> None:
    """Descend by the steps and average the iterates. Sums are ∇·(θ − θ̄) before that."""
    for piece in range(first, last):
        segment, begin, end = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
        decay, weight = segments[0, segment], segments[1, segment]
        th, av, st = theta[begin:end], average[begin:end], steps[begin:end]
        if len(av):
            sums[piece] = total_along(grad[begin:end], th, av)
        for i in range(len(th)):
            th[i] = descend(th[i], st[i], decay)
        for i in range(len(av)):
            av[i] = ema(av[i], th[i], weight)
