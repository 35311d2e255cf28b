"""Rows of CSV and Parquet files as sequences of text, in bounded memory."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vsgd.errors import UserError
from vsgd.files.cells import BadRow, shown
from vsgd.files.sources import MAX_LINE, Lines, suffix

DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}
"""What can separate the cells of a CSV file without `--delimiter`; a comma is preferred."""

MAX_NAME = 1000
"""Maximum length of the name of a column, in characters."""

Rows = Iterator[tuple[int, Sequence[str] | BadRow]]


class Table(NamedTuple):
    """The header of a file and its rows.

    Attributes:
        names: of the columns.
        rows: the rows, each with its number.
        unit: what is counted by these numbers, "line" or "row".
        nested: names of columns that hold lists or structures; their cells are empty.
        delimiter: what separates cells; empty if the file is not CSV.
    """

    names: list[str]
    rows: Rows
    unit: str
    nested: frozenset[str] = frozenset()
    delimiter: str = ""

    @property
    def hint(self) -> str:
        """How cells were separated, for messages about columns that are missing."""
        return f" (cells are separated by {delimiter_name(self.delimiter)}; see --delimiter)" if self.delimiter else ""


def delimiter_name(delimiter: str) -> str:
    return DELIMITERS.get(delimiter, repr(delimiter))


def open_table(path: Path, delimiter: str | None = None) -> Table:
    """Open a table by the name of its file; a name without a known ending is CSV."""
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
    return len(next(csv.reader([line], delimiter=delimiter), []))


def detect_delimiter(lines: Sequence[str]) -> str:
    """Return what separates the cells, given the header and, if it is not blank, the line after it.

    That line must have as many cells as the header. If several characters qualify, a comma is preferred, and then the
    one that makes most cells. If none does, it is a comma.
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
    """Rows of as many cells as there are names. A row is numbered by its first line."""
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
