"""Results on disk: arrays as .npz, where they come from as .json beside it. Both are whole or absent."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vsgd import disk
from vsgd.errors import UserError

Arrays = dict[str, Any]


write_whole = partial(disk.write_whole, make_folder=True)


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.npz"), path.with_name(f"{path.name}.json")


def save(path: Path, arrays: Arrays, origin: dict[str, Any]) -> None:
    """Store arrays at `path`.npz and say in `path`.json what produced them."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    data = buffer.getvalue()
    record = {**origin, "sha256": hashlib.sha256(data).hexdigest()}
    data_file, note = _files(path)
    note.unlink(missing_ok=True)  # new arrays must never stand beside an old note
    write_whole(data_file, data)
    write_whole(note, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def load(path: Path, request: dict[str, Any]) -> tuple[Arrays, dict[str, Any]] | None:
    """The arrays at `path` and their origin, or None if there are none yet for this request."""
    data_file, note = _files(path)
    if not note.exists():
        return None
    try:
        origin = json.loads(note.read_text())
        data = data_file.read_bytes()
        if hashlib.sha256(data).hexdigest() != origin["sha256"]:
            raise ValueError("its contents are not what was written")
        if any(origin.get(key) != value for key, value in request.items()):
            return None
        with np.load(io.BytesIO(data)) as archive:
            return dict(archive), origin
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(
            f"corrupt results file {data_file} ({error}). Delete it and {note.name}, then run again."
        ) from None
