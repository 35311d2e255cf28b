"""Convert the cells of a file: numbers, dates, missing values, categories and words."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any, NamedTuple

import numpy as np

from vsgd.linear.validation import LARGEST_VALUE

WORD = re.compile(r"\w+")
DATE = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[T ]([01][0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9])(?:\.([0-9]{1,9}))?)?"
    r"(Z|z|[+-][0-9]{2}(?::?[0-5][0-9])?)?)?"
)

# fmt: off
MISSING = frozenset([
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
])
# fmt: on
"""Texts that represent a missing value, as in `pandas.read_csv`."""

LONGEST_SHOWN = 40


class BadRow(Exception):
    """A row that cannot be read. The reader adds the number of its line to the message."""


class Example(NamedTuple):
    """The elements of a row, and its target as a number; NaN without a target."""

    columns: Any
    values: Any
    target: float


def shown(text: str) -> str:
    """Return a cell in quotes for a message, shortened if it is long."""
    return repr(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…")


def is_missing(text: str) -> bool:
    """Return whether a cell is a missing value."""
    return text.strip() in MISSING


def finite(text: str, value: float, place: str) -> float:
    """Return the value.

    Raises:
        BadRow: if it is not finite or too large.
    """
    if not math.isfinite(value):
        raise BadRow(f"{shown(text)}{place} is not finite")
    if abs(value) > LARGEST_VALUE:
        raise BadRow(f"{shown(text)}{place} is too large: {LARGEST_VALUE:g} is the maximum")
    return value


def plain_float(text: str) -> float:
    """Convert a text like Python's `float`, but raise ValueError for underscores."""
    if "_" in text:
        raise ValueError(f"{shown(text)} is not a number")
    return float(text)


def number(text: str, name: str) -> float:
    """Return the number in a cell of this column; NaN if it is missing.

    Raises:
        BadRow: if the cell is not a number.
    """
    if is_missing(text):
        return math.nan
    try:
        value = plain_float(text)
    except ValueError:
        raise BadRow(
            f"{shown(text)} in column {name!r} is not a number (--columns {name}=category reads it as a category)"
        ) from None
    return value if math.isnan(value) else finite(text, value, f" in column {name!r}")


def is_number(text: str) -> bool:
    """Return whether a cell is a number."""
    try:
        plain_float(text)
    except ValueError:
        return False
    return True


def is_date(text: str) -> bool:
    """Return whether a cell is an ISO 8601 date or time stamp."""
    return days_since_1970(text) is not None


def days_since_1970(text: str) -> float | None:
    """Return an ISO 8601 date or time stamp in days since 1970-01-01 UTC, or None.

    A time stamp without an offset is interpreted as UTC.
    """
    match = DATE.fullmatch(text.strip())
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, offset = match.groups()
    try:
        days = date(int(year), int(month), int(day)).toordinal() - date(1970, 1, 1).toordinal()
    except ValueError:
        return None
    if hour is None:
        return float(days)
    east = 0
    if offset and offset not in "Zz":
        east = int(offset[0] + "1") * (60 * int(offset[1:3]) + int(offset[3:].removeprefix(":") or 0))
    minutes = 60 * int(hour) + int(minute) - east
    return days + (60 * minutes + int(second or 0) + float(f"0.{fraction or 0}")) / 86_400


def day(text: str, name: str) -> float:
    """Return the date in a cell of this column as a number; NaN if it is missing.

    Raises:
        BadRow: if the cell is not a date.
    """
    if is_missing(text):
        return math.nan
    days = days_since_1970(text)
    if days is None:
        raise BadRow(
            f"{shown(text)} in column {name!r} is not a date such as 2024-05-31 or 2024-05-31T12:00:00Z "
            f"(--columns {name}=category reads it as a category)"
        )
    return days


def numbers(cells: Sequence[str], names: Sequence[str]) -> Any:
    """Return the numbers in the cells of a row; missing ones are NaN."""
    try:
        values = np.fromiter(map(float, cells), float, len(cells))
    except ValueError:
        pass
    else:
        if np.abs(values).max(initial=0) <= LARGEST_VALUE and "_" not in "".join(cells):
            return values
    return np.array([number(cell, name) for cell, name in zip(cells, names, strict=True)])


def hashed_name(name: str, cell: str, buckets: int) -> int:
    """Return the hashed column of a category. Missing cells are one category."""
    return zlib.crc32((f"{name}=" if is_missing(cell) else f"{name}={cell}").encode()) % buckets


def hashed_words(name: str, cell: str, buckets: int) -> Iterator[int]:
    """Yield the hashed column of each word of a text."""
    if not is_missing(cell):
        start = zlib.crc32(f"{name}:".encode())
        for word in WORD.finditer(cell.lower()):
            yield zlib.crc32(word[0].encode(), start) % buckets


def has_many_words(cell: str, most: int) -> bool:
    """Return whether a cell has more than `most` words."""
    return next(itertools.islice(WORD.finditer(cell), most, None), None) is not None
