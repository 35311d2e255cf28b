"""The folder of data sets that VSGD_DATA names. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vsgd.errors import UserError


class MissingData(UserError):
    """A file is not where it should be."""


def locate(name: str) -> Path:
    """Where a data file is."""
    folder = os.environ.get("VSGD_DATA")
    if folder is None:
        raise MissingData(f"set VSGD_DATA to a folder that holds {name}")
    if not (path := Path(folder) / name).exists():
        raise MissingData(f"put {name} into {folder}, the folder that VSGD_DATA names")
    return path


@contextmanager
def skipped_without_data() -> Iterator[None]:
    """Say what is missing instead of failing, so that `make bench` goes on with the next benchmark."""
    try:
        yield
    except MissingData as missing:
        print(f"skipped: {missing}")
