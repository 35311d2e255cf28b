"""All that a linear model remembers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vsgd.algorithms.base import require
from vsgd.algorithms.columns import Columns
from vsgd.algorithms.paper import Paper
from vsgd.linear.losses import Task

FIELDS = 8
THETA, GRAD, GRAD_SQ, CURV, CURV_SQ, MEMORY, SEEN, LARGEST = range(FIELDS)
"""What the table has of a coordinate: θ, the four averages, τ, how many samples, and their largest |x|."""


class Model(NamedTuple):
    """All that a linear model remembers, changed in place by `train`.

    Attributes:
        table: columns × 8 × outputs.
        average: columns × outputs, the averaged θ; empty if there is no averaging.
        curvature: 2 × outputs, sums over all rows so far: their curvature in the output, and their weight.
        residual: a typical |margin − target|, for losses that do not say what a margin of 1 means.
        progress: a seed, minibatches and rows so far.
    """

    table: Any
    average: Any
    curvature: Any
    residual: Any
    progress: Any


def aligned_zeros(shape: tuple[int, ...]) -> Any:
    """Zeros that begin with a cache line, 64 bytes."""
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
