"""Manage effects on the whole process, which end with the last `VSGD`, and find other `VSGD` optimizers.

| effect | reason |
|---|---|
| a forward pre-hook of all modules | it saves buffers before a closure changes them, and exchanges errors with other processes before a forward pass waits for them; a hook for each step would make torch compile models again |
| registration hooks of all modules | they count when modules, buffers or parameters are added to any module, because the parts of a model are listed again only then |
| a filter for one warning of torch | torch warns that hooks of all modules also run for the parts of a compiled module, which is intended here |
| `OPTIMIZERS`, weak references to all `VSGD` | networks that train against each other see each other's iterates |
| signal handlers, during a step and while state or parameters are exchanged | each of these happens as a whole or not at all |

Nothing is installed by an import.

Python runs signal handlers in the main thread, between any two instructions. A handler that raises, as that of Ctrl-C
does, could therefore end a step halfway. `DeferredSignals` replaces the handlers of the whole process during its block:
all handlers that are Python functions, for any signal. A signal that arrives while user code runs, such as a closure,
is passed to the user's handler at once. Any other signal is delivered at the end of the block. Nothing is replaced in
other threads, where Python runs no handlers.

Networks that train against each other (GANs, actor and critic) must see each other's iterates, not averaged weights.
While the closure of an optimizer runs, the parameters of its companions therefore hold their iterates. A companion is an
optimizer whose parameters the closure uses, and whose steps alternate with the steps of this one. A network whose
training has ended, such as the teacher in distillation, is not a companion: its averaged weights are used.
"""  # noqa: E501

from __future__ import annotations

import inspect
import itertools
import operator
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ContextDecorator, suppress
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

if TYPE_CHECKING:
    from vsgd.torch.optimizer import VSGD
    from vsgd.torch.replay import Saving

OPTIMIZERS: WeakSet[VSGD] = WeakSet()
"""All `VSGD` optimizers of the process."""

BeforeForward = Callable[[nn.Module, Any], None]
Handler = Callable[[int, FrameType | None], Any]
T = TypeVar("T")

_before_forward: dict[BeforeForward, None] = {}
_registrations = 0
_undo: list[Callable[[], None]] = []


def register(optimizer: VSGD) -> None:
    """Add an optimizer to `OPTIMIZERS`. All effects are undone when the last one is deleted."""
    if optimizer not in OPTIMIZERS:
        OPTIMIZERS.add(optimizer)
        finalize(optimizer, undo_after_last).atexit = False


def undo_after_last() -> None:
    if not list(OPTIMIZERS):  # its length may include references that are about to be removed
        _before_forward.clear()
        while _undo:
            _undo.pop()()


def call_before_forward(function: BeforeForward) -> None:
    """Call a function with every module and its arguments before each forward pass, from now on."""
    _before_forward[function] = None
    if not _undo:
        _undo.append(register_module_forward_pre_hook(_call_all).remove)
        _undo.append(register_module_module_registration_hook(_count_registration).remove)
        _undo.append(register_module_buffer_registration_hook(_count_registration).remove)
        _undo.append(register_module_parameter_registration_hook(_count_registration).remove)
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        _undo.extend(partial(remove_filter, added) for added in warnings.filters if added not in before)


def _call_all(module: nn.Module, args: Any) -> None:
    for function in list(_before_forward):  # garbage collection within may remove the last optimizer
        function(module, args)


def _count_registration(module: nn.Module, name: str, value: Any) -> None:
    global _registrations
    _registrations += 1


def registrations() -> int:
    """Return how often parts, buffers or parameters were added to modules since `call_before_forward` was called."""
    return _registrations


def remove_filter(added: Any) -> None:
    with suppress(ValueError):  # the user may have reset the filters
        warnings.filters.remove(added)  # type: ignore[attr-defined]


# --- signals ---------------------------------------------------------------------------------------------------------

PACKAGE = __name__.rpartition(".")[0]
CATCHABLE = sorted(
    int(number)
    for number in signal.valid_signals()
    if number not in (getattr(signal, "SIGKILL", None), getattr(signal, "SIGSTOP", None))
)

# The functions of the `signal` module convert numbers to enums, which would take most of the time of a block. The
# functions that they wrap are in the module that its only built-in function belongs to.
_functions: Any = getattr(signal.default_int_handler, "__self__", signal)
_get_handler: Callable[[int], Any] = _functions.getsignal
_set_handler: Callable[[int, Any], Any] = _functions.signal

_INTERRUPTIBLE: set[CodeType] = set()
"""Functions of `vsgd.torch` that a handler may interrupt."""


def interruptible(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function of `vsgd.torch` that calls user code, and that a handler may therefore interrupt."""
    _INTERRUPTIBLE.add(function.__code__)
    return function


@interruptible
def call_user(function: Callable[[], T]) -> T:
    """Call a function of the user. Signals reach the user's handlers meanwhile."""
    try:
        return function()
    finally:
        adopt_handlers()


def adopt_handlers() -> None:
    """Defer signals for handlers that a closure has installed, too. These remain after the block."""
    block = DeferredSignals.innermost
    while block is not None and not block.is_open:
        block = block.outer
    if block is not None and is_main_thread():
        block.replace_handlers()


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def is_user_code(frame: FrameType | None) -> bool:
    """Return whether a handler may interrupt this frame.

    That is so if no function of `vsgd.torch` is on the stack, or if the innermost one is interruptible.
    """
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(PACKAGE):
            return frame.f_code in _INTERRUPTIBLE
        frame = frame.f_back
    return True


def is_being_handled(error: BaseException | None) -> bool:
    """Return whether an `except` or `finally` clause of this exception is running."""
    current = sys.exc_info()[1]
    while current is not None and current is not error:
        current = current.__context__
    return current is not None


class DeferredSignals:
    """Context manager that delays signals until the end of its block, except while user code runs within.

    The user's handlers are restored before the delayed signals are delivered. Several signals of one kind are
    delivered as one. If a handler raises while user code runs, later signals wait until the exception is handled.
    """

    innermost: ClassVar[DeferredSignals | None] = None
    """The innermost block of the main thread."""

    def __init__(self) -> None:
        self.is_open = False
        self.outer: DeferredSignals | None = None
        self._receiver: Handler = self._receive  # one object, to be recognized
        self._handlers: dict[int, Handler] = {}
        """The handlers before the block: those of the user, or of an outer block."""
        self._found: list[Any] = []
        """What was installed for each of `CATCHABLE` after the last replacement."""
        self._pending: list[int] = []
        self._raised: BaseException | None = None
        """The last exception that a handler raised in user code."""

    def __enter__(self) -> None:
        if not is_main_thread():
            return
        try:  # a handler that is not yet replaced may raise, and another one while handlers are restored
            try:
                self.replace_handlers()
                DeferredSignals.innermost, self.outer = self, DeferredSignals.innermost
                self.is_open = True
            except BaseException:
                self._restore(dict(self._handlers))
                raise
        except BaseException:
            self._restore(dict(self._handlers))
            raise

    def __exit__(self, *_: object) -> None:
        if not self.is_open or not is_main_thread():
            return
        replaced, frame = dict(self._handlers), inspect.currentframe()
        caller = frame and frame.f_back and frame.f_back.f_back  # of the function that contains the block
        del frame  # a frame that refers to itself would keep the caller's variables alive
        try:
            try:
                self.is_open = False  # from now on handlers may raise: each clause survives one that does
                self._restore(replaced)
            finally:
                self._restore(replaced)
        finally:
            self._restore(replaced)
            DeferredSignals.innermost = self.outer
            self._deliver_all(caller)

    def replace_handlers(self) -> None:
        """Replace all handlers that are Python functions by that of this block."""
        found = list(map(_get_handler, CATCHABLE))
        if self._found and all(map(operator.is_, found, self._found)):  # the closure has installed nothing
            return
        handlers = {number: handler for number, handler in zip(CATCHABLE, found, strict=True) if callable(handler)}
        for number in self._handlers.keys() - handlers.keys():
            del self._handlers[number]
        for number, handler in handlers.items():
            if handler is not self._receiver:
                self._handlers[number] = users_handler(number, handler)
                _set_handler(number, self._receiver)
        self._found = list(map(_get_handler, CATCHABLE))

    def _restore(self, handlers: dict[int, Handler]) -> None:
        """Restore handlers and remove them from the dictionary. Handlers that the user has installed since remain."""
        for number, handler in list(handlers.items()):
            if _get_handler(number) is self._receiver:
                _set_handler(number, users_handler(number, handler))
            handlers.pop(number, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.is_open:
            self._handle(number, frame)
            return
        if number not in self._pending:
            self._pending.append(number)
        if is_user_code(frame) and not is_being_handled(self._raised):
            self._deliver(frame)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Call the user's handler of a signal, or raise the signal again if there is none in Python."""
        if number in self._handlers:
            self._handlers[number](number, frame)
        elif _get_handler(number) is not self._receiver:
            signal.raise_signal(number)

    def _deliver(self, frame: FrameType | None) -> None:
        """Call the handlers of the signals received so far, and of those that arrive meanwhile."""
        while self._pending:
            try:
                self._handle(self._pending.pop(0), frame)
            except BaseException as error:
                self._raised = error
                raise

    def _deliver_all(self, frame: FrameType | None) -> None:
        """Call the handlers of all received signals, even if one raises."""
        try:
            self._deliver(frame)
        finally:
            self._raised = None
            if self._pending:
                self._deliver_all(frame)


def users_handler(number: int, handler: Any) -> Handler:
    """Return the user's handler. That of a `DeferredSignals` block that has ended stands for the one it replaced."""
    while isinstance(owner := getattr(handler, "__self__", None), DeferredSignals) and not owner.is_open:
        handler = owner._handlers.get(number, signal.SIG_DFL)
    found: Handler = handler
    return found


# --- other optimizers -------------------------------------------------------------------------------------------------

SHARED_PARAMETERS = (
    "another VSGD has changed parameters of this one since its last step. Two optimizers cannot train the same "
    "parameters in turn: use one VSGD with the sum of the losses, or with parameter groups. If the other one has "
    "finished, make a new VSGD."
)

_clock = itertools.count(1)


class Turns(NamedTuple):
    """Times of the first and the last step of an optimizer, in steps of all optimizers; 0 before the first step."""

    first: int = 0
    last: int = 0


def next_turn(turns: Turns) -> Turns:
    """Return the updated times after a step."""
    now = next(_clock)
    return Turns(turns.first or now, now)


def trained_in_turn(own: VSGD) -> list[VSGD]:
    """Return the optimizers that have taken a step since the first step of this one."""
    return [other for other in list(OPTIMIZERS) if other is not own and other.turns.last > own.turns.first > 0]


def is_last_to_step(own: VSGD, others: Iterable[VSGD]) -> bool:
    """Return whether this optimizer has taken a step, and none of those `trained_in_turn` has taken one since."""
    return own.turns.last > 0 and all(other.turns.last <= own.turns.last for other in others)


def check_unshared(own: VSGD, others: Iterable[VSGD]) -> None:
    """Raise RuntimeError if one of those `trained_in_turn` has changed parameters of `own` since its last step."""
    for other in others:
        if other.turns.last > own.turns.last and not own.parameter_set().isdisjoint(other.parameter_set()):
            raise RuntimeError(SHARED_PARAMETERS)


def used_by(savings: Iterable[Saving], candidates: Sequence[VSGD]) -> list[VSGD]:
    """Return the candidates of which a closure has called a module or changed a gradient."""
    if not candidates:
        return []
    used: set[Tensor] = set()
    for saving in savings:
        used.update(p for module in saving.modules.values() for p in module.parameters(recurse=False))
        used.update(each.parameter for each in saving.gradients if each.has_changed())
    return [other for other in candidates if not used.isdisjoint(other.parameter_set())]


class Iterates(AbstractContextManager[None], ContextDecorator):
    """Context in which parameters hold the iterates. Signals may interrupt its block, but not its start or end."""

    def __init__(self, optimizer: VSGD):
        self._optimizer = optimizer
        self._entered: list[tuple[DeferredSignals, bool]] = []
        """For each open block: its signals, and whether the parameters held the averaged weights before."""

    def __enter__(self) -> None:
        signals, opt = DeferredSignals(), self._optimizer
        signals.__enter__()
        held_average = not opt._blocks.are_open
        self._entered.append((signals, held_average))
        if held_average:
            try:
                with torch.no_grad():
                    opt._update_blocks()
                    opt._open()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        signals, held_average = self._entered.pop()
        try:
            if held_average:
                with torch.no_grad():
                    self._optimizer._blocks.close()
        finally:
            signals.__exit__()
