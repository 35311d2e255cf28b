"""Read bytes and lines of files and pipes, gzipped or not, in bounded memory.

Compressed data is decompressed one block at a time. No line may be longer than `MAX_LINE`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vsgd.disk import open_input
from vsgd.errors import UserError
from vsgd.files.cells import BadRow

GZIP = b"\x1f\x8b"
BLOCK = 1 << 20
"""Bytes read at a time."""

MAX_LINE = 1 << 24
"""Maximum length of a line, and of a CSV record over several lines: characters of a table, bytes of svmlight."""

SVMLIGHT = (".svm", ".libsvm", ".svmlight")


def suffix(path: Path) -> str:
    """Return the suffix of a file in lower case, without a final .gz."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def is_svmlight(path: Path) -> bool:
    """Return whether the name of a file is that of an svmlight file."""
    return suffix(path) in SVMLIGHT


def too_long() -> BadRow:
    """Return the error for a line that is too long."""
    return BadRow(f"longer than {MAX_LINE:,} characters")


def is_pipe(path: Path) -> bool:
    """Return whether the path can be read only once. `-` is standard input."""
    return str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file or a pipe for reading, and decompress gzip.

    Raises:
        UserError: for any error of reading, also within the context.
    """
    try:
        with open_input(path) as file:
            zipped = path.suffix == ".gz" or file.peek(len(GZIP)).startswith(GZIP)
            yield gzip.GzipFile(fileobj=file) if zipped else file  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is cut short or damaged: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}. Convert it to UTF-8.") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in blocks of at most `BLOCK` bytes."""
    with opened(path) as file:
        while block := file.read(BLOCK):
            yield block


def _lines(path: Path) -> Iterator[str | None]:
    """Yield lines with their ends, without a byte order mark; None for a line that is too long."""
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        while line := text.readline(MAX_LINE + 1):
            if len(line) <= MAX_LINE:
                yield line
                continue
            while line and line[-1] not in "\r\n":
                line = text.readline(BLOCK)
            yield None


class Lines:
    """Iterate over the lines of a text file.

    Raises BadRow if a line, or the lines since `begin_record` together, are longer than `MAX_LINE`. The iteration can
    continue after that with the next line.
    """

    def __init__(self, path: Path):
        self._lines: Iterator[str | None] = _lines(path)
        self._length = 0
        self._number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def begin_record(self) -> int:
        """Return the number of the next line, from 1 on, where a record begins."""
        self._length = 0
        return self._number + 1

    def peek(self, count: int) -> list[str]:
        """Return the next lines without consuming them, up to `count` and up to a line that is too long."""
        ahead = list(itertools.islice(self._lines, count))
        self._lines = itertools.chain(ahead, self._lines)
        whole: list[str] = []
        for line in ahead:
            if line is None:
                break
            whole.append(line)
        return whole

    def __next__(self) -> str:
        line = next(self._lines)
        self._number += 1
        if line is not None:
            self._length += len(line)
            if self._length <= MAX_LINE:
                return line
        raise too_long()
