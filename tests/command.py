"""Run the `vsgd` command in the process of a test."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from vsgd.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def captured() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")


def text_of(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()


def vsgd(*words) -> Outcome:
    """Run a command. An exception fails the test, since users would see a traceback."""
    with contextlib.redirect_stdout(captured()) as out, contextlib.redirect_stderr(captured()) as err:
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
    return Outcome(code, text_of(out), text_of(err))


def succeeds(*words) -> str:
    """Run a command that must succeed, and return its output."""
    outcome = vsgd(*words)
    assert outcome.code == 0, outcome.err
    return outcome.out


def refuses(*words, saying: str = "") -> str:
    """Run a command that must fail, and return its error message of one line."""
    outcome = vsgd(*words)
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("vsgd"), outcome.err
    assert saying in outcome.err, outcome.err
    return outcome.err


def scores(*words) -> dict[str, float]:
    """Return the output of `vsgd score`."""
    lines = succeeds("score", *words).splitlines()
    return {name: float(value) for name, value in map(str.split, lines)}
