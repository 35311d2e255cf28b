"""What a user may set of `vsgd fit`, and that it stays what a model was begun with."""

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
"""The kinds of column, and how several of one kind are called."""

MAX_HASH_BITS = 30
MAX_ALPHA = 1e6

Kinds = dict[str, str]


def penalty_name(penalty: str | None) -> str:
    return penalty or "none"


PENALTY_OF = {penalty_name(penalty): penalty for penalty in PENALTIES}
"""Penalties of the estimators by their names on the command line."""


class Settings(NamedTuple):
    """Settings that the model file stores, with their defaults. `penalty` is "none" where an estimator has None."""

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
    """One character; \\t and the word tab are a tab."""
    character = {"\\t": "\t", "tab": "\t"}.get(text, text)
    if len(character) != 1 or character in '"\r\n ' or not character.isascii():
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a single character such as , ; | or tab")
    return character


def number_between(least: float, most: float) -> Callable[[str], float]:
    """A number from `least` to `most`."""

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
    """NAME=KIND, several with commas between; a name with a comma is quoted as in CSV."""
    kinds = {}
    for part in next(csv.reader([text]), []):
        name, equals, kind = part.rpartition("=")
        if not equals or kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=KIND with a kind of {', '.join(KINDS)}")
        kinds[name] = kind
    return kinds


def settings_of(arguments: argparse.Namespace) -> Settings:
    said = {name: getattr(arguments, name) for name in Settings._fields}
    return DEFAULT._replace(**{name: value for name, value in said.items() if value is not None})


def kinds_said(arguments: argparse.Namespace) -> Kinds:
    """The kinds of columns that were given; `--text` and `--category` are short for `--columns`."""
    kinds = {**dict.fromkeys(arguments.text, "text"), **dict.fromkeys(arguments.category, "category")}
    for some in arguments.columns:
        kinds |= some
    return kinds


def refuse_other_settings(arguments: argparse.Namespace, trained: Trained) -> None:
    """What is said again at `--resume` must be what it was."""
    schema = trained.schema
    begun = {**trained._asdict(), "hash_bits": schema.hash_bits}
    others = []
    for name in Settings._fields:
        value = getattr(arguments, name)
        if value is not None and value != begun[name]:
            others.append(f"--{name.replace('_', '-')} {value} instead of {begun[name]}")
    if arguments.target not in (None, schema.target) and schema.format == "table":
        others.append(f"--target {arguments.target} instead of {schema.target}")
    for name, kind in kinds_said(arguments).items():
        if schema.kind_of(name) != kind:
            others.append(f"--columns {name}={kind} instead of {schema.kind_of(name)}")
    if others:
        raise UserError(
            f"{arguments.model} was begun with other settings: {', '.join(others)}. Train again, or leave them out."
        )
