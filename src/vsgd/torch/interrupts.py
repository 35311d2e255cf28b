"""Delay signals while a step changes parameters and state.

Python runs signal handlers in the main thread, between any two instructions. A handler that raises, as that of Ctrl-C
does, could therefore end a step halfway. `DeferredSignals` replaces the handlers of the whole process while its block
runs: all that are Python functions, whatever the signal. A signal that arrives while user code runs, such as a closure,
is passed on to the user's handler at once. Any other signal is delivered when the block has ended. Off the main thread,
where Python runs no handlers, nothing is replaced.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ClassVar, TypeVar

Handler = Callable[[int, FrameType | None], Any]
T = TypeVar("T")

PACKAGE = __name__.rpartition(".")[0]
CATCHABLE = sorted(
    int(number)
    for number in signal.valid_signals()
    if number not in (getattr(signal, "SIGKILL", None), getattr(signal, "SIGSTOP", None))
)

# the functions of the `signal` module convert numbers to enums, which would take longer than all the rest
_get_handler: Callable[[int], Any] = inspect.unwrap(signal.getsignal)
_set_handler: Callable[[int, Any], Any] = inspect.unwrap(signal.signal)

_INTERRUPTIBLE: set[CodeType] = set()
"""Functions of `vsgd.torch` that a handler may interrupt."""


def interruptible(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function of `vsgd.torch` that calls user code, and that a handler may therefore interrupt."""
    _INTERRUPTIBLE.add(function.__code__)
    return function


@interruptible
def call_user(function: Callable[[], T]) -> T:
    """Call a function of the user: signals reach the user's handlers meanwhile."""
    try:
        return function()
    finally:
        adopt_handlers()


def adopt_handlers() -> None:
    """Respect handlers that a closure has installed: signals are deferred for these, and they stay afterwards."""
    if DeferredSignals.active is not None and is_main_thread():
        DeferredSignals.active.replace_handlers()


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def is_user_code(frame: FrameType | None) -> bool:
    """Return whether a handler may interrupt this frame: no function of `vsgd.torch` runs, or the last may be."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(PACKAGE):
            return frame.f_code in _INTERRUPTIBLE
        frame = frame.f_back
    return True


def is_being_handled(error: BaseException | None) -> bool:
    """Return whether `except` and `finally` clauses that this exception has led to are running."""
    current = sys.exc_info()[1]
    while current is not None and current is not error:
        current = current.__context__
    return current is not None


class DeferredSignals:
    """Context manager that delays signals until its block has ended, except while user code runs within.

    The user's handlers are back in place before the delayed signals are delivered. Several signals of one kind are
    delivered as one. If a handler raises while user code runs, all later signals wait until the exception is handled.
    Blocks may be nested: the outermost replaces the handlers, the inner ones deliver what arrived within them if user
    code follows.
    """

    active: ClassVar[DeferredSignals | None] = None
    """The outermost block of the main thread."""

    def __init__(self) -> None:
        self._receiver: Handler = self._receive  # one object, to be recognized
        self._handlers: dict[int, Handler] = {}
        """The user's handlers."""
        self._pending: dict[int, FrameType | None] = {}
        self._raised: BaseException | None = None
        """The last exception that a handler raised in user code."""
        self._is_ending = False

    def __enter__(self) -> None:
        outermost = DeferredSignals.active
        if (outermost is not None and not outermost._is_ending) or not is_main_thread():
            return
        try:  # until all handlers are replaced, the others may raise: the second clause survives one more of these
            try:
                self.replace_handlers()
            except BaseException:
                self._restore_handlers()
                raise
            DeferredSignals.active = self
        except BaseException:
            self._restore_handlers()
            raise

    def __exit__(self, *_: object) -> None:
        outermost = DeferredSignals.active
        if outermost is None or not is_main_thread():
            return
        if outermost is not self:
            frame = inspect.currentframe()
            for _level in range(2):  # to the function that contains the block, and to its caller
                frame = frame and frame.f_back
            if outermost._pending and is_user_code(frame) and not is_being_handled(outermost._raised):
                outermost._deliver()
            return
        self._is_ending = True
        handlers = dict(self._handlers)
        try:  # handlers that are back in place may raise before the others are: each clause survives one of these
            try:
                self._restore_handlers()
            finally:
                self._restore_handlers()
        finally:
            DeferredSignals.active = self._raised = None
            self._restore_handlers()
            self._handlers = handlers  # for whoever has kept the receiver
            self._deliver_all()

    def replace_handlers(self) -> None:
        """Receive all signals that have a handler in Python."""
        for number in CATCHABLE:
            handler = _get_handler(number)
            if handler is self._receiver:
                continue
            self._handlers.pop(number, None)
            if callable(handler):
                self._handlers[number] = users_handler(number, handler)
                _set_handler(number, self._receiver)

    def _restore_handlers(self) -> None:
        """Put the user's handlers back, but not over those that the user has installed meanwhile."""
        while self._handlers:
            number, handler = next(iter(self._handlers.items()))
            if _get_handler(number) is self._receiver:
                _set_handler(number, handler)
            self._handlers.pop(number, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if DeferredSignals.active is not self:  # the block has not begun, or has ended
            self._handle(number, frame)
            return
        self._pending[number] = frame
        if is_user_code(frame) and not is_being_handled(self._raised):
            self._deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Do what the user wants to happen on this signal."""
        if number in self._handlers:
            self._handlers[number](number, frame)
        elif _get_handler(number) is not self._receiver:
            signal.raise_signal(number)

    def _deliver(self) -> None:
        """Call the handlers of the signals received so far, and of those that arrive meanwhile."""
        while self._pending:
            number = next(iter(self._pending))
            frame = self._pending.pop(number)
            try:
                self._handle(number, frame)
            except BaseException as error:
                self._raised = error
                raise

    def _deliver_all(self) -> None:
        """The same, but a handler that raises does not keep the others from being called."""
        try:
            self._deliver()
        finally:
            self._raised = None
            if self._pending:
                self._deliver_all()


def users_handler(number: int, handler: Any) -> Handler:
    """Return the handler behind one that an earlier block has left in place."""
    while isinstance(owner := getattr(handler, "__self__", None), DeferredSignals) and number in owner._handlers:
        handler = owner._handlers[number]
    found: Handler = handler
    return found
