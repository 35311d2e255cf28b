"""Where an update runs: compiled loops over CPU memory, whole tensors elsewhere."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vsgd.kernels import compiled, compiled_with
from vsgd.options import Options
from vsgd.probe import guessed_curvature, random_sign, shift, tensor_shift
from vsgd.rule import Neighbours
from vsgd.torch.update import READERS, Probe, Scale, Slots, advance, each_tensor, keep, load, shift_loop, update_loop

PIECE = 1 << 16
"""Coordinates below which a second thread is not worth waking."""


SMALLEST = 1e-3
"""A tensor with a root mean square below this, zeros say, is shifted as if it had this one."""


def shift_tensor(
    theta: Tensor, saved: Tensor, grad: Tensor, slots: Slots, count: Tensor, options: Options, seed: int = 0
) -> None:
    """Add δ to `theta`, rows × columns, in place, and keep what it was in `saved`. `seed` is of its random signs."""
    size = probe_size(theta, options)
    if theta.is_cpu:
        loop, probe = _loop(shift_loop, options, theta.dtype), Probe(size.numpy()[()], np.int64(seed))
        width = theta.shape[1]
        _in_pieces(
            lambda views, counts, first: loop(*views, counts, probe, first, width), (theta, saved, grad, slots), count
        )
    else:
        place = torch.arange(theta.numel(), device=theta.device).view_as(theta)
        _tensor_function(shift_whole)(theta, saved, grad, slots, count, Probe(size, seed), place, options)


def update_tensor(
    source: Any, theta: Tensor, saved: Tensor | None, slots: Slots, count: Tensor, scale: Scale, options: Options
) -> Tensor:
    """`vsgd.torch.update.advance` for all of `theta`, in place. Returns how many coordinates were outliers."""
    read = READERS[type(source)]
    neighbours = neighbours_of(theta, slots, options)
    outliers: Tensor
    if theta.is_cpu:
        loop, reader, scale = _loop(update_loop, options, theta.dtype), compiled(read), _typed(scale, theta.dtype)
        constants = Neighbours(*(value.numpy()[()] for value in neighbours))
        counted = _in_pieces(
            lambda views, counts, first: loop(reader, *views, counts, constants, scale),
            (source, theta, saved, slots),
            count,
        )
        outliers = torch.tensor(sum(counted))
    else:
        tensors = Scale(*(torch.as_tensor(value, dtype=theta.dtype, device=theta.device) for value in scale))
        outliers = _tensor_function(update_whole)(
            read, source, theta, saved, slots, count, neighbours, tensors, options
        )
    slots.seen.add_(count)
    return outliers


def probe_size(theta: Tensor, options: Options) -> Tensor:
    """|δ| of a tensor, or of the rows that were touched."""
    return options.tensor_probe * root_mean_square(theta).clamp(min=SMALLEST)


def root_mean_square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm / math.sqrt(max(tensor.numel(), 1))


def neighbours_of(theta: Tensor, slots: Slots, options: Options) -> Neighbours:
    """What the coordinates of a tensor, or of the rows that were touched, tell each other of their curvature."""
    if not options.neighbours:
        nothing = slots.seen.new_zeros(())
        return Neighbours(nothing, nothing)
    curv, curv_sq = slots.curv.mean(), slots.curv_sq.mean()
    if options.tensor_probe:
        guess = guessed_curvature(curv, root_mean_square(slots.grad), probe_size(theta, options))
        curv, curv_sq = curv + guess, curv_sq + guess * guess
    return Neighbours(options.neighbours * curv, options.neighbours * curv_sq)


def shift_whole(
    theta: Tensor,
    saved: Tensor,
    grad: Tensor,
    slots: Slots,
    count: Tensor,
    probe: Probe,
    place: Tensor,
    options: Options,
) -> None:
    """`shift_loop` without the loop."""
    saved.copy_(theta)
    if options.tensor_probe > 0:
        theta += tensor_shift(probe.size, random_sign(place, probe.seed))
    else:
        theta += shift(load(slots, ..., slots.seen[:, None]), grad, count[:, None], options)


def update_whole(
    read: Any,
    source: Any,
    theta: Tensor,
    saved: Tensor | None,
    slots: Slots,
    count: Tensor,
    neighbours: Neighbours,
    scale: Scale,
    options: Options,
) -> Tensor:
    """`update_loop` without the loop."""
    start, delta = (theta, None) if saved is None else (saved, theta - saved)
    evidence, direction = read(source, ...)
    state = load(slots, ..., slots.seen[:, None])
    new, state, outlier = advance(start, delta, state, evidence, direction, count[:, None], neighbours, scale, options)
    theta.copy_(new)
    keep(slots, ..., state)
    return torch.sum(outlier)


@functools.cache
def _tensor_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled by torch, once for all shapes: counts and scales come as tensors, so no step compiles anew."""
    return torch.compile(function, dynamic=True)


@functools.cache
def _loop(loop: Callable[..., Any], options: Options, dtype: torch.dtype) -> Callable[..., Any]:
    return compiled_with(loop, OPTIONS=_typed(options, dtype))


def _typed(values: Any, dtype: torch.dtype) -> Any:
    """The same numbers in this precision, so that float32 loops stay in float32."""
    number = np.float64 if dtype == torch.float64 else np.float32
    return type(values)(*(value if isinstance(value, bool) else number(value) for value in values))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="vsgd")


def _in_pieces(run: Callable[[tuple[Any, ...], Any, int], Any], arrays: tuple[Any, ...], count: Tensor) -> list[Any]:
    """Run a compiled loop on all rows and columns, cut for torch's number of threads.

    `run` takes the arrays, the counts, and the place of the first coordinate among all of them.
    """
    rows, columns = next(array for array in arrays if isinstance(array, Tensor)).shape
    views, counts = each_tensor(lambda tensor: tensor.detach().numpy(), arrays), count.numpy()
    threads = min(torch.get_num_threads(), max(1, rows * columns // PIECE))
    if threads == 1:
        return [run(views, counts, 0)]

    def piece(at: tuple[slice, slice]) -> Any:
        cut = each_tensor(lambda array: array[at[: array.ndim]], views)
        return run(cut, counts[at[0]], (at[0].start or 0) * columns + (at[1].start or 0))

    own, *others = _pieces(rows, columns, threads)
    tasks = [_pool(threads - 1).submit(piece, at) for at in others]
    return [piece(own), *(task.result() for task in tasks)]


def _pieces(rows: int, columns: int, threads: int) -> Iterator[tuple[slice, slice]]:
    """Rows are shared out, or the columns of a single one; either way the pieces are contiguous."""
    by_rows = rows > 1
    edges = np.linspace(0, rows if by_rows else columns, threads + 1).astype(int)
    for start, stop in itertools.pairwise(edges):
        yield (slice(start, stop), slice(None)) if by_rows else (slice(None), slice(start, stop))
