"""Files of data sets, in the folder that the environment variable VSGD_DATA names. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vsgd.errors import UserError


class MissingData(UserError):
    """A file of a data set does not exist."""


def locate(name: str) -> Path:
    """Return the path of a data file."""
    folder = os.environ.get("VSGD_DATA")
    if folder is None:
        raise MissingData(f"set VSGD_DATA to a folder that holds {name}")
    if not (path := Path(folder) / name).exists():
        raise MissingData(f"put {name} into {folder}, the folder that VSGD_DATA names")
    return path


@contextmanager
def skipped_without_data() -> Iterator[None]:
    """Print which file is missing instead of raising, so that `make bench` continues with the next benchmark."""
    try:
        yield
    except MissingData as missing:
        print(f"skipped: {missing}")
