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
"""Fields of `Model.columns`: sums of the non-zero values x and of x²; their count, minimum and maximum; the center that
is subtracted from the column, and the mean square of the centered values."""

OUTPUT_FIELDS = 9
CURVATURE, WEIGHT, RECENT_CURVATURE, RECENT_SLOPE_SQ = range(4)
FRESH_WEIGHT, FRESH_MARGIN, FRESH_SLOPE, FRESH_SLOPE_SQ, FRESH_CURVATURE = range(4, 9)
"""Fields of `Model.sums`, sums over rows. All visits: curvature of the loss in the output, and weight. Recent visits:
curvature, and squared slope. First visits: weight w, w·margin, slope·q, its square, and curvature·q², where q is the
margin minus the mean margin."""

STRENGTH, CALIBRATION = range(2)
"""Fields of `Model.penalty`: the precision λ of the prior, and the calibration c (see `evidence`)."""

SEED, BATCHES, ROWS, FRESH_ROWS = range(4)
"""Fields of `Model.progress`: seed of the probes, number of minibatches, row visits, and first visits of rows."""


class Model(NamedTuple):
    """The parameters and statistics of a linear model, changed in place by a pass.

    Attributes:
        table: columns × 8 × outputs, parameters and statistics of the coordinates.
        average: columns × outputs, the averaged θ; empty without averaging.
        columns: columns × 7, statistics of the values of each column.
        sums: 9 × outputs, sums over rows.
        penalty: 2 × outputs, the estimated penalty.
        residual: one number, the EMA of |margin − target|. It is the unit of the output if the loss has none.
        progress: four integers, seed and counters.

    The margin of a row is Σ θ_j (x_j − center_j) plus the intercept, which is θ of the last column.
    """

    table: Any
    average: Any
    columns: Any
    sums: Any
    penalty: Any
    residual: Any
    progress: Any


def aligned_zeros(shape: tuple[int, ...]) -> Any:
    """Return an array of zeros, aligned to a cache line of 64 bytes."""
    size = int(np.prod(shape))
    room = np.zeros(size + 8)
    first = -room.ctypes.data % 64 // 8
    return room[first : first + size].reshape(shape)


def new_model(columns: int, outputs: int, task: Task, options: Columns | Paper, seed: int) -> Model:
    """Return an untrained model.

    Args:
        columns: number of columns, including the intercept.
        outputs: number of margins per row.
        task: the objective.
        options: the algorithm and its constants.
        seed: seed of the probes.
    """
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
