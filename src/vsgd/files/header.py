"""Validation of the header of a model file: types, ranges, and consistency of its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vsgd.arguments import LARGEST_SEED
from vsgd.files.settings import MAX_ALPHA, MAX_HASH_BITS, PENALTY_OF
from vsgd.files.tables import MAX_NAME
from vsgd.files.targets import MAX_CLASSES, MAX_TARGET, classes_of
from vsgd.linear.losses import CLASSIFICATION, REGRESSION
from vsgd.linear.validation import LARGEST_VALUE, MAX_COLUMNS

Holds = Callable[[Any], bool]
"""A predicate on the value of a field."""


class Refused(Exception):
    """The reason why a model file is invalid."""


def whole(least: int, most: int) -> Holds:
    return lambda value: type(value) is int and least <= value <= most


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def are_texts(longest: int) -> Holds:
    return lambda value: isinstance(value, list) and all(is_text(x) and len(x) <= longest for x in value)


def between(least: float, most: float) -> Holds:
    return lambda value: type(value) is float and least <= value <= most


def are_means(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is float and abs(x) <= LARGEST_VALUE for x in value)


COUNT = whole(1, 2**31 - 1)
FIELDS: dict[str, Holds] = {
    "vsgd": whole(0, 2**31),
    "schema": lambda value: isinstance(value, dict),
    "loss": lambda value: is_text(value) and value in {**CLASSIFICATION, **REGRESSION},
    "classes": lambda value: are_texts(MAX_TARGET)(value) and len(value) <= MAX_CLASSES,
    "passes": whole(0, 2**31 - 1),
    "batch_size": COUNT,
    "seed": whole(0, LARGEST_SEED),
    "chunk_rows": COUNT,
    "penalty": lambda value: is_text(value) and value in PENALTY_OF,
    "alpha": between(0, MAX_ALPHA),
    "l1_ratio": between(0, 1),
    "rows": whole(0, 2**63 - 1),
}
SCHEMA: dict[str, Holds] = {
    "format": lambda value: is_text(value) and value in ("table", "svmlight"),
    "target": lambda value: is_text(value) and len(value) <= MAX_NAME,
    "numbers": are_texts(MAX_NAME),
    "dates": are_texts(MAX_NAME),
    "categories": are_texts(MAX_NAME),
    "texts": are_texts(MAX_NAME),
    "means": are_means,
    "hash_bits": whole(0, MAX_HASH_BITS),
    "columns": whole(0, MAX_COLUMNS),
}


def check_fields(fields: dict[str, Any], description: dict[str, Holds]) -> None:
    if fields.keys() != description.keys():
        odd = ", ".join(sorted(map(str, fields.keys() ^ description.keys())))
        raise Refused(f"fields are missing from its header, or too many: {odd:.80}")
    for name, holds in description.items():
        if not holds(fields[name]):
            raise Refused(f"its header has {fields[name]!s:.40} as {name}")


def check_header(header: dict[str, Any]) -> None:
    """Raise Refused if a header is invalid."""
    check_fields(header, FIELDS)
    schema = header["schema"]
    check_fields(schema, SCHEMA)
    inputs = [*schema["numbers"], *schema["dates"]]
    names = [*inputs, *schema["categories"], *schema["texts"], schema["target"]]
    hashed = 2 ** schema["hash_bits"] if schema["categories"] or schema["texts"] else 0
    classes = header["classes"]
    fits_together = {
        "columns": schema["format"] == "svmlight" or schema["columns"] == len(inputs) + hashed,
        "names": len(set(names)) == len(names) and (schema["format"] == "table" or names == [""]),
        "means": len(schema["means"]) == len(inputs),
        "classes": len(classes_of(classes)) == len(classes)
        and (len(classes) >= 2) == (header["loss"] in CLASSIFICATION),
    }
    for what, fits in fits_together.items():
        if not fits:
            raise Refused(f"the {what} in its header do not fit together with the rest")
