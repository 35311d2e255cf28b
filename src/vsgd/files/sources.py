"""Bytes and lines of files and pipes, gzipped or not. Only errors of reading are blamed on a file."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vsgd.errors import UserError

GZIP = b"\x1f\x8b"
BLOCK = 1 << 20
"""Bytes read at a time."""

SVMLIGHT = (".svm", ".libsvm", ".svmlight")


def suffix(path: Path) -> str:
    """What the file is, gzipped or not."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def is_svmlight(path: Path) -> bool:
    return suffix(path) in SVMLIGHT


def is_pipe(path: Path) -> bool:
    """Whether the data can be read once only; `-` is standard input."""
    return str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to read. What goes wrong is told in one line."""
    try:
        with open(0 if str(path) == "-" else path, "rb", closefd=str(path) != "-") as file:
            zipped = path.suffix == ".gz" or file.peek(len(GZIP)).startswith(GZIP)
            yield gzip.GzipFile(fileobj=file) if zipped else file  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is cut short or damaged: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}. Convert it to UTF-8.") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def blocks(path: Path) -> Iterator[bytes]:
    with opened(path) as file:
        while block := file.read(BLOCK):
            yield block


def lines(path: Path) -> Iterator[str]:
    """Lines with their ends, without a byte order mark."""
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        yield from text
