"""Manage effects on the whole process, which end with the last `VSGD`, and find other `VSGD` optimizers.

| effect | reason |
|---|---|
| a forward pre-hook of all modules | it saves buffers before a closure changes them, and exchanges errors with other processes before a forward pass waits for them; a hook for each step would make torch compile models again |
| a filter for one warning of torch | torch warns that hooks of all modules also run for the parts of a compiled module, which is intended here |
| `OPTIMIZERS`, weak references to all `VSGD` | networks that train against each other see each other's iterates |
| signal handlers, during a step and while state or parameters are exchanged | each of these happens as a whole or not at all; see `vsgd.torch.interrupts` |

Nothing is installed by an import.

Networks that train against each other (GANs, actor and critic) must see each other's iterates, not averaged weights.
While the closure of an optimizer runs, the parameters of its companions therefore hold their iterates. A companion is an
optimizer whose parameters the closure uses, and whose steps alternate with the steps of this one. A network whose
training has ended, such as the teacher in distillation, is not a companion: its averaged weights are used.
"""  # noqa: E501

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ContextDecorator, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from vsgd.torch.interrupts import DeferredSignals

if TYPE_CHECKING:
    from vsgd.torch.optimizer import VSGD
    from vsgd.torch.replay import Saving

OPTIMIZERS: WeakSet[VSGD] = WeakSet()
"""All `VSGD` optimizers of the process."""

BeforeForward = Callable[[nn.Module, Any], None]

_before_forward: dict[BeforeForward, None] = {}
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
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        _undo.extend(partial(remove_filter, added) for added in warnings.filters if added not in before)


def _call_all(module: nn.Module, args: Any) -> None:
    for function in list(_before_forward):  # garbage collection within may remove the last optimizer
        function(module, args)


def remove_filter(added: Any) -> None:
    with suppress(ValueError):  # the user may have reset the filters
        warnings.filters.remove(added)  # type: ignore[attr-defined]


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


def is_last_to_step(own: VSGD) -> bool:
    """Return whether this optimizer has taken a step and no other has taken one since."""
    return own.turns.last > 0 and all(other.turns.last <= own.turns.last for other in list(OPTIMIZERS))


def check_unshared(own: VSGD) -> None:
    """Raise RuntimeError if another optimizer has changed parameters of this one since its last step."""
    for other in list(OPTIMIZERS):
        if other.turns.last > own.turns.last > 0 and not own.parameter_set().isdisjoint(other.parameter_set()):
            raise RuntimeError(SHARED_PARAMETERS)


def trained_in_turn(own: VSGD) -> list[VSGD]:
    """Return the optimizers that have taken a step since the first step of this one."""
    return [other for other in list(OPTIMIZERS) if other is not own and other.turns.last > own.turns.first > 0]


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
