"""Where an update runs: on the CPU in compiled loops, all tensors at once; elsewhere on whole tensors, one by one."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vsgd.kernels import compiled, kept, matrix_at
from vsgd.options import Options
from vsgd.probe import guessed_curvature, probe_size, shift, tensor_shift
from vsgd.rule import Neighbours, averaging_weight, follow
from vsgd.torch.loops import Job, shift_each, update_each
from vsgd.torch.update import MOST_PARTS, READERS, Probe, Scale, Slots, advance, each_tensor, keep, load, side

PIECE = 1 << 16
"""Coordinates below which a second thread is not worth waking."""


def alike(jobs: dict[Tensor, Job]) -> list[dict[Tensor, Job]]:
    """Jobs that go together: of one kind, in one precision, on one device."""
    kinds: dict[Any, dict[Tensor, Job]] = {}
    for parameter, job in jobs.items():
        kind = job.theta.device, job.theta.dtype, type(job.source), job.saved is None
        kinds.setdefault(kind, {})[parameter] = job
    return list(kinds.values())


def is_like(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.device == other.device


def shift_tensors(jobs: Sequence[Job], downhill: Sequence[bool], seeds: Sequence[int], options: Options) -> None:
    """Add δ to θ, in place, and keep what it was in `saved`. See `Probe` for what decides on which side."""
    probes = [
        Probe(shift_size(job.theta, options), int(down), seed)
        for job, down, seed in zip(jobs, downhill, seeds, strict=True)
    ]
    if jobs[0].theta.is_cpu:
        number = _number(jobs[0])
        loop = _loop(shift_each, options, number, READERS[type(jobs[0].source)])
        sizes, downhills, coins = zip(*probes, strict=True)
        together = Probe(np.array(sizes, number), np.array(downhills), np.array(coins))
        _on_threads(partial(loop, together), jobs)
    else:
        for job, probe in zip(jobs, probes, strict=True):
            place = torch.arange(job.theta.numel(), device=job.theta.device)
            _tensor_function(shift_whole)(by_rows(job), probe, place, options)


def update_tensors(
    jobs: Sequence[Job], neighbours: Sequence[Neighbours], scale: Scale, options: Options
) -> Sequence[int | Tensor]:
    """`vsgd.torch.update.advance` for all of θ, in place. Returns how many coordinates of each were outliers."""
    update = _update_together if jobs[0].theta.is_cpu else _update_one_by_one
    outliers = update(jobs, neighbours, scale, options)
    torch._foreach_add_([job.slots.seen for job in jobs], [job.count for job in jobs])
    return outliers


def _update_together(
    jobs: Sequence[Job], neighbours: Sequence[Neighbours], scale: Scale, options: Options
) -> Sequence[int | Tensor]:
    number = _number(jobs[0])
    loop = _loop(update_each, options, number, READERS[type(jobs[0].source)], shifted=jobs[0].saved is not None)
    theirs: Any = np.array(neighbours, number)

    def run(*part: Any) -> Any:
        outliers = np.zeros(len(jobs), np.int64)
        loop(*part, theirs, _typed(scale, number), outliers)
        return outliers

    return sum(_on_threads(run, jobs)).tolist()  # type: ignore[no-any-return]


def _update_one_by_one(
    jobs: Sequence[Job], neighbours: Sequence[Neighbours], scale: Scale, options: Options
) -> Sequence[int | Tensor]:
    like = jobs[0].slots.grad
    tensors = Scale(*(torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in scale))
    update = _tensor_function(update_whole)
    return [
        update(READERS[type(job.source)], by_rows(job), each, tensors, options)
        for job, each in zip(jobs, neighbours, strict=True)
    ]


def shift_size(theta: Tensor, options: Options) -> Any:
    """|δ| of a tensor, or of the rows that were touched."""
    return probe_size(root_mean_square(theta), options)


def root_mean_square(tensor: Tensor) -> Any:
    """On the CPU it is a float, which is quicker to calculate with."""
    norm = torch.linalg.vector_norm(tensor) / math.sqrt(max(tensor.numel(), 1))
    return float(norm) if norm.is_cpu else norm


def mean_curvature(slots: Slots) -> Neighbours:
    """That of all coordinates of a tensor, or of the rows that were touched."""
    curv, curv_sq = slots.curv.mean(), slots.curv_sq.mean()
    return Neighbours(float(curv), float(curv_sq)) if curv.is_cpu else Neighbours(curv, curv_sq)


def neighbours_of(mean: Neighbours, grad: Tensor, theta: Tensor, options: Options) -> Neighbours:
    """What the coordinates of a tensor, whose mean curvature this is, tell each other of it."""
    curv, curv_sq = mean
    if options.tensor_probe and (isinstance(curv, Tensor) or curv == 0):  # to ask a GPU would be to wait
        guess = guessed_curvature(curv, root_mean_square(grad), shift_size(theta, options))
        curv, curv_sq = curv + guess, curv_sq + guess * guess
    return Neighbours(options.neighbours * curv, options.neighbours * curv_sq)


# --- whole tensors ------------------------------------------------------------------------------------------------


def by_rows(job: Job) -> Job:
    """All tensors as rows × columns."""
    theta, saved, average, count, slots, source = job
    shape = _shape(job)
    theta, saved, average, source = each_tensor(lambda tensor: tensor.view(shape), (theta, saved, average, source))
    parts = Slots(*(part.view(shape) for part in slots[:-1]), slots.seen)  # type: ignore[call-arg]
    return Job(theta, saved, average, count, parts, source)


def shift_whole(job: Job, probe: Probe, place: Tensor, options: Options) -> None:
    """`shift_loop` without the loop."""
    theta = job.theta
    job.saved.copy_(theta)
    if options.tensor_probe > 0:
        theta += tensor_shift(probe.size, side(place.view_as(theta), job.source[0], probe))
    else:
        state = load(job.slots, ..., job.slots.seen[:, None])
        theta += shift(state, job.source[0], job.count[:, None], options)


def update_whole(read: Any, job: Job, neighbours: Neighbours, scale: Scale, options: Options) -> Tensor:
    """`update_loop` without the loop."""
    theta, saved, average, count, slots, source = job
    start, delta = (theta, None) if saved is None else (saved, theta - saved)
    evidence, direction = read(source, ...)
    state, count = load(slots, ..., slots.seen[:, None]), count[:, None]
    new, state, outlier = advance(start, delta, state, evidence, direction, count, neighbours, scale, options)
    theta.copy_(new)
    if options.average_iterates:
        average.copy_(follow(average, new, averaging_weight(slots.seen[:, None], count, options)))
    keep(slots, ..., state)
    return torch.sum(outlier)


@functools.cache
def _tensor_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled by torch, once for all shapes: counts and scales come as tensors, so no step compiles anew."""
    return torch.compile(function, dynamic=True)


# --- loops --------------------------------------------------------------------------------------------------------


@functools.cache
def _loop(
    loop: Callable[..., Any], options: Options, number: Any, read: Callable[..., Any], shifted: bool = True
) -> Callable[..., Any]:
    """Everything that is known beforehand is a constant of the machine code."""
    return kept(loop, OPTIONS=_typed(options, number), SHIFTED=shifted, READ=compiled(read), MATRIX=matrix_at())


def _number(job: Job) -> type:
    return np.float64 if job.theta.dtype == torch.float64 else np.float32


def _typed(values: Any, number: type) -> Any:
    """The same values as numbers of this precision, so that float32 loops stay in float32."""
    return type(values)(*(value if isinstance(value, bool) else number(value) for value in values))


def _shape(job: Job) -> tuple[int, int]:
    rows = job.count.numel()
    return rows, job.theta.numel() // max(rows, 1)


def _addresses(job: Job) -> list[int]:
    tensors = (*job[:4], *job.slots, *job.source)
    missing = MOST_PARTS - len(job.source)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [0] * missing


def _on_threads(run: Callable[..., Any], jobs: Sequence[Job]) -> list[Any]:
    """Give each of torch's threads as many coordinates. `run` takes addresses, shapes, the first and the last."""
    addresses = np.array([_addresses(job) for job in jobs])
    shapes = np.array([_shape(job) for job in jobs])
    total = int(shapes.prod(axis=1).sum())
    threads = min(torch.get_num_threads(), max(1, total // PIECE))
    own, *others = itertools.pairwise(total * k // threads for k in range(threads + 1))
    tasks = [_pool(threads - 1).submit(run, addresses, shapes, *part) for part in others]
    try:
        mine = run(addresses, shapes, *own)
    finally:
        wait(tasks)  # whatever happens here, they still write to these addresses
    return [mine, *(task.result() for task in tasks)]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="vsgd")
