"""The rule as the body of fused loops, over many tensors in one call. Compiled by numba.

A call that hands over arrays costs more than a small tensor takes to update, so the loops get a table of addresses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vsgd.options import PAPER
from vsgd.probe import shift, tensor_shift
from vsgd.rule import Neighbours, averaging_weight, follow
from vsgd.torch.update import Probe, Scale, Slots, advance, keep, load, side

OPTIONS = PAPER
"""What the loops below are compiled with: as constants, so that whatever is switched off costs nothing."""

SHIFTED = True
"""Whether there was a second gradient; a constant of the loops, too."""

READ: Any = None
"""How evidence is read, one of `vsgd.torch.update.READERS`, compiled."""

MATRIX: Any = None
"""`vsgd.kernels.matrix_at()`, once the loops are compiled."""


class Job(NamedTuple):
    """The tensors of an update, rows × columns in contiguous memory; compiled loops are told their addresses.

    `saved` is θ before a shift, `average` that of the iterates; either may be missing. `count` is of samples, one
    number a row.
    """

    theta: Any
    saved: Any
    average: Any
    count: Any
    slots: Slots
    source: Any


class Part(NamedTuple):
    """What one thread does of a tensor: so many whole rows from the `top` one on, or some columns of a single row."""

    top: int
    rows: int
    columns: int
    first: int
    """The place of its first coordinate among all of the tensor."""


def part_of(rows: int, columns: int, begin: int, end: int) -> Part:
    """What the coordinates from `begin` to `end` of a tensor are; a row belongs where it begins. Compiled."""
    begin, end = max(begin, 0), max(min(end, rows * columns), 0)
    if rows == 1:
        return Part(top=0, rows=1, columns=max(end - begin, 0), first=begin)
    top, bottom = (begin + columns - 1) // columns, (end + columns - 1) // columns
    return Part(top=top, rows=max(bottom - top, 0), columns=columns, first=top * columns)


def job_at(addresses: Any, part: Part, like: Any) -> Job:
    """Part of the tensors whose addresses these are, in the order of `Job`. Compiled."""
    a, (top, rows, columns, first) = addresses, part
    return Job(
        theta=MATRIX(a[0], first, rows, columns, like),
        saved=MATRIX(a[1], first, rows, columns, like),
        average=MATRIX(a[2], first, rows, columns, like),
        count=MATRIX(a[3], top, 1, rows, like)[0],
        slots=Slots(
            grad=MATRIX(a[4], first, rows, columns, like),
            grad_sq=MATRIX(a[5], first, rows, columns, like),
            curv=MATRIX(a[6], first, rows, columns, like),
            curv_sq=MATRIX(a[7], first, rows, columns, like),
            memory=MATRIX(a[8], first, rows, columns, like),
            seen=MATRIX(a[9], top, 1, rows, like)[0],
        ),
        source=(
            MATRIX(a[10], first, rows, columns, like),
            MATRIX(a[11], first, rows, columns, like),
            MATRIX(a[12], first, rows, columns, like),
            MATRIX(a[13], first, rows, columns, like),
            MATRIX(a[14], first, rows, columns, like),
        ),
    )


def shift_each(probes: Probe, addresses: Any, shapes: Any, begin: int, end: int) -> None:
    """`shift_loop` on the coordinates from `begin` to `end`, those of all tensors counted through. Compiled."""
    before = 0
    for t in range(len(shapes)):
        rows, columns = shapes[t]
        part = part_of(rows, columns, begin - before, end - before)
        probe = Probe(probes.size[t], probes.downhill[t], probes.seed[t])
        shift_loop(job_at(addresses[t], part, probes.size), part.first, probe)
        before += rows * columns


def shift_loop(job: Job, first: int, probe: Probe) -> None:
    """Keep θ in `saved` and put θ + δ in its place. Compiled."""
    theta, saved, count, slots, grad = job.theta, job.saved, job.count, job.slots, job.source[0]
    for r in range(theta.shape[0]):
        n, seen = count[r], slots.seen[r]
        for c in range(theta.shape[1]):
            saved[r, c] = theta[r, c]
            if OPTIONS.tensor_probe > 0:
                theta[r, c] += tensor_shift(probe.size, side(first + r * theta.shape[1] + c, grad[r, c], probe))
            else:
                theta[r, c] += shift(load(slots, (r, c), seen), grad[r, c], n, OPTIONS)


def update_each(
    addresses: Any, shapes: Any, begin: int, end: int, neighbours: Any, scale: Scale, outliers: Any
) -> None:
    """`update_loop` on the coordinates from `begin` to `end`, those of all tensors counted through. Compiled."""
    before = 0
    for t in range(len(shapes)):
        rows, columns = shapes[t]
        job = job_at(addresses[t], part_of(rows, columns, begin - before, end - before), neighbours)
        outliers[t] = update_loop(job, Neighbours(neighbours[t, 0], neighbours[t, 1]), scale)
        before += rows * columns


def update_loop(job: Job, neighbours: Neighbours, scale: Scale) -> np.int32:
    """`advance` every coordinate, from `saved` if there was a shift, and count the outliers. Compiled.

    The counter is 32 bits wide, so that as many coordinates as possible go through the processor at once.
    """
    theta, saved, average, count, slots, source = job
    outliers = np.int32(0)
    for r in range(theta.shape[0]):
        n, seen = count[r], slots.seen[r]
        weight = averaging_weight(seen, n, OPTIONS)
        for c in range(theta.shape[1]):
            evidence, direction = READ(source, (r, c))
            state = load(slots, (r, c), seen)
            here = theta[r, c]
            if SHIFTED:
                start = saved[r, c]
                new, state, outlier = advance(
                    start, here - start, state, evidence, direction, n, neighbours, scale, OPTIONS
                )
            else:
                new, state, outlier = advance(here, None, state, evidence, direction, n, neighbours, scale, OPTIONS)
            theta[r, c] = new
            if OPTIONS.average_iterates:
                average[r, c] = follow(average[r, c], new, weight)
            keep(slots, (r, c), state)
            outliers = np.int32(outliers + np.int32(outlier))
    return outliers
