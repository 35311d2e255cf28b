"""Read rows of CSV and Parquet files as sequences of text, in bounded memory."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vsgd.errors import UserError
from vsgd.files.cells import BadRow, shown
from vsgd.files.sources import MAX_LINE, Lines, suffix

DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}
"""Delimiters of CSV that are detected without `--delimiter`. A comma is preferred."""

MAX_NAME = 1000
"""Maximum length of the name of a column, in characters."""

Rows = Iterator[tuple[int, Sequence[str] | BadRow]]
"""The number of each row, and its cells or its error."""


class Table(NamedTuple):
    """The header of a file and its rows.

    Attributes:
        names: names of the columns.
        rows: the rows, each with its number.
        unit: the unit of these numbers, "line" or "row".
        nested: names of columns that hold lists or structures; their cells are empty.
        delimiter: delimiter of the cells; empty if the file is not CSV.
    """

    names: list[str]
    rows: Rows
    unit: str
    nested: frozenset[str] = frozenset()
    delimiter: str = ""

    @property
    def hint(self) -> str:
        """Return the delimiter in words, for messages about missing columns."""
        return f" (cells are separated by {delimiter_name(self.delimiter)}; see --delimiter)" if self.delimiter else ""


def delimiter_name(delimiter: str) -> str:
    """Return the name of a delimiter."""
    return DELIMITERS.get(delimiter, repr(delimiter))


def open_table(path: Path, delimiter: str | None = None) -> Table:
    """Open a table. The suffix .parquet means Parquet, every other one CSV.

    Raises:
        UserError: if column names repeat or are too long, or if the header cannot be read.
    """
    if suffix(path) == ".parquet":
        from vsgd.files.parquet import parquet_table

        table = parquet_table(path)
    else:
        table = csv_table(path, delimiter)
    seen: set[str] = set()
    for name in table.names:
        if name in seen:
            raise UserError(f"{path} has two columns named {shown(name)}. Rename one of them.")
        if len(name) > MAX_NAME:
            raise UserError(
                f"{path} has a column with a name of {len(name)} characters, {shown(name)}. "
                f"Shorten it to at most {MAX_NAME}, or check that the first line is a header."
            )
        seen.add(name)
    return table


def count_cells(line: str, delimiter: str) -> int:
    """Return the number of cells of a line."""
    return len(next(csv.reader([line], delimiter=delimiter), []))


def detect_delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter of the cells, given the header and the line after it.

    Both lines must have the same number of cells, unless the second is blank. If several delimiters qualify, a comma
    is preferred, then the one that gives the most cells. If none qualifies, it is a comma.
    """
    counts = {}
    for delimiter in DELIMITERS:
        cells = [count_cells(line, delimiter) for line in lines if line.strip()]
        if len(set(cells)) == 1 and cells[0] > 1:
            counts[delimiter] = cells[0]
    return "," if not counts or "," in counts else max(counts, key=counts.__getitem__)


def csv_table(path: Path, delimiter: str | None) -> Table:
    csv.field_size_limit(MAX_LINE)
    lines = Lines(path)
    try:
        if delimiter is None:
            delimiter = detect_delimiter(lines.peek(2))
        reader = csv.reader(lines, strict=True, delimiter=delimiter)
        names = next(reader, None)
    except (csv.Error, BadRow) as error:
        raise UserError(f"{path}, line 1: {error}") from None
    if not names:
        raise UserError(f"{path} has no header" if names is not None else f"{path} is empty")
    return Table(names, csv_rows(lines, reader, len(names)), "line", delimiter=delimiter)


def csv_rows(lines: Lines, reader: Any, width: int) -> Rows:
    """Yield rows that have `width` cells, and errors for others. The number of a row is that of its first line."""
    while True:
        line = lines.begin_record()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, BadRow(f"not CSV: {error}")
            continue
        except BadRow as bad:
            yield line, bad
            continue
        if len(cells) == width:
            yield line, cells
        elif cells:
            yield line, BadRow(f"{len(cells)} cells instead of {width}")
