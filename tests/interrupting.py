"""Deliver signals at chosen lines of the source of vsgd, or of other files, always the same ones."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import vsgd

SOURCE = str(Path(vsgd.__file__).parent)


class Interrupt(BaseException):
    """Raised by the signal handler of a test, like `KeyboardInterrupt` by that of Ctrl-C."""


class Lines:
    """Counts the executed lines of some files, and raises a signal at some of them."""

    def __init__(self, chosen: Callable[[int], bool], number: int, files: str | tuple[str, ...]):
        self.count = 0
        self._chosen, self._number, self._files = chosen, number, files

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        if event == "line":
            self.count += 1
            if self._chosen(self.count - 1):
                signal.raise_signal(self._number)
        return self.trace

    def resume(self, frame: FrameType | None, event: str, _: Any) -> None:
        """Trace again: Python stops it when an exception leaves the trace function."""
        sys.setprofile(None)
        sys.settrace(self.trace)
        while frame is not None:
            if frame.f_code.co_filename.startswith(self._files):
                frame.f_trace = self.trace
            frame = frame.f_back


@contextmanager
def handled(numbers: Collection[int], handler: Any) -> Iterator[None]:
    """Install a signal handler, and restore the earlier ones on exit."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def run_interrupted(
    function: Callable[[], Any],
    chosen: Callable[[int], bool],
    number: int = signal.SIGALRM,
    raises: bool = True,
    files: str | tuple[str, ...] = SOURCE,
) -> tuple[int, list[BaseException]]:
    """Call a function and raise a signal at those of its lines whose numbers are chosen.

    Returns:
        The number of calls of the handler, and the exception that ended the function, or None.
    """
    lines, calls, ended = Lines(chosen, number, files), 0, []

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal calls
        calls += 1
        if raises:
            sys.setprofile(lines.resume)
            raise Interrupt

    with handled([number], handler):
        before = {n: signal.getsignal(n) for n in signal.valid_signals()}
        tracing = sys.gettrace()
        try:
            sys.settrace(lines.trace)
            function()
        except Interrupt as error:
            ended.append(error)
        finally:
            sys.settrace(tracing)
            sys.setprofile(None)
        assert {n: signal.getsignal(n) for n in before} == before, "a handler of the user was lost"
    return calls, ended


def count_lines(function: Callable[[], Any], files: str | tuple[str, ...] = SOURCE) -> int:
    """Return the number of lines of some files that a function executes."""
    lines, tracing = Lines(lambda line: False, signal.SIGALRM, files), sys.gettrace()
    try:
        sys.settrace(lines.trace)
        function()
    finally:
        sys.settrace(tracing)
    return lines.count
