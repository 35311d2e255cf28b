"""Center columns by their running means while rows stay sparse. Plain Python, compiled into the training pass.

The margin of a row is Σ θ_j (x_j − c_j) + b. When a center c_j changes by d, θ_j d is added to the intercept b, so that
no prediction changes. Only columns that are non-zero in many rows have a center. The mean of a rare column is small
compared with its values, and centering would make all its zeros non-zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vsgd.linear.losses import Task
from vsgd.linear.minibatch import NO_SLOT, ROUNDING, Workspace
from vsgd.linear.model import (
    CENTER,
    COLUMN_MAX,
    COUNT,
    FRESH_ROWS,
    MAX,
    MIN,
    SCALE_SQ,
    SUM,
    SUM_SQ,
    THETA,
    Model,
)
from vsgd.linear.rows import Rows

MIN_FREQUENCY = 0.25
"""A column is centered if it is non-zero in at least this fraction of the rows."""


def observe(model: Model, rows: Rows, batch: Any) -> None:
    """Add the rows of a minibatch to the statistics of their columns."""
    columns = model.columns
    model.progress[FRESH_ROWS] += len(batch)
    for i in range(len(batch)):
        row = batch[i]
        for t in range(rows.length[row]):
            x = np.float64(rows.data[rows.data_start[row] + t])  # a square of float32 may overflow
            if x != 0:
                column = rows.indices[rows.index_start[row] + t]
                first = columns[column, COUNT] == 0
                columns[column, SUM] += x
                columns[column, SUM_SQ] += x * x
                columns[column, COUNT] += 1
                columns[column, MIN] = x if first else min(x, columns[column, MIN])
                columns[column, MAX] = x if first else max(x, columns[column, MAX])


def is_refresh_due(rows_before: int, rows: int) -> bool:
    """Return whether the number of rows has passed the next power of 2^¼."""
    return rows_before == 0 or math.floor(4 * math.log2(rows)) > math.floor(4 * math.log2(rows_before))


def move_centers(model: Model, task: Task) -> None:
    """Set the centers to the current means. Update the mean square and the largest |x − center| of each column."""
    columns, table = model.columns, model.table
    intercept = table.shape[0] - 1
    rows = float(model.progress[FRESH_ROWS])
    for j in range(table.shape[0] - task.intercept):
        count = columns[j, COUNT]
        if count == 0:
            continue
        low, high, center = columns[j, MIN], columns[j, MAX], 0.0
        scale_sq = columns[j, SUM_SQ] / count
        if task.center and count >= MIN_FREQUENCY * rows:
            center = columns[j, SUM] / rows
            scale_sq = columns[j, SUM_SQ] / rows - center * center
            if count < rows:
                low, high = min(low, 0.0), max(high, 0.0)
        largest = max(high - center, center - low)
        if largest <= ROUNDING * abs(center):
            largest = 0.0
        columns[j, SCALE_SQ] = min(max(scale_sq, 1e-6 * largest * largest), largest * largest)
        moved = center - columns[j, CENTER]
        if moved == 0:
            continue
        columns[j, CENTER] = center
        for k in range(table.shape[2]):
            table[intercept, THETA, k] += table[j, THETA, k] * moved
            table[j, COLUMN_MAX, k] = largest
            if task.average:
                model.average[intercept, k] += model.average[j, k] * moved


def list_centered(model: Model, task: Task, work: Workspace) -> None:
    """Assign the first slots of the workspace to the columns with a center."""
    for s in range(work.centered[0]):
        work.slot_of[work.column[s]] = NO_SLOT
    count = np.uint32(0)
    if task.center:
        for j in range(model.table.shape[0] - 1):
            if model.columns[j, CENTER] != 0:
                work.slot_of[j] = count
                work.column[count] = j
                work.center[count] = model.columns[j, CENTER]
                work.scale_sq[count] = model.columns[j, SCALE_SQ]
                count = np.uint32(count + np.uint32(1))
    work.centered[0] = count


def most_centered(model: Model, rows: Rows) -> int:
    """Return an upper bound on the number of columns that have a center during a pass over these rows.

    Such a column is non-zero in at least `MIN_FREQUENCY` of the rows, so the bound follows from the length of rows.
    """
    before = model.columns[:, COUNT].sum() / max(int(model.progress[FRESH_ROWS]), 1)
    longest = max(float(before), float(rows.length.max(initial=0)))
    now = int(np.count_nonzero(model.columns[:, CENTER]))
    features: int = model.table.shape[0] - 1
    return min(features, max(now, math.ceil(longest / MIN_FREQUENCY) + 1))
