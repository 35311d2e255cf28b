"""The errors that are meant for people."""


class UserError(Exception):
    """Something the user can mend: one line that says what happened, where, and what to do."""
