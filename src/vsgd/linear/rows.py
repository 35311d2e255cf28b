"""Rows of a sparse or dense matrix, in the layout of compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vsgd.jit import cached_jit
from vsgd.linear.validation import check_rows


class Rows(NamedTuple):
    """Rows of a sparse or dense matrix.

    Row i has the values data[data_start[i] + t] in the columns indices[index_start[i] + t], t < length[i]. All rows of
    a dense matrix use the same indices.
    """

    data: Any
    indices: Any
    data_start: Any
    index_start: Any
    length: Any


SMALLEST_VALUE = 1e-300
"""Smaller values are replaced by zero, since their inverse overflows."""


def _in_one_piece(array: Any, kinds: tuple[type, ...]) -> Any:
    """Return a contiguous, aligned array in the first of these types that can represent it. Copy only if necessary."""
    array = np.asarray(array)
    kind = next((kind for kind in kinds if np.can_cast(array.dtype, kind)), kinds[-1])
    return np.require(array, kind, ["C", "A"])


def _without_tiny(data: Any) -> Any:
    tiny = (np.abs(data) < SMALLEST_VALUE) & (data != 0)
    return np.where(tiny, 0, data) if tiny.any() else data


def _rows_of(data: Any, indices: Any, indptr: Any) -> Rows:
    start = indptr[:-1].astype(np.int64)
    return Rows(_without_tiny(data), indices, start, start, np.diff(indptr).astype(np.int64))


def as_rows(X: Any) -> Rows:
    """Convert a CSR matrix or a dense array, of any byte order and layout. Duplicate entries are summed.

    Raises:
        ValueError: if an index is outside of the matrix.
    """
    if hasattr(X, "indptr"):
        data = _in_one_piece(X.data, (np.float32, np.float64))
        indices, indptr = (_in_one_piece(array, (np.int32, np.int64)) for array in (X.indices, X.indptr))
        rows = _rows_of(data, indices, indptr)
        check_rows(rows, X.shape[1])  # before compiled code of SciPy reads it
        X = type(X)((data, indices, indptr), shape=X.shape)
        if X.has_canonical_format:
            return rows
        X = X.copy()
        X.sum_duplicates()
        return _rows_of(X.data, X.indices, X.indptr)
    samples, columns = X.shape
    return Rows(
        data=_without_tiny(_in_one_piece(X, (np.float32, np.float64)).reshape(-1)),
        indices=np.arange(columns, dtype=np.int32),
        data_start=np.arange(samples, dtype=np.int64) * columns,
        index_start=np.zeros(samples, np.int64),
        length=np.full(samples, columns, np.int64),
    )


def scramble(number: Any) -> Any:
    """Mix the bits of a 64-bit number (the finalizer of splitmix64)."""
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


def find_column_max(rows: Rows, sizes: Any) -> None:
    """Set `sizes` to the largest |x| of each column, or leave larger values."""
    for i in range(len(rows.length)):
        for t in range(rows.length[i]):
            column = rows.indices[rows.index_start[i] + t]
            sizes[column] = max(sizes[column], abs(rows.data[rows.data_start[i] + t]))


def fingerprints(rows: Rows, bits: Any, sizes: Any, exact: Any, rough: Any) -> None:
    """Add hashes of the non-zero elements of each row to `exact` and `rough`.

    The hashes do not depend on how elements are stored. `rough` hashes elements in units of 2⁻²⁴ of the largest one of
    their column, so that it does not depend on the scale of the column.
    """
    for i in range(len(rows.length)):
        for t in range(rows.length[i]):
            at = rows.data_start[i] + t
            column = rows.indices[rows.index_start[i] + t]
            if rows.data[at] != 0:
                steps = np.int64(np.floor(rows.data[at] / sizes[column] * 2.0**24 + 0.5))
                exact[i] += scramble(scramble(bits[at]) + np.uint64(column))
                rough[i] += scramble(scramble(np.uint64(steps)) - np.uint64(column))
        exact[i] = scramble(exact[i])
        rough[i] = scramble(rough[i])


class Distinct(NamedTuple):
    """The index of one sample of each set of equal samples, and the total weight of the set."""

    rows: Any
    weights: Any


def distinct(rows: Rows, targets: Any, weights: Any, columns: int) -> Distinct:
    """Merge samples with equal rows and targets, and add their weights. Samples of weight zero are dropped.

    A sample of weight 2 is therefore equivalent to two samples. The order of the result does not depend on the order
    of the samples or on the units of columns and target.
    """
    given = np.flatnonzero(weights > 0)
    if len(given) == 0:
        return Distinct(given, weights[given])
    rows = rows._replace(
        data_start=rows.data_start[given], index_start=rows.index_start[given], length=rows.length[given]
    )
    targets, weights = targets[given].astype(np.float64), weights[given]
    sizes = np.zeros(columns)
    cached_jit(find_column_max)(rows, sizes)
    exact = targets.view(np.uint64).copy()
    rough = np.round(targets / (np.abs(targets).max() or 1) * 2.0**24).astype(np.int64).view(np.uint64)
    cached_jit(fingerprints)(rows, rows.data.astype(np.float64).view(np.uint64), sizes, exact, rough)
    order = np.lexsort([exact, rough])
    exact, rough = exact[order], rough[order]
    new = np.concatenate([[True], (exact[1:] != exact[:-1]) | (rough[1:] != rough[:-1])])
    return Distinct(given[order[new]], np.add.reduceat(weights[order], np.flatnonzero(new)))
