"""Settings of `vsgd fit`, and the check that `--resume` does not change them."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from vsgd.errors import UserError
from vsgd.linear.penalties import DEFAULT_ALPHA, DEFAULT_L1_RATIO, DEFAULT_PENALTY, PENALTIES

if TYPE_CHECKING:
    from vsgd.files.storage import Trained

KINDS = {"number": "numbers", "date": "dates", "category": "categories", "text": "texts", "ignore": "ignored"}
"""The kinds of columns, and their plurals."""

MAX_HASH_BITS = 30
MAX_ALPHA = 1e6

Kinds = dict[str, str]
"""The kind of each column, by name."""


def penalty_name(penalty: str | None) -> str:
    """Return the name of a penalty on the command line."""
    return penalty or "none"


PENALTY_OF = {penalty_name(penalty): penalty for penalty in PENALTIES}
"""The penalty of the estimators for each name on the command line."""


class Settings(NamedTuple):
    """Settings that the model file contains, with their defaults. `penalty` is "none" if estimators have None."""

    loss: str = "log_loss"
    batch_size: int = 16
    seed: int = 0
    chunk_rows: int = 10_000
    hash_bits: int = 18
    penalty: str = penalty_name(DEFAULT_PENALTY)
    alpha: float = DEFAULT_ALPHA
    l1_ratio: float = DEFAULT_L1_RATIO


DEFAULT = Settings()


def delimiter_argument(text: str) -> str:
    """Convert an argument to one character. \\t and the word tab mean a tab."""
    character = {"\\t": "\t", "tab": "\t"}.get(text, text)
    if len(character) != 1 or character in '"\r\n ' or not character.isascii():
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a single character such as , ; | or tab")
    return character


def number_between(least: float, most: float) -> Callable[[str], float]:
    """Return an argument type for numbers from `least` to `most`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from {least:g} to {most:g}")
        return value

    return number


def columns_argument(text: str) -> Kinds:
    """Convert an argument of the form NAME=KIND,NAME=KIND. A name with a comma is quoted as in CSV."""
    kinds = {}
    for part in next(csv.reader([text]), []):
        name, equals, kind = part.rpartition("=")
        if not equals or kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=KIND with a kind of {', '.join(KINDS)}")
        kinds[name] = kind
    return kinds


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the command line, or their defaults."""
    given = {name: getattr(arguments, name) for name in Settings._fields}
    return DEFAULT._replace(**{name: value for name, value in given.items() if value is not None})


def given_kinds(arguments: argparse.Namespace) -> Kinds:
    """Return the kinds of columns of the command line. `--text` and `--category` are short for `--columns`."""
    kinds = {**dict.fromkeys(arguments.text, "text"), **dict.fromkeys(arguments.category, "category")}
    for some in arguments.columns:
        kinds |= some
    return kinds


def refuse_other_settings(arguments: argparse.Namespace, trained: Trained) -> None:
    """Raise UserError if an option given with `--resume` differs from the setting of the model."""
    schema = trained.schema
    begun = {**trained._asdict(), "hash_bits": schema.hash_bits}
    others = []
    for name in Settings._fields:
        value = getattr(arguments, name)
        if value is not None and value != begun[name]:
            others.append(f"--{name.replace('_', '-')} {value} instead of {begun[name]}")
    if arguments.target not in (None, schema.target) and schema.format == "table":
        others.append(f"--target {arguments.target} instead of {schema.target}")
    for name, kind in given_kinds(arguments).items():
        if schema.kind_of(name) != kind:
            others.append(f"--columns {name}={kind} instead of {schema.kind_of(name)}")
    if others:
        raise UserError(
            f"{arguments.model} was trained with other settings: {', '.join(others)}. Train again, or leave them out."
        )
