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

SEED, BATCHES, ROWS = range(3)
"""Fields of `Model.progress`: the seed of the probes; minibatches and rows so far."""


class Model(NamedTuple):
    """The parameters and statistics of a linear model, changed in place by a pass.

    Attributes:
        table: columns × 8 × outputs; the fields above.
        average: columns × outputs, the averaged θ; empty if there is no averaging.
        curvature: 2 × outputs, sums over all rows so far: curvature of the loss in the output, and weight.
        residual: EMA of |margin − target|: the unit of the output, for losses without one.
        progress: seed, minibatches, rows.
    """

    table: Any
    average: Any
    curvature: Any
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
        curvature=np.zeros((2, outputs)),
        residual=np.zeros(1),
        progress=np.array([seed, 0, 0], np.int64),
    )
