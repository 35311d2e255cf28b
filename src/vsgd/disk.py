"""Files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

from vsgd.errors import UserError


def write_whole(path: Path, content: bytes | str, make_folder: bool = False) -> None:
    """Write next to the file, then rename: whoever reads it sees all or nothing."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}. Choose another folder.") from error
    finally:
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)
