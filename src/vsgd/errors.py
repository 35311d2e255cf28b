"""The errors that are meant for people."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


class UserError(Exception):
    """Something the user can mend: one line that says what happened, where, and what to do."""


def one_line(message: object) -> str:
    """A message as it is printed: whatever a file name or a cell brings into it, it stays one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))


def install(extra: str) -> str:
    """Return the command that installs an extra. The package is on no index, so it is installed from its source."""
    return f"run `pip install '.[{extra}]'` in a clone of vsgd"


def give_up(stream: TextIO | None) -> None:
    """Drop what could not be written to a standard stream, so that the end of the process does not try again."""
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


def say(line: str) -> None:
    """Print a line to standard error. If that is closed or full, the line is dropped; the exit code remains."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        give_up(sys.stderr)


@contextmanager
def needs_extra(part: str, extra: str) -> Iterator[None]:
    """Around the imports of a part of the package: if a dependency is missing, say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vsgd"):
            raise
        message = f"{part} needs {error.name}: {install(extra)}"
        raise ModuleNotFoundError(message, name=error.name) from None
