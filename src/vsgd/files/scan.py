"""A first pass over files: it finds the kinds of columns, the classes, and bad rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vsgd.errors import UserError
from vsgd.files.cells import BadRow
from vsgd.files.reading import Source, each, target_place
from vsgd.files.schema import Encoder, Schema, described, infer, listed, schema_of
from vsgd.files.settings import Kinds
from vsgd.files.sources import blocks, is_svmlight
from vsgd.files.svmlight import lines_of
from vsgd.files.tables import Table, delimiter_name
from vsgd.files.targets import MAX_CLASSES, ReadTarget, classes_of, number_reader, present
from vsgd.linear import CLASSIFICATION

ROWS_TO_GUESS = 1000
BYTES_TO_GUESS = 1 << 26
"""Kinds of columns are detected from the first rows, at most `ROWS_TO_GUESS` rows and about this many bytes."""

CELL_BYTES = 57
"""Memory of an empty cell in bytes: a string, and a pointer in a list."""


class Scan(NamedTuple):
    """The result of a first pass.

    Attributes:
        schema: columns and means.
        classes: labels in order; empty for a regression.
        rows: number of good rows.
    """

    schema: Schema
    classes: list[str]
    rows: int


def guess_schema(source: Source, target: str | None, given: Kinds, hash_bits: int) -> tuple[Schema, str]:
    """Return the schema of a file, and one line that describes it. Kinds that are not given are detected."""
    if is_svmlight(source.path):
        if source.delimiter is not None:
            raise UserError("--delimiter is for CSV; svmlight has blanks between its elements")
        if given:
            raise UserError("--columns, --text and --category are for tables; every column of svmlight is a number")
        return Schema("svmlight", "", [], [], [], [], [], hash_bits, 0), "svmlight"
    if target is None:
        raise UserError("--target must name the column to predict")
    table = source.table()
    first = rows_to_guess(table)
    if not first:
        check_rows(source)
        raise UserError(f"{source.path} has no rows that can be used for training")
    kinds = infer(table, first, target, given)
    line = described(kinds, target)
    if source.delimiter is None and table.delimiter not in ("", ","):
        line += f"; cells separated by {delimiter_name(table.delimiter)} (detected; --delimiter sets another)"
    return schema_of(kinds, target, hash_bits), line


def check_rows(source: Source) -> None:
    """Raise UserError for the first bad row, unless bad rows are to be skipped."""
    table = source.table()
    for _ in each(source, table.unit, table.rows, len):
        pass


def rows_to_guess(table: Table) -> list[Sequence[str]]:
    """Return the first good rows, in bounded memory."""
    found: list[Sequence[str]] = []
    size = 0
    for _, row in table.rows:
        if not isinstance(row, BadRow):
            found.append(row)
            size += CELL_BYTES * len(row) + sum(map(len, row))
            if len(found) == ROWS_TO_GUESS or size > BYTES_TO_GUESS:
                break
    return found


class Labels:
    """Collects the distinct labels of a classification."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, text: str) -> float:
        self.seen.add(present(text))
        if len(self.seen) > MAX_CLASSES:
            raise UserError(f"more than {MAX_CLASSES} classes; for numbers choose --loss squared_error")
        return 0.0


def scan(sources: Sequence[Source], schema: Schema, loss: str) -> Scan:
    """Read all rows: count them, and collect classes, means of numbers, and the number of svmlight columns.

    Raises:
        UserError: if a row is bad, if there are no rows, or if there is only one class.
    """
    labels = Labels()
    read_target = labels if loss in CLASSIFICATION else number_reader(loss)
    check_alike(sources)
    if schema.format == "svmlight":
        found = _scan_svmlight(sources, schema, read_target)
    else:
        found = _scan_tables(sources, schema, read_target)
    classes = classes_of(labels.seen)
    what = (
        f"{sources[0].path} has" if len(sources) == 1 else f"{sources[0].path} and {len(sources) - 1} more files have"
    )
    if found.rows == 0:
        raise UserError(f"{what} no rows that can be used for training")
    if loss in CLASSIFICATION and len(classes) < 2:
        raise UserError(f"{what} 1 class in the targets; a classifier needs at least two")
    return found._replace(classes=classes)


def check_alike(sources: Sequence[Source]) -> None:
    """Raise UserError if the files differ in format or columns."""
    first = sources[0].path
    names = None if is_svmlight(first) or len(sources) == 1 else set(sources[0].table().names)
    for source in sources[1:]:
        path = source.path
        if is_svmlight(path) != is_svmlight(first):
            raise UserError(f"{path} and {first} cannot be combined: one is svmlight, the other is a table")
        if names is not None and (others := names ^ set(source.table().names)):
            raise UserError(f"{path} and {first} differ in their columns: {listed(sorted(map(repr, others)))}")


def _scan_svmlight(sources: Sequence[Source], schema: Schema, read_target: ReadTarget) -> Scan:
    def columns_of(line: Any) -> int:
        read_target(line.target)
        return int(line.columns.max(initial=-1)) + 1

    rows, columns = 0, 0
    for source in sources:
        for width in each(source, "line", lines_of(blocks(source.path)), columns_of):
            if width is not None:
                rows, columns = rows + 1, max(columns, width)
    return Scan(schema._replace(columns=columns), [], rows)


def _scan_tables(sources: Sequence[Source], schema: Schema, read_target: ReadTarget) -> Scan:
    rows, counts, sums = 0, np.zeros(len(schema.means)), np.zeros(len(schema.means))
    for source in sources:
        for values in _numbers_of(source, schema, read_target):
            if values is not None:
                there = ~np.isnan(values)
                rows, counts = rows + 1, counts + there
                sums += np.where(there, values, 0.0)
    return Scan(schema._replace(means=(sums / np.maximum(counts, 1)).tolist()), [], rows)


def _numbers_of(source: Source, schema: Schema, read_target: ReadTarget) -> Iterator[Any]:
    """Return an iterator over the numbers of each row of a table, with None for a skipped row."""
    table = source.table()
    encoder = Encoder(schema, table, source.path)
    place = target_place(source.path, table, schema.target)

    def numbers_of(row: Any) -> Any:
        read_target(row[place])
        return encoder.numbers_of(row)

    return each(source, table.unit, table.rows, numbers_of)
