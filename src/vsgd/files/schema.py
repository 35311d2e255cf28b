"""Which columns a table has, of which kinds, and how its rows become numbers; it is stored beside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vsgd.errors import UserError
from vsgd.files.cells import WORD, hashed, is_missing, is_number, name_token, numbers, word_tokens
from vsgd.files.settings import KINDS, Kinds

MANY_WORDS = 3
NAMES_SHOWN = 8


class Schema(NamedTuple):
    """Numbers have a column each; categories and the words of a text are hashed into 2^hash_bits more.

    Attributes:
        format: "table", or "svmlight", whose rows are numbers already.
        target: name of the column to predict.
        numbers, categories, texts: names of the columns of each kind.
        means: of the numbers, over the rows that the model was begun with; they stand for missing ones.
        hash_bits: logarithm of the number of hashed columns.
        columns: of the matrix that comes out.
    """

    format: str
    target: str
    numbers: list[str]
    categories: list[str]
    texts: list[str]
    means: list[float]
    hash_bits: int
    columns: int

    @property
    def hashed_columns(self) -> int:
        return 2**self.hash_bits if self.categories or self.texts else 0

    def kind_of(self, name: str) -> str:
        for kind, names in (("number", self.numbers), ("category", self.categories), ("text", self.texts)):
            if name in names:
                return kind
        return "ignore"


def guess(cells: Sequence[str]) -> str:
    """The kind of a column, by what most of its cells are, so that a single one cannot change it."""
    present = [cell for cell in cells if not is_missing(cell)]
    if 2 * sum(map(is_number, present)) > len(present) or not present:
        return "number"
    wordy = sum(len(WORD.findall(cell)) > MANY_WORDS for cell in present)
    return "text" if 2 * wordy > len(present) else "category"


def infer(names: Sequence[str], rows: list[Sequence[str]], target: str, said: Kinds) -> Kinds:
    """The kind of every column but the target: as said, or guessed from some rows."""
    known = set(names)
    for name in [target, *said]:
        if name not in known:
            raise UserError(f"there is no column {name!r}; there are {listed(names)}")
    if target in said:
        raise UserError(f"{target!r} is the target, so it has no other kind")
    return {name: said.get(name) or guess([row[i] for row in rows]) for i, name in enumerate(names) if name != target}


def schema_of(kinds: Kinds, target: str, hash_bits: int) -> Schema:
    """The schema of a table; its means are not known yet."""
    columns = {kind: [name for name, its in kinds.items() if its == kind] for kind in KINDS}
    numbers, categories, texts = columns["number"], columns["category"], columns["text"]
    schema = Schema("table", target, numbers, categories, texts, [0.0] * len(numbers), hash_bits, 0)
    return schema._replace(columns=len(numbers) + schema.hashed_columns)


def listed(names: Sequence[str]) -> str:
    """Names for people, not all of them if they are many."""
    return ", ".join([*names[:NAMES_SHOWN], *(["…"] if len(names) > NAMES_SHOWN else [])])


def described(kinds: Kinds, target: str) -> str:
    """One line that says which columns are taken for what."""
    parts = []
    for kind, several in KINDS.items():
        if names := [name for name, its in kinds.items() if its == kind]:
            one = "ignored" if kind == "ignore" else kind
            parts.append(f"{len(names)} {one if len(names) == 1 else several} ({listed(names)})")
    return f"{', '.join(parts) or 'no columns'}; target {target}"


def picker(names: Sequence[str], wanted: Iterable[str]) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """Takes the wanted cells out of a row whose cells have these names."""
    place = {name: i for i, name in enumerate(names)}
    places = [place[name] for name in wanted]
    if len(places) == 1:
        only = places[0]
        return lambda row: (row[only],)
    return itemgetter(*places) if places else lambda row: ()


class Encoder:
    """Rows of one file, whose columns have these names, as a schema wants them."""

    def __init__(self, schema: Schema, names: Sequence[str], path: Path):
        wanted = [*schema.numbers, *schema.categories, *schema.texts]
        known = set(names)
        if absent := [name for name in wanted if name not in known]:
            raise UserError(f"{path} lacks the column {listed([*map(repr, absent)])} that the model was trained with")
        self.schema = schema
        self.numbers = picker(names, schema.numbers)
        self.categories = picker(names, schema.categories)
        self.texts = picker(names, schema.texts)
        self.means = np.array(schema.means)

    def numbers_of(self, row: Sequence[str]) -> Any:
        """The numbers of a row; missing ones are NaN."""
        return numbers(self.numbers(row), self.schema.numbers)

    def elements(self, row: Sequence[str]) -> tuple[Any, Any]:
        """Columns and values of the elements of a row that are not zero."""
        values = self.numbers_of(row)
        values = np.where(np.isnan(values), self.means, values)
        tokens = [name_token(*pair) for pair in zip(self.schema.categories, self.categories(row), strict=True)]
        for name, cell in zip(self.schema.texts, self.texts(row), strict=True):
            tokens += word_tokens(name, cell)
        columns = np.flatnonzero(values)
        if not tokens:
            return columns, values[columns]
        first, buckets = len(values), self.schema.hashed_columns
        places = np.array([first + hashed(token, buckets) for token in tokens])
        return np.concatenate([columns, places]), np.concatenate([values[columns], np.ones(len(places))])
