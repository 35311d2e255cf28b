"""How the cells of a row become numbers, in a form that can be stored beside the model."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from vsgd.errors import UserError

WORD = re.compile(r"\w+")
MANY_WORDS = 3


class BadRow(Exception):
    """A row that cannot be read; the reader knows its line."""


class Example(NamedTuple):
    """The elements of a row, and its target as it is written."""

    columns: Any
    values: Any
    target: str


class Schema(NamedTuple):
    """Numbers have a column each; categories and the words of a text are hashed into 2^hash_bits more.

    Attributes:
        format: "table", or "svmlight", whose rows are numbers already.
        target: name of the column to predict.
        numbers, categories, texts: names of the columns of each kind.
        hash_bits: logarithm of the number of hashed columns.
        columns: of the matrix that comes out.
    """

    format: str
    target: str
    numbers: list[str]
    categories: list[str]
    texts: list[str]
    hash_bits: int
    columns: int


def number(text: str, name: str) -> float:
    try:
        value = float(text) if text else 0.0
    except ValueError:
        raise BadRow(f"{text!r} in column {name!r} is not a number") from None
    if not math.isfinite(value):
        raise BadRow(f"{text!r} in column {name!r} is not finite")
    return value


def is_number(text: str) -> bool:
    try:
        number(text, "")
    except BadRow:
        return False
    return True


def infer(rows: list[dict[str, str]], target: str, texts: list[str], categories: list[str], hash_bits: int) -> Schema:
    """Guess the kind of each column from the first rows, where nobody said it."""
    names = list(rows[0])
    for name in [target, *texts, *categories]:
        if name not in names:
            raise UserError(f"there is no column {name!r}; there are {', '.join(names)}")
    texts, categories, numbers = list(texts), list(categories), []
    for name in names:
        if name in (target, *texts, *categories):
            continue
        cells = [row[name] for row in rows]
        if all(is_number(cell) for cell in cells):
            numbers.append(name)
        elif sum(len(WORD.findall(cell)) for cell in cells) > MANY_WORDS * len(cells):
            texts.append(name)
        else:
            categories.append(name)
    hashed = 2**hash_bits if texts or categories else 0
    return Schema("table", target, numbers, categories, texts, hash_bits, len(numbers) + hashed)


def missing(schema: Schema, names: Iterable[str], need_target: bool) -> list[str]:
    """Columns that the schema wants and the file does not have."""
    wanted = [*schema.numbers, *schema.categories, *schema.texts, *([schema.target] if need_target else [])]
    return [name for name in wanted if name not in set(names)]


def encode(row: dict[str, str], schema: Schema) -> tuple[list[int], list[float]]:
    """The non-zero elements of a row: columns and values. An empty cell is none."""
    first, buckets = len(schema.numbers), 2**schema.hash_bits
    columns, values = [], []
    for i, name in enumerate(schema.numbers):
        value = number(row[name], name)
        if value:
            columns.append(i)
            values.append(value)
    tokens = [f"{name}={row[name]}" for name in schema.categories if row[name]]
    for name in schema.texts:
        tokens += [f"{name}:{word}" for word in WORD.findall(row[name].lower())]
    columns += [first + zlib.crc32(token.encode()) % buckets for token in tokens]
    values += [1.0] * len(tokens)
    return columns, values


def from_json(fields: dict[str, Any]) -> Schema:
    return Schema(**fields)
