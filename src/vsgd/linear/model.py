"""The parameters and statistics of a linear model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vsgd.algorithms.base import require
from vsgd.algorithms.columns import Columns
from vsgd.algorithms.paper import Paper
from vsgd.linear.losses import Task

FIELDS = 8
THETA, GRAD, GRAD_SQ, CURV, CURV_SQ, MEMORY, SEEN, COLUMN_MAX = range(FIELDS)
"""Fields of a coordinate in the table: θ, the four moving averages, τ, samples seen, and the largest |x| so far."""

COLUMN_FIELDS = 7
SUM, SUM_SQ, COUNT, MIN, MAX, CENTER, SCALE_SQ = range(COLUMN_FIELDS)
"""Fields of `Model.columns`: sums over the non-zero values x and x², their number, smallest and largest; the constant
that is subtracted from the column, and the mean square of what is left."""

OUTPUT_FIELDS = 9
CURVATURE, WEIGHT, RECENT_CURVATURE, RECENT_SLOPE_SQ = range(4)
FRESH_WEIGHT, FRESH_MARGIN, FRESH_SLOPE, FRESH_SLOPE_SQ, FRESH_CURVATURE = range(4, 9)
"""Fields of `Model.sums`, sums over rows. All visits: curvature of the loss in the output, and weight. Recent visits:
curvature, and squared slope. First visits: weight w, w·margin, slope·q, its square, and curvature·q², where q is the
margin minus the mean margin."""

STRENGTH, CALIBRATION = range(2)
"""Fields of `Model.penalty`: λ by the evidence, and the least factor that margins of unseen rows should have had."""

SEED, BATCHES, ROWS, FRESH_ROWS = range(4)
"""Fields of `Model.progress`: the seed of the probes; minibatches and rows so far; rows visited for the first time."""


class Model(NamedTuple):
    """The parameters and statistics of a linear model, changed in place by a pass.

    Attributes:
        table: columns × 8 × outputs; the fields above.
        average: columns × outputs, the averaged θ; empty if there is no averaging.
        columns: columns × 7, what is known about the values of a column.
        sums: 9 × outputs, sums over rows.
        penalty: 2 × outputs, the penalty that is estimated while learning.
        residual: EMA of |margin − target|: the unit of the output, for losses without one.
        progress: seed, minibatches, rows, rows visited for the first time.

    The margin of a row is Σ θ_j (x_j − center_j) plus θ of the intercept, which is the last column.
    """

    table: Any
    average: Any
    columns: Any
    sums: Any
    penalty: Any
    residual: Any
    progress: Any


def aligned_zeros(shape: tuple[int, ...]) -> Any:
    """Zeros, aligned to a cache line of 64 bytes."""
    size = int(np.prod(shape))
    room = np.zeros(size + 8)
    first = -room.ctypes.data % 64 // 8
    return room[first : first + size].reshape(shape)


def new_model(columns: int, outputs: int, task: Task, options: Columns | Paper, seed: int) -> Model:
    """A model that has seen nothing."""
    require(options, Columns, Paper)
    table = aligned_zeros((columns, FIELDS, outputs))
    table[:, MEMORY] = options.memory
    return Model(
        table=table,
        average=np.zeros((columns if task.average else 0, outputs)),
        columns=np.zeros((columns, COLUMN_FIELDS)),
        sums=np.zeros((OUTPUT_FIELDS, outputs)),
        penalty=np.stack([np.zeros(outputs), np.ones(outputs)]),
        residual=np.zeros(1),
        progress=np.array([seed, 0, 0, 0], np.int64),
    )
