"""What the cells of a file mean: numbers, missing values, names and words."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vsgd.linear.gate import LARGEST_VALUE

WORD = re.compile(r"\w+")

# fmt: off
MISSING = frozenset([
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
])
# fmt: on
"""What stands for a missing value, as in `pandas.read_csv`."""

LONGEST_SHOWN = 40


class BadRow(Exception):
    """A row that cannot be read; the reader knows its line."""


class Example(NamedTuple):
    """The elements of a row, and its target as the kernel wants it; NaN if there is none."""

    columns: Any
    values: Any
    target: float


def shown(text: str) -> str:
    """A cell as it stands in a message."""
    return repr(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…")


def is_missing(text: str) -> bool:
    return text.strip() in MISSING


def finite(text: str, value: float, place: str) -> float:
    """The value, if the kernel can learn from it."""
    if not math.isfinite(value):
        raise BadRow(f"{shown(text)}{place} is not finite")
    if abs(value) > LARGEST_VALUE:
        raise BadRow(f"{shown(text)}{place} is too large: {LARGEST_VALUE:g} is the most")
    return value


def plain_float(text: str) -> float:
    """Python's `float`, but for the underscores that it allows."""
    if "_" in text:
        raise ValueError(f"{shown(text)} is not a number")
    return float(text)


def number(text: str, name: str) -> float:
    """The number in a cell of this column; NaN if it is missing."""
    if is_missing(text):
        return math.nan
    try:
        value = plain_float(text)
    except ValueError:
        raise BadRow(
            f"{shown(text)} in column {name!r} is not a number (--columns {name}=category takes it as a name)"
        ) from None
    return value if math.isnan(value) else finite(text, value, f" in column {name!r}")


def is_number(text: str) -> bool:
    try:
        plain_float(text)
    except ValueError:
        return False
    return True


def numbers(cells: Sequence[str], names: Sequence[str]) -> Any:
    """The numbers in the cells of a row; missing ones are NaN."""
    try:
        values = np.fromiter(map(float, cells), float, len(cells))
    except ValueError:
        pass
    else:
        if np.abs(values).max(initial=0) <= LARGEST_VALUE and "_" not in "".join(cells):
            return values
    return np.array([number(cell, name) for cell, name in zip(cells, names, strict=True)])


def hashed(token: str, buckets: int) -> int:
    return zlib.crc32(token.encode()) % buckets


def name_token(name: str, cell: str) -> str:
    """A missing name is a name of its own."""
    return f"{name}=" if is_missing(cell) else f"{name}={cell}"


def word_tokens(name: str, cell: str) -> list[str]:
    return [] if is_missing(cell) else [f"{name}:{word}" for word in WORD.findall(cell.lower())]
