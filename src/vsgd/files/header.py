"""The header of a model file, field by field: each is of its type and in its range, and they fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vsgd.arguments import LARGEST_SEED
from vsgd.files.settings import MOST_HASH_BITS
from vsgd.files.targets import classes_of
from vsgd.linear.gate import LARGEST_VALUE, MOST_COLUMNS
from vsgd.linear.losses import CLASSIFICATION, REGRESSION

Holds = Callable[[Any], bool]


class Refused(Exception):
    """Why a model file is not used."""


def whole(least: int, most: int) -> Holds:
    return lambda value: type(value) is int and least <= value <= most


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def are_means(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is float and abs(x) <= LARGEST_VALUE for x in value)


COUNT = whole(1, 2**31 - 1)
FIELDS: dict[str, Holds] = {
    "vsgd": whole(0, 2**31),
    "schema": lambda value: isinstance(value, dict),
    "loss": lambda value: is_text(value) and value in {**CLASSIFICATION, **REGRESSION},
    "classes": are_texts,
    "passes": whole(0, 2**31 - 1),
    "batch_size": COUNT,
    "seed": whole(0, LARGEST_SEED),
    "chunk_rows": COUNT,
}
SCHEMA: dict[str, Holds] = {
    "format": lambda value: is_text(value) and value in ("table", "svmlight"),
    "target": is_text,
    "numbers": are_texts,
    "categories": are_texts,
    "texts": are_texts,
    "means": are_means,
    "hash_bits": whole(0, MOST_HASH_BITS),
    "columns": whole(0, MOST_COLUMNS),
}


def check_fields(fields: dict[str, Any], description: dict[str, Holds]) -> None:
    if fields.keys() != description.keys():
        odd = ", ".join(sorted(map(str, fields.keys() ^ description.keys())))
        raise Refused(f"fields are missing from its header, or too many: {odd:.80}")
    for name, holds in description.items():
        if not holds(fields[name]):
            raise Refused(f"its header has {fields[name]!s:.40} as {name}")


def check_header(header: dict[str, Any]) -> None:
    """Refuse a header that no model could have."""
    check_fields(header, FIELDS)
    schema = header["schema"]
    check_fields(schema, SCHEMA)
    names = [*schema["numbers"], *schema["categories"], *schema["texts"], schema["target"]]
    hashed = 2 ** schema["hash_bits"] if schema["categories"] or schema["texts"] else 0
    classes = header["classes"]
    fits_together = {
        "columns": schema["format"] == "svmlight" or schema["columns"] == len(schema["numbers"]) + hashed,
        "names": len(set(names)) == len(names) and (schema["format"] == "table" or names == [""]),
        "means": len(schema["means"]) == len(schema["numbers"]),
        "classes": len(classes_of(classes)) == len(classes)
        and (len(classes) >= 2) == (header["loss"] in CLASSIFICATION),
    }
    for what, fits in fits_together.items():
        if not fits:
            raise Refused(f"the {what} in its header do not fit together with the rest")
