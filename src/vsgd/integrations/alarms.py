"""Alarms: messages about problems of a training run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from vsgd.errors import one_line
from vsgd.integrations.run_file import Record, TensorRecord

RECENT_STEPS = 100
"""Number of recent steps in which skipped steps are counted."""

MIN_CURVATURE = 1e-5
"""A tensor with less curvature, in units of the median over tensors, causes an alarm."""

MANY_OUTLIERS = 0.3
"""A tensor with a larger fraction of outliers, in three records in a row, causes an alarm."""

RISE = 2.0
"""A loss above this many times the lowest one causes an alarm."""

SMOOTHING = 5
"""Number of records over which losses are averaged before they are compared."""


def alarms(records: Sequence[Record]) -> list[str]:
    """Return messages about the last record. Earlier records are used for comparison."""
    if not records:
        return []
    last = records[-1]
    return [
        *_not_finite(records),
        *_rising(records),
        *_without_gradient(last),
        *_without_curvature(last),
        *_surprised(records),
    ]


def _listed(tensors: Sequence[TensorRecord]) -> str:
    """Return the first names, with control characters escaped."""
    names = [one_line(tensor.name) for tensor in tensors[:3]]
    return ", ".join(names) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")


def _not_finite(records: Sequence[Record]) -> list[str]:
    steps, since = 0, len(records)
    while since > 0 and steps < RECENT_STEPS:
        since -= 1
        steps += records[since].steps
    skipped = records[-1].skipped - (records[since - 1].skipped if since else 0)
    if skipped <= 0:
        return []
    return [f"the loss or its gradient was not finite in {skipped} of the last {steps} steps, which were skipped"]


def _rising(records: Sequence[Record]) -> list[str]:
    known = [record for record in records if math.isfinite(record.loss)]
    if len(known) < 2 * SMOOTHING:
        return []
    means = [fmean(record.loss for record in known[i : i + SMOOTHING]) for i in range(len(known) - SMOOTHING + 1)]
    lowest = min(range(len(means)), key=means.__getitem__)
    if not means[-1] > RISE * means[lowest] > 0:
        return []
    step = known[lowest + SMOOTHING - 1].step
    return [f"the loss has risen to {means[-1]:.3g}, {means[-1] / means[lowest]:.1f} times its lowest at step {step:,}"]


def _without_gradient(last: Record) -> list[str]:
    dead = [tensor for tensor in last.tensors if tensor.high_rate == 0 and tensor.signal_to_noise == 0]
    return [f"no gradient reaches {_listed(dead)}"] if dead else []


def implied_curvature(tensor: TensorRecord) -> float:
    """Return the signal fraction divided by the median rate. By eq. 3 this estimates the curvature."""
    fraction = 1 / (1 + 1 / tensor.signal_to_noise) if tensor.signal_to_noise > 0 else 0.0
    return fraction / tensor.rate if tensor.rate > 0 else math.nan


def _without_curvature(last: Record) -> list[str]:
    curvatures = {tensor: implied_curvature(tensor) for tensor in last.tensors}
    known = [curvature for curvature in curvatures.values() if curvature > 0]
    if len(known) < 3:
        return []
    flat = [t for t, curvature in curvatures.items() if 0 < curvature < MIN_CURVATURE * median(known)]
    return [f"almost no curvature in {_listed(flat)}: only the step limits bound its steps"] if flat else []


def _surprised(records: Sequence[Record]) -> list[str]:
    """Return an alarm if tensors have many outliers in three records in a row."""
    if len(records) < 3 or len({len(record.tensors) for record in records[-3:]}) > 1:
        return []
    columns = zip(*(record.tensors for record in records[-3:]), strict=True)
    seen = [column[-1] for column in columns if min(tensor.outliers for tensor in column) > MANY_OUTLIERS]
    return [f"many outliers in {_listed(seen)}: the data may have changed"] if seen else []
