"""The loops of the engine for CPU tensors. They call the functions of `vsgd.algorithms` for each coordinate.

Numba compiles them. Loops run over pieces: at most `PIECE` coordinates of one segment. They take sums over each piece.
The last call adds these up to sums over segments, and finishes with what happens once per segment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from vsgd.algorithms.networks import Momentum, TensorContext, add_momentum, momentum_weight, random_bit
from vsgd.algorithms.strategy import Strategy, Sums, Totals, decay_of, limited_step
from vsgd.core import Moments, State, descend, ema, measured_curvature
from vsgd.jit import cached_jit

SEEN, COUNT, LENGTH, SAMPLES, WEIGHT, DECAY = SEGMENT = range(6)
"""Rows of an array of numbers per segment."""

GRAD_SQ, SIGNAL, CURV, CURV_SQ, OUTLIERS, STEP_SQ, BATCH_SQ, PRODUCTS, PENALTY = range(len(Sums._fields))
"""Columns of an array of sums."""

SCALE, MOMENTUM, AGREEMENT = (Totals._fields.index(name) for name in ("scale", "momentum", "agreement"))
"""Columns of an array of totals."""


# --- numbers and sums -------------------------------------------------------------------------------------------------


def widen(bits: Any) -> Any:
    """Return a float32 from the 16 bits of a bfloat16, a type that numba does not have."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def narrow(value: Any) -> Any:
    """Return the 16 bits of the nearest bfloat16."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def identity(value: Any) -> Any:
    return value


def total(values: Any, load: Callable[..., Any]) -> Any:
    """Return the sum over a piece."""
    result = load(values[0])
    for i in range(1, len(values)):
        result += load(values[i])
    return result


def total_sq(values: Any, load: Callable[..., Any]) -> Any:
    """Return the sum of squares over a piece."""
    result = load(values[0]) * load(values[0])
    for i in range(1, len(values)):
        x = load(values[i])
        result += x * x
    return result


def total_abs(values: Any, load: Callable[..., Any]) -> Any:
    """Return the sum of absolute values over a piece."""
    result = abs(load(values[0]))
    for i in range(1, len(values)):
        result += abs(load(values[i]))
    return result


def total_along(grad: Any, theta: Any, average: Any) -> Any:
    """Return ∇·(θ − θ̄) over a piece."""
    result = grad[0] * (theta[0] - average[0])
    for i in range(1, len(grad)):
        result += grad[i] * (theta[i] - average[i])
    return result


# sums within a piece may be reordered, so that the compiler can vectorize them
for _function in (total, total_sq, total_abs, total_along):
    vars(_function)["jit_options"] = {"fastmath": {"reassoc", "nsz"}}


def add_pieces(pieces: Any, sums: Any, totals: Any) -> None:
    """Add sums over pieces, pieces × kinds, to those over segments, kinds × segments."""
    for piece in range(len(pieces)):
        for kind in range(len(totals)):
            totals[kind, pieces[piece, 0]] += sums[piece, kind]


def totals_of(row: Any) -> Totals:
    """Return the totals of a segment."""
    return Totals(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8])


def sums_of(column: Any) -> Sums:
    """Return the sums over a segment."""
    return Sums(column[0], column[1], column[2], column[3], column[4], column[5], column[6], column[7], column[8])


# --- loops ------------------------------------------------------------------------------------------------------------


def norm_loop(first: int, last: int, finishes: bool, pieces: Any, sums: Any, totals: Any, values: Any) -> None:
    """Compute squared norms."""
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


@functools.cache
def probe_loop(probe: Callable[..., Any], compact: bool, is_random: bool) -> Callable[..., None]:
    """Return the compiled loop that computes offsets δ.

    Args:
        probe: of the algorithm.
        compact: whether statistics are bfloat16.
        is_random: whether signs are random. Otherwise they are opposite to those of the gradient.
    """
    load = widen if compact else identity

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

    return cached_jit(probe_loop)


@functools.cache
def learn_loop(
    strategy: Strategy, decoupled: bool, is_compact: tuple[bool, bool], flags: tuple[bool, bool, bool, bool]
) -> Callable[..., None]:
    """Return the compiled loop that learns from a minibatch. All that is known beforehand is a constant of its code.

    Args:
        strategy: of the algorithm.
        decoupled: whether the covariance of the gradient is nearly diagonal.
        is_compact: whether means of gradients, and of curvatures, are bfloat16.
        flags: whether the minibatch has several samples, whether there was a second gradient, whether curvatures may
            change, and whether the loop also descends and averages the iterates.
    """
    several, probed, writes_curvature, moves = flags
    learn, context, update_momentum = strategy.learn(decoupled), strategy.context, strategy.momentum
    conversions = {True: (widen, narrow), False: (identity, identity)}
    (load, store), (load_curv, store_curv) = (conversions[each] for each in is_compact)

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
            # slices, so that indices start at 0: only loops whose index is known not to be negative are vectorized
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
                state, info = learn(State(mean, load(me[i]), seen), moments, count, config, tensor, writes_curvature)
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
                    for kind in range(CURV_SQ + 1 if writes_curvature else SIGNAL + 1):
                        totals[segment, kind] = found[kind, segment]
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
                    follow(
                        update_momentum, totals[segment], found[PRODUCTS, segment], rates.momentum_obstacle, constants
                    )

    return cached_jit(learn_loop)


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
                    follow(update_momentum, totals[segment], products[0, segment], rates.momentum_obstacle, config)

    return cached_jit(move_loop)


def follow(update_momentum: Callable[..., Any], row: Any, product: float, obstacle: float, config: Any) -> None:
    """Let the momentum in the totals of a segment follow a step."""
    after = update_momentum(Momentum(row[MOMENTUM], row[AGREEMENT]), product, obstacle, config)
    row[MOMENTUM], row[AGREEMENT] = after.coefficient, after.agreement
