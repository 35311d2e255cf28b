"""Read files in chunks of rows: svmlight, CSV and Parquet, gzipped or not. One chunk at a time is in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy import sparse

from vsgd.errors import UserError
from vsgd.files.cells import BadRow, Example
from vsgd.files.schema import Encoder, Schema
from vsgd.files.sources import SVMLIGHT, blocks, is_pipe, is_svmlight
from vsgd.files.svmlight import lines_of
from vsgd.files.tables import Table, open_table
from vsgd.files.targets import ReadTarget

Made = TypeVar("Made")

MAX_ELEMENTS = 1 << 22
"""Maximum number of elements of a chunk, since rows may be long. Each row adds `ROW_ELEMENTS`."""

ROW_ELEMENTS = 32
"""Memory of a row beyond its elements, in units of elements."""


class Chunk(NamedTuple):
    """The good rows of a chunk, their targets, and whether each row of the file was good."""

    X: Any
    y: Any
    good: Any


class Source(NamedTuple):
    """A file, whether to skip bad rows, and the delimiter of CSV; None to detect it."""

    path: Path
    skip_bad_lines: bool
    delimiter: str | None = None

    def table(self) -> Table:
        return open_table(self.path, self.delimiter)


def each(
    source: Source, unit: str, rows: Iterable[tuple[int, Any]], make: Callable[[Any], Made]
) -> Iterator[Made | None]:
    """Yield `make(row)` for each row, and None for a skipped one.

    Raises:
        UserError: for a bad row, with its number, unless bad rows are skipped.
    """
    for number, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            yield make(row)
        except BadRow as bad:
            if not source.skip_bad_lines:
                raise UserError(f"{source.path}, {unit} {number}: {bad} (--skip-bad-lines skips it)") from None
            yield None


def check_format(path: Path, schema: Schema) -> None:
    """Raise UserError if the name of a file shows another format than that of the model. Pipes are not checked."""
    if not is_pipe(path) and is_svmlight(path) != (schema.format == "svmlight"):
        wanted = f"svmlight files ({', '.join(SVMLIGHT)})" if schema.format == "svmlight" else "tables, not on svmlight"
        raise UserError(f"{path} cannot be used: the model was trained on {wanted}")


def target_place(path: Path, table: Table, target: str) -> int:
    if target not in table.names or target in table.nested:
        raise UserError(f"{path} lacks the target column {target!r}{table.hint}")
    return table.names.index(target)


def no_target(text: str) -> float:
    return math.nan


def examples(source: Source, schema: Schema, read_target: ReadTarget | None) -> Iterator[Example | None]:
    """Return an iterator over examples, with None for a skipped row. Targets are read if `read_target` is given."""
    read = read_target or no_target
    if schema.format == "svmlight":
        lines = lines_of(blocks(source.path))
        return each(source, "line", lines, lambda line: Example(line.columns, line.values, read(line.target)))
    table = source.table()
    encoder = Encoder(schema, table, source.path)
    place = target_place(source.path, table, schema.target) if read_target else 0
    return each(source, table.unit, table.rows, lambda row: Example(*encoder.elements(row), read(row[place])))


def chunks(source: Source, schema: Schema, rows: int, read_target: ReadTarget | None) -> Iterator[Chunk]:
    """Yield the file as matrices of at most `rows` rows, fewer if they are long.

    Columns that the model does not have are left out.
    """
    batch: list[Example | None] = []
    elements = 0
    for example in examples(source, schema, read_target):
        batch.append(example)
        elements += ROW_ELEMENTS + (0 if example is None else len(example.columns))
        if len(batch) == rows or elements >= MAX_ELEMENTS:
            yield assemble(batch, schema.columns)
            batch, elements = [], 0
    if batch:
        yield assemble(batch, schema.columns)


def assemble(batch: list[Example | None], columns: int) -> Chunk:
    good = [example for example in batch if example is not None]
    indices = np.concatenate([np.empty(0, np.int64), *(example.columns for example in good)])
    data = np.concatenate([np.empty(0), *(example.values for example in good)])
    ends = np.cumsum([0, *(len(example.columns) for example in good)])
    known = indices < columns
    indptr = np.concatenate([[0], np.cumsum(known)])[ends]
    X = sparse.csr_matrix((data[known], indices[known], indptr), shape=(len(good), columns))
    X.sum_duplicates()
    return Chunk(X, np.array([example.target for example in good]), [example is not None for example in batch])
