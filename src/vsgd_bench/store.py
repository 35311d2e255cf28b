"""Results on disk: arrays in a .npz file, and their provenance in a .json file. Both are checked when read."""

from __future__ import annotations

import hashlib
import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vsgd import disk

Arrays = dict[str, Any]


write_whole = partial(disk.write_whole, make_folder=True)


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.npz"), path.with_name(f"{path.name}.json")


def save(path: Path, arrays: Arrays, origin: dict[str, Any]) -> None:
    """Store arrays in `path`.npz and their provenance in `path`.json."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    data = buffer.getvalue()
    data_file, note = _files(path)
    write_whole(data_file, data)
    disk.write_checked(note, {**origin, "sha256": hashlib.sha256(data).hexdigest()})


def load(path: Path, request: dict[str, Any]) -> tuple[Arrays, dict[str, Any]] | None:
    """Return the arrays at `path` and their provenance, or None if they are absent, damaged or of another request."""
    data_file, note = _files(path)
    origin = disk.read_checked(note)
    if origin is None or any(origin.get(key) != value for key, value in request.items()):
        return None
    try:
        data = data_file.read_bytes()
    except OSError as error:
        disk.say_damaged(data_file, error.strerror)
        return None
    if hashlib.sha256(data).hexdigest() != origin["sha256"]:
        disk.say_damaged(data_file, "its contents are not what was written")
        return None
    with np.load(io.BytesIO(data)) as archive:
        return dict(archive), origin
