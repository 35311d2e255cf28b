"""What a user may set of `vsgd fit`, and that it stays what a model was begun with."""

from __future__ import annotations

import argparse
import csv
from typing import TYPE_CHECKING, NamedTuple

from vsgd.errors import UserError

if TYPE_CHECKING:
    from vsgd.files.storage import Trained

KINDS = {"number": "numbers", "category": "categories", "text": "texts", "ignore": "ignored"}
"""The kinds of column, and how several of one kind are called."""

MOST_HASH_BITS = 30

Kinds = dict[str, str]


class Settings(NamedTuple):
    """What the model file remembers, and what it is if nothing is said."""

    loss: str = "log_loss"
    batch_size: int = 16
    seed: int = 0
    chunk_rows: int = 10_000
    hash_bits: int = 18


DEFAULT = Settings()


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
            f"{arguments.model} was begun with other settings: {', '.join(others)}. Train anew, or leave them out."
        )
