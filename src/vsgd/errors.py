"""The errors that are meant for people."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something the user can mend: one line that says what happened, where, and what to do."""


def one_line(message: object) -> str:
    """A message as it is printed: whatever a file name or a cell brings into it, it stays one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))


def install(extra: str) -> str:
    """Return the command that installs an extra. The package is on no index, so it is installed from its source."""
    return f"run `pip install '.[{extra}]'` in a clone of vsgd"


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
