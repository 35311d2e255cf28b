"""Errors with messages for users, and how they are printed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


class UserError(Exception):
    """An error that the user can fix. Its message is one line: what happened, where, and what to do."""


def one_line(message: object) -> str:
    """Return a message with control characters escaped, such as newlines in file names and cells."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))


def install(extra: str) -> str:
    """Return the command that installs an extra, from a clone because the package is on no index."""
    return f"run `pip install '.[{extra}]'` in a clone of vsgd"


def give_up(stream: TextIO | None) -> None:
    """Redirect a standard stream to the null device, so that Python does not try to flush it again at exit."""
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


def say(line: str) -> None:
    """Print a line to standard error. The line is dropped if standard error is closed or full."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        give_up(sys.stderr)


@contextmanager
def needs_extra(part: str, extra: str) -> Iterator[None]:
    """Wrap the imports of a subpackage: if a dependency is missing, the error names the command that installs it.

    Args:
        part: name of the subpackage, such as "vsgd.torch".
        extra: the extra of `pyproject.toml` that has its dependencies.

    Raises:
        ModuleNotFoundError: with the command, if a module outside of vsgd is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vsgd"):
            raise
        message = f"{part} needs {error.name}: {install(extra)}"
        raise ModuleNotFoundError(message, name=error.name) from None
