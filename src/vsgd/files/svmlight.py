"""Read lines of an svmlight file: `target index:value index:value ... # comment`.

Compiled code reads plain lines, one block of the file at a time. `line_of` reads all other lines, such as lines with
comments or errors, in Python.
"""

from __future__ import annotations

import math
import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from vsgd.files.cells import BadRow, finite, plain_float, shown
from vsgd.files.sources import MAX_LINE, too_long
from vsgd.jit import cached_jit
from vsgd.linear.validation import LARGEST_VALUE

TAB, NEWLINE, RETURN, SPACE, COMMENT, PLUS, MINUS, POINT, ZERO, NINE, COLON, LARGE_E, SMALL_E, TILDE = (
    b"\t\n\r #+-.09:Ee~"
)
POWERS = tuple(10.0**n for n in range(23))
"""Powers of ten that are exact in float64."""
LARGEST = 2**53
"""Whole numbers up to this one are exact in float64."""
MAX_DIGITS = len(str(LARGEST))
CELL = re.compile(r"\S+")
DIGITS = re.compile("[0-9]+")
ELEMENT = re.compile("[0-9]+:")


class Line(NamedTuple):
    """The elements of a line, and its target as text; empty if the line begins with an element."""

    columns: Any
    values: Any
    target: str


def line_of(text: str) -> Line:
    """Return the content of a line.

    Raises:
        BadRow: if the line is not in svmlight format.
    """
    target = ""
    columns, values = array("q"), array("d")  # arrays need far less memory than lists
    for number, match in enumerate(CELL.finditer(text.partition("#")[0])):
        cell = match[0]
        if number == 0 and not ELEMENT.match(cell):
            target = cell
            continue
        index, colon, value = cell.partition(":")
        if index == "qid":
            continue
        if not colon or not DIGITS.fullmatch(index) or len(index.lstrip("0")) > MAX_DIGITS or int(index) > LARGEST:
            raise BadRow(f"{shown(cell)} is not index:value")
        columns.append(int(index))
        values.append(value_of(value, index))
    return Line(np.array(columns, np.int64), np.array(values, float), target)


def value_of(text: str, index: str) -> float:
    """Return the number after an index; 0 if there is none."""
    try:
        value = plain_float(text) if text else 0.0
    except ValueError:
        raise BadRow(f"{shown(text)} in column {index} is not a number") from None
    return finite(text, value, f" in column {index}")


class Parsed(NamedTuple):
    """The lines of a block, read by compiled code.

    Attributes:
        target_start, target_end: range of the target of each line, in bytes; −1 if the line is not plain.
        line_end: offset of the next line.
        row_end: number of elements up to the end of each line.
        columns, values: the elements. A value with too many digits is NaN.
        value_start, value_end: range of each value, in bytes.
    """

    target_start: Any
    target_end: Any
    line_end: Any
    row_end: Any
    columns: Any
    values: Any
    value_start: Any
    value_end: Any


def is_blank(byte: int) -> bool:
    """Return whether a byte is white space."""
    return byte == SPACE or TAB <= byte <= RETURN


def read_digits(text: Any, at: int, whole: int) -> tuple[int, int]:
    """Return the end of the digits at an offset, and the number with these digits appended to `whole`.

    Above `LARGEST`, the number is only a lower bound.
    """
    while ZERO <= text[at] <= NINE:
        if whole <= LARGEST:
            whole = whole * 10 + (text[at] - ZERO)
        at += 1
    return at, whole


def read_value(text: Any, at: int) -> tuple[int, float]:
    """Return the end of the decimal number at an offset, and its value.

    The end is −1 if there is no number. The value is NaN if float64 arithmetic would round more than once.
    """
    sign = -1.0 if text[at] == MINUS else 1.0
    if text[at] == MINUS or text[at] == PLUS:
        at += 1
    start, exponent = at, 0
    at, whole = read_digits(text, at, 0)
    digits = at - start
    if text[at] == POINT:
        start = at + 1
        at, whole = read_digits(text, start, whole)
        digits, exponent = digits + at - start, start - at
    if digits == 0:
        return -1, 0.0
    if text[at] == LARGE_E or text[at] == SMALL_E:
        at += 1
        direction = -1 if text[at] == MINUS else 1
        if text[at] == MINUS or text[at] == PLUS:
            at += 1
        start = at
        at, power = read_digits(text, at, 0)
        if at == start:
            return -1, 0.0
        exponent += direction * power
    if whole > LARGEST or abs(exponent) >= len(POWERS):
        return at, math.nan
    return at, sign * (whole / POWERS[-exponent] if exponent < 0 else whole * POWERS[exponent])


def read_line(text: Any, at: int, line: int, entry: int, out: Parsed) -> int:
    """Read the line that begins `at`. Return the number of elements so far, or −1 if the line is not plain."""
    while text[at] != NEWLINE and is_blank(text[at]):
        at += 1
    out.target_start[line] = at
    end, _ = read_digits(text, at, 0)
    has_target = end == at or text[end] != COLON
    while has_target and SPACE < text[at] <= TILDE and text[at] != COMMENT:
        at += 1
    out.target_end[line] = at
    while is_blank(text[at]) or not has_target:
        if text[at] == NEWLINE:
            return entry
        if has_target:
            at += 1
        has_target = True
        if not is_blank(text[at]):
            end, column = read_digits(text, at, 0)
            if end == at or text[end] != COLON or column > LARGEST:
                return -1
            start = end + 1
            at, value = read_value(text, start)
            if at < 0:
                return -1
            out.columns[entry], out.values[entry] = column, value
            out.value_start[entry], out.value_end[entry] = start, at
            entry += 1
    return -1


def parse(text: Any, out: Parsed) -> int:
    """Read the lines of a block, which ends with a newline, and return their number of elements. Compiled."""
    at, entry = 0, 0
    for line in range(len(out.line_end)):
        end = read_line(text, at, line, entry, out)
        if end < 0:
            out.target_start[line] = -1
        else:
            entry = end
        while text[at] != NEWLINE:
            at += 1
        at += 1
        out.line_end[line] = at
        out.row_end[line] = entry
    return entry


def parsed(block: bytes) -> Parsed:
    """Return the lines of a block, which must end with a newline."""
    # an element that compiled code reads has at least four bytes: a digit, a colon, a digit and a separator
    lines, elements = block.count(b"\n"), min(block.count(b":"), len(block) // 4)
    of_line, of_value = np.empty((4, lines), np.int64), np.empty((2, elements), np.int64)
    out = Parsed(
        target_start=of_line[0],
        target_end=of_line[1],
        line_end=of_line[2],
        row_end=of_line[3],
        columns=np.empty(elements, np.int64),
        values=np.empty(elements),
        value_start=of_value[0],
        value_end=of_value[1],
    )
    found = cached_jit(parse)(np.frombuffer(block, np.uint8), out)
    for e in np.flatnonzero(np.isnan(out.values[:found])).tolist():
        out.values[e] = float(block[out.value_start[e] : out.value_end[e]])
    too_large = np.flatnonzero(~(np.abs(out.values[:found]) <= LARGEST_VALUE))
    out.target_start[np.searchsorted(out.row_end, too_large, side="right")] = -1
    return out


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yield blocks that end at the end of a line, without a byte order mark; None for a line above `MAX_LINE`.

    The given blocks must not be longer than `MAX_LINE`. Every byte is copied a few times at most.
    """
    pieces: list[bytes] = []
    length, mark = 0, BOM_UTF8
    for block in blocks:
        end = block.find(b"\n")
        length += len(block) if end < 0 else end
        if length > MAX_LINE:
            pieces = []
            if end < 0:
                continue
            yield None
            block, length, mark = block[end + 1 :], len(block) - end - 1, b""
        whole, newline, rest = block.rpartition(b"\n")
        if newline:
            yield b"".join([*pieces, whole, newline]).removeprefix(mark)
            pieces, length, mark = [], len(rest), b""
        pieces.append(rest)
    if length > MAX_LINE:
        yield None
    elif last := b"".join(pieces).removeprefix(mark):
        yield last + b"\n"


def lines_of(blocks: Iterable[bytes]) -> Iterator[tuple[int, Line | BadRow]]:
    """Yield line numbers, and lines or errors. Empty lines are skipped."""
    number = 0
    for block in whole_lines(blocks):
        if block is None:
            number += 1
            yield number, too_long()
            continue
        found = parsed(block)
        start, first = 0, 0
        for target_start, target_end, end, last in zip(*(places.tolist() for places in found[:4]), strict=True):
            number += 1
            if target_start < 0:
                yield from unusual_line(number, block[start:end])
            elif target_start < target_end or first < last:
                target = block[target_start:target_end].decode()
                yield number, Line(found.columns[first:last], found.values[first:last], target)
            start, first = end, last


def unusual_line(number: int, line: bytes) -> Iterator[tuple[int, Line | BadRow]]:
    """Yield a line that is not plain, or its error; nothing if it is empty."""
    try:
        text = line.decode()
        if text.partition("#")[0].strip():
            yield number, line_of(text)
    except UnicodeDecodeError:
        yield number, BadRow("not UTF-8 text")
    except BadRow as bad:
        yield number, bad
