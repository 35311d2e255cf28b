"""Rows of CSV and Parquet files as lists of text."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vsgd.errors import UserError
from vsgd.files.cells import BadRow
from vsgd.files.sources import lines, suffix

LONGEST_CELL = 2**31 - 1
CELLS_AT_ONCE = 1 << 20

Rows = Iterator[tuple[int, Sequence[str] | BadRow]]


class Table(NamedTuple):
    """A header and its rows, each with its number; `unit` says what is counted."""

    names: list[str]
    rows: Rows
    unit: str


def open_table(path: Path) -> Table:
    """A table by the name of its file; what has no name known here is CSV."""
    table = parquet_table(path) if suffix(path) == ".parquet" else csv_table(path)
    seen: set[str] = set()
    for name in table.names:
        if name in seen:
            raise UserError(f"{path} has two columns named {name!r}. Rename one of them.")
        seen.add(name)
    return table


def csv_table(path: Path) -> Table:
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(lines(path), strict=True)
    try:
        names = next(reader, None)
    except csv.Error as error:
        raise UserError(f"{path}, line 1: {error}") from None
    if not names:
        raise UserError(f"{path} has no header" if names is not None else f"{path} is empty")
    return Table(names, csv_rows(reader, len(names)), "line")


def csv_rows(reader: Any, width: int) -> Rows:
    """Rows of as many cells as there are names. A row is numbered by its first line."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, BadRow(f"not CSV: {error}")
            continue
        if len(cells) == width:
            yield line, cells
        elif cells:
            yield line, BadRow(f"{len(cells)} cells instead of {width}")


@contextlib.contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """One line for whatever damage makes pyarrow raise, which is more than its own exceptions."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from None
    except Exception as error:
        raise UserError(f"{path} is damaged, or not Parquet that can be read: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def parquet_table(path: Path) -> Table:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UserError("Parquet files need pyarrow: pip install pyarrow") from None
    if path.suffix == ".gz":
        raise UserError(f"{path} cannot be read as it is: Parquet is compressed within. gunzip it first.")
    with parquet_errors(path):
        file = pyarrow.parquet.ParquetFile(path)
        return Table(list(file.schema_arrow.names), parquet_rows(path, file), "row")


def parquet_rows(path: Path, file: Any) -> Rows:
    number = 0
    with file, parquet_errors(path):
        columns = len(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=max(1, CELLS_AT_ONCE // max(columns, 1))):
            for row in zip(*map(as_text, batch.columns), strict=True):
                number += 1
                yield number, row


def as_text(column: Any) -> list[str]:
    """The cells of a column of any type; a null is an empty one."""
    import pyarrow

    try:
        cells = column.cast(pyarrow.string()).to_pylist()
    except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
        cells = [None if cell is None else str(cell) for cell in column.to_pylist()]
    return ["" if cell is None else cell for cell in cells]
