"""Validation of the arguments of compiled code, which checks neither bounds nor types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vsgd.linear.model import COLUMN_FIELDS, FIELDS, OUTPUT_FIELDS, Model

if TYPE_CHECKING:
    from vsgd.linear.rows import Rows
    from vsgd.linear.training import Training

LARGEST_VALUE = 1e70
"""Maximum |x|. Squared curvatures contain the fourth power of a value times that of the length of a row."""

MAX_COLUMNS = 2**32 - 2
"""Maximum number of columns. Compiled code numbers them in 32 bits."""


class Expected(NamedTuple):
    """Shape and type of an array."""

    shape: tuple[int, ...]
    dtype: type = np.float64

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype)} of shape {self.shape}"


def description_of(columns: int, outputs: int, averaged: bool) -> dict[str, Expected]:
    """Return the shapes and types of the arrays of a `Model`."""
    return {
        "table": Expected((columns, FIELDS, outputs)),
        "average": Expected((columns if averaged else 0, outputs)),
        "columns": Expected((columns, COLUMN_FIELDS)),
        "sums": Expected((OUTPUT_FIELDS, outputs)),
        "penalty": Expected((2, outputs)),
        "residual": Expected((1,)),
        "progress": Expected((4,), np.int64),
    }


def check_array(name: str, array: Any, expected: Expected, writable: bool = False) -> None:
    """Raise ValueError unless an array has this shape and type, is contiguous, aligned and in native byte order."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is a {type(array).__name__}, not an array")
    if array.dtype != np.dtype(expected.dtype) or array.shape != expected.shape:
        raise ValueError(f"{name} is {array.dtype} of shape {array.shape}; {expected} is needed")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"{name} is not contiguous and aligned in memory")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} is read-only")


def check_model(model: Model, averaged: bool) -> None:
    """Raise ValueError if the shapes of the arrays of a model are inconsistent."""
    if np.ndim(model.table) != 3 or model.table.shape[0] > MAX_COLUMNS or model.table.shape[2] < 1:
        raise ValueError(f"table has shape {np.shape(model.table)}; columns × {FIELDS} × outputs are needed")
    columns, _, outputs = model.table.shape
    if np.ndim(model.columns) != 2 or len(model.columns) != columns:
        raise ValueError(f"table is for {columns} columns, and columns has shape {np.shape(model.columns)}")
    for name, expected in description_of(columns, outputs, averaged).items():
        check_array(name, getattr(model, name), expected, writable=True)


def check_range(name: str, numbers: Any, end: int) -> None:
    """Raise ValueError if an index is outside of 0 … end − 1."""
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= end):
        raise ValueError(f"{name} has {numbers.min()} to {numbers.max()}; 0 to {end - 1} are possible")


def check_rows(rows: Rows, columns: int) -> None:
    """Raise ValueError if rows extend beyond their arrays, or have an index of `columns` or more."""
    for name, kinds in (("data", (np.float32, np.float64)), ("indices", (np.int32, np.int64))):
        array = getattr(rows, name)
        kind = next((kind for kind in kinds if np.asarray(array).dtype == np.dtype(kind)), kinds[-1])
        check_array(name, array, Expected((np.size(array),), kind))
    samples = (np.size(rows.length),)
    for name in ("data_start", "index_start", "length"):
        check_array(name, getattr(rows, name), Expected(samples, np.int64))
    check_range("length", rows.length, max(len(rows.data), len(rows.indices)) + 1)
    for start, array in ((rows.data_start, rows.data), (rows.index_start, rows.indices)):
        check_range("start of rows", start, len(array) + 1)
        check_range("end of rows", start + rows.length, len(array) + 1)
    check_range("column indices", rows.indices, columns)


def check_size(name: str, numbers: Any) -> None:
    """Raise ValueError if a number is not finite or above `LARGEST_VALUE`."""
    if len(numbers) and not max(float(numbers.max()), -float(numbers.min())) <= LARGEST_VALUE:
        raise ValueError(f"{name} has values that are not finite or too large: {LARGEST_VALUE:g} is the maximum")


def check_all(model: Model, rows: Rows, order: Any, targets: Any, weights: Any, training: Training) -> None:
    """Raise ValueError if any argument of a compiled pass is invalid."""
    task = training.task
    check_model(model, task.average)
    columns, _, outputs = model.table.shape
    check_rows(rows, columns - task.intercept)
    samples = len(rows.length)
    check_array("order", order, Expected((np.size(order),), np.int64))
    check_range("order", order, samples)
    for name, array in (("targets", targets), ("weights", weights)):
        check_array(name, array, Expected((samples,)))
    for name, numbers in (("X", rows.data), ("y", targets), ("weights", weights)):
        check_size(name, numbers)
    if task.softmax:
        check_range("classes", targets, outputs)
    if training.batch_size < 1 or training.threads < 1:
        raise ValueError(f"{training.batch_size} rows a minibatch on {training.threads} threads; at least 1 is needed")
