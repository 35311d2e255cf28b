"""The errors that are meant for people."""


class UserError(Exception):
    """Something the user can mend: one line that says what happened, where, and what to do."""


def one_line(message: object) -> str:
    """A message as it is printed: whatever a file name or a cell brings into it, it stays one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))
