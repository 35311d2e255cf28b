"""Read targets: class labels, compared as text or as numbers, or numbers to predict."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from vsgd.files.cells import BadRow, finite, is_missing, plain_float, shown
from vsgd.linear import CLASSIFICATION

DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,6})?")

MAX_CLASSES = 1000
MAX_TARGET = 1000
"""Maximum length of a target, in characters."""

ReadTarget = Callable[[str], float]
"""Converts the text of a target to a number. Raises BadRow."""


def as_number(label: str) -> Decimal | None:
    """Return a label as a number, or None if it is not a decimal number."""
    return Decimal(label) if DECIMAL.fullmatch(label) else None


def keys_of(labels: Iterable[str]) -> dict[str, Hashable]:
    """Return the key of each label. Labels with equal keys are one class.

    Keys are numbers if all labels are numbers, and texts otherwise.
    """
    numbers = {label: as_number(label) for label in labels}
    by_name = None in numbers.values()
    return {label: label if by_name else number for label, number in numbers.items()}


def classes_of(labels: Iterable[str]) -> list[str]:
    """Return the classes in order, each in its shortest spelling: 1, +1 and 1.0 are one class."""
    spellings: dict[Hashable, list[str]] = {}
    for label, key in keys_of(labels).items():
        spellings.setdefault(key, []).append(label)
    return [min(spellings[key], key=lambda label: (len(label), label)) for key in sorted(spellings)]  # type: ignore[type-var]


def present(text: str) -> str:
    """Return the target of a row without surrounding blanks.

    Raises:
        BadRow: if it is missing or too long.
    """
    text = text.strip()
    if len(text) > MAX_TARGET:
        raise BadRow(f"a target of {len(text)} characters, {shown(text)}; {MAX_TARGET} is the limit")
    if is_missing(text):
        raise BadRow(f"no target: {shown(text)} is a missing value" if text else "no target")
    return text


def class_reader(classes: list[str]) -> ReadTarget:
    """Return a function that converts labels to numbers of classes; with two classes, to −1 and 1."""
    place = {key: float(i) for i, key in enumerate(keys_of(classes).values())}
    by_number = not any(isinstance(key, str) for key in place)
    outside = {0.0: -1.0} if len(place) == 2 else {}

    def read(text: str) -> float:
        label = present(text)
        key = as_number(label) if by_number else label
        if key not in place:
            raise BadRow(f"class {shown(label)} is not one that the model was trained with")
        return outside.get(place[key], place[key])

    return read


def number_reader(loss: str) -> ReadTarget:
    """Return a function that reads targets of a regression."""

    def read(text: str) -> float:
        text = present(text)
        try:
            value = finite(text, plain_float(text), " in the target")
        except ValueError:
            raise BadRow(f"{shown(text)} in the target is not a number") from None
        if loss == "poisson" and value < 0:
            raise BadRow(f"{shown(text)} in the target is negative; the Poisson loss is for counts")
        if loss == "gamma" and value <= 0:
            raise BadRow(f"{shown(text)} in the target is not positive; the Gamma loss is for positive numbers")
        return value

    return read


def reader_of(loss: str, classes: list[str]) -> ReadTarget:
    """Return the function that reads targets for a loss."""
    return class_reader(classes) if loss in CLASSIFICATION else number_reader(loss)


class SquaredDeviations(NamedTuple):
    """Count, mean and sum of squared deviations of numbers that arrive in parts (Chan, Golub & LeVeque 1979).

    The first number, `origin`, is subtracted from all of them, so that the deviations of a constant are exactly zero.
    """

    rows: int
    origin: float
    mean: float
    squares: float


def add_values(before: SquaredDeviations | None, values: np.ndarray) -> SquaredDeviations:
    """Return the squared deviations after more values."""
    if before is None:
        before = SquaredDeviations(0, float(values[0]), 0.0, 0.0)
    values = values - before.origin
    count, mean = len(values), float(values.mean())
    total, off = before.rows + count, mean - before.mean
    squares = float(((values - mean) ** 2).sum()) + off * off * before.rows * count / total
    return SquaredDeviations(total, before.origin, before.mean + off * count / total, before.squares + squares)


def r_squared(error: float, targets: SquaredDeviations) -> float:
    """Return R², the fraction of variance explained.

    For a constant target it is 1 if all predictions are exact, otherwise 0, as in scikit-learn.

    Args:
        error: sum of squared errors of the predictions.
        targets: squared deviations of the targets.
    """
    if targets.squares == 0:
        return 1.0 if error == 0 else 0.0
    return 1 - error / targets.squares
