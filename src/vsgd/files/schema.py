"""The columns of a table, their kinds, and the encoding of rows as numbers. Model files contain the schema."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vsgd.errors import UserError
from vsgd.files.cells import day, has_many_words, hashed_name, hashed_words, is_date, is_missing, is_number, numbers
from vsgd.files.settings import KINDS, Kinds
from vsgd.files.tables import Table

MANY_WORDS = 3
"""A column is text if most of its cells have more words than this."""

NAMES_SHOWN = 8
"""Maximum number of names in a message."""


class Schema(NamedTuple):
    """The columns of a table. Numbers and dates have one column each. Categories and words are hashed.

    Attributes:
        format: "table" or "svmlight".
        target: name of the column to predict.
        numbers, dates, categories, texts: names of the columns of each kind.
        means: means of numbers and dates over the rows of the first fit. They replace missing values.
        hash_bits: logarithm to base 2 of the number of hashed columns.
        columns: number of columns of the encoded matrix.
    """

    format: str
    target: str
    numbers: list[str]
    dates: list[str]
    categories: list[str]
    texts: list[str]
    means: list[float]
    hash_bits: int
    columns: int

    @property
    def hashed_columns(self) -> int:
        """Return the number of hashed columns."""
        return 2**self.hash_bits if self.categories or self.texts else 0

    def kind_of(self, name: str) -> str:
        """Return the kind of a column."""
        kinds = {"number": self.numbers, "date": self.dates, "category": self.categories, "text": self.texts}
        for kind, names in kinds.items():
            if name in names:
                return kind
        return "ignore"


def guess(cells: Sequence[str]) -> str:
    """Return the kind of a column by the majority of its cells, so that a single bad cell cannot change it."""
    present = [cell for cell in cells if not is_missing(cell)]
    if 2 * sum(map(is_number, present)) > len(present) or not present:
        return "number"
    if 2 * sum(map(is_date, present)) > len(present):
        return "date"
    wordy = sum(has_many_words(cell, MANY_WORDS) for cell in present)
    return "text" if 2 * wordy > len(present) else "category"


def infer(table: Table, rows: list[Sequence[str]], target: str, given: Kinds) -> Kinds:
    """Return the kind of every column except the target: as given, or detected from some rows.

    Raises:
        UserError: if the table does not have a given column or the target.
    """
    known = set(table.names)
    for name in [target, *given]:
        if name not in known:
            raise UserError(f"there is no column {name!r}; there are {listed(table.names)}{table.hint}")
        if name in table.nested and given.get(name) != "ignore":
            raise UserError(f"column {name!r} holds lists or structures, which are not supported. Flatten it.")
    if target in given:
        raise UserError(f"{target!r} is the target, so it has no other kind")
    fixed = {**dict.fromkeys(table.nested, "ignore"), **given}
    return {
        name: fixed.get(name) or guess([row[i] for row in rows]) for i, name in enumerate(table.names) if name != target
    }


def schema_of(kinds: Kinds, target: str, hash_bits: int) -> Schema:
    """Return the schema of a table, with means of zero."""
    columns = {kind: [name for name, its in kinds.items() if its == kind] for kind in KINDS}
    numbers, dates = columns["number"], columns["date"]
    means = [0.0] * (len(numbers) + len(dates))
    schema = Schema("table", target, numbers, dates, columns["category"], columns["text"], means, hash_bits, 0)
    return schema._replace(columns=len(means) + schema.hashed_columns)


def listed(names: Sequence[str]) -> str:
    """Return the first names for a message, separated by commas."""
    return ", ".join([*names[:NAMES_SHOWN], *(["…"] if len(names) > NAMES_SHOWN else [])])


def described(kinds: Kinds, target: str) -> str:
    """Return one line that lists the columns of each kind."""
    parts = []
    for kind, several in KINDS.items():
        if names := [name for name, its in kinds.items() if its == kind]:
            one = "ignored" if kind == "ignore" else kind
            parts.append(f"{len(names)} {one if len(names) == 1 else several} ({listed(names)})")
    return f"{', '.join(parts) or 'no columns'}; target {target}"


def picker(names: Sequence[str], wanted: Iterable[str]) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """Return a function that selects the wanted cells of a row whose cells have these names."""
    place = {name: i for i, name in enumerate(names)}
    places = [place[name] for name in wanted]
    if len(places) == 1:
        only = places[0]
        return lambda row: (row[only],)
    return itemgetter(*places) if places else lambda row: ()


class Encoder:
    """Encodes the rows of one file by a schema."""

    def __init__(self, schema: Schema, table: Table, path: Path):
        wanted = [*schema.numbers, *schema.dates, *schema.categories, *schema.texts]
        names, known = table.names, set(table.names) - table.nested
        if absent := [name for name in wanted if name not in known]:
            columns = listed([*map(repr, absent)])
            raise UserError(f"{path} lacks the column {columns} that the model was trained with{table.hint}")
        self.schema = schema
        self.dates = picker(names, schema.dates)
        self.numbers = picker(names, schema.numbers)
        self.categories = picker(names, schema.categories)
        self.texts = picker(names, schema.texts)
        self.means = np.array(schema.means)

    def numbers_of(self, row: Sequence[str]) -> Any:
        """Return the numbers and the dates of a row; missing ones are NaN."""
        values = numbers(self.numbers(row), self.schema.numbers)
        if not self.schema.dates:
            return values
        days = [day(cell, name) for cell, name in zip(self.dates(row), self.schema.dates, strict=True)]
        return np.concatenate([values, days])

    def elements(self, row: Sequence[str]) -> tuple[Any, Any]:
        """Return columns and values of the non-zero elements of a row."""
        values = self.numbers_of(row)
        values = np.where(np.isnan(values), self.means, values)
        columns = np.flatnonzero(values)
        buckets = self.schema.hashed_columns
        if not buckets:
            return columns, values[columns]
        categories = zip(self.schema.categories, self.categories(row), strict=True)
        texts = zip(self.schema.texts, self.texts(row), strict=True)
        hashed = itertools.chain(
            (hashed_name(name, cell, buckets) for name, cell in categories),
            itertools.chain.from_iterable(hashed_words(name, cell, buckets) for name, cell in texts),
        )
        places = len(values) + np.fromiter(hashed, np.int64)
        return np.concatenate([columns, places]), np.concatenate([values[columns], np.ones(len(places))])
