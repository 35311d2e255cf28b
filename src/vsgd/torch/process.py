"""Effects on the whole process. They begin with the first `VSGD` that needs them and end with the last `VSGD`.

| effect | reason |
|---|---|
| a forward pre-hook of all modules | it saves buffers before a closure changes them, and asks other processes for errors before a forward pass waits for them; a hook for each step would make torch compile models again |
| a filter for one warning of torch | torch warns that hooks of all modules also run for the parts of a compiled module, which is what the hook is for |
| `OPTIMIZERS`, weak references to all `VSGD` | networks that train against each other see each other's iterates |
| signal handlers, during a step and while state or parameters are exchanged | each of these happens as a whole or not at all; see `vsgd.torch.interrupts` |

Nothing is installed by an import.
"""  # noqa: E501

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, finalize

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

if TYPE_CHECKING:
    from vsgd.torch.optimizer import VSGD

OPTIMIZERS: WeakSet[VSGD] = WeakSet()
"""All that exist."""

BeforeForward = Callable[[nn.Module, Any], None]

_before_forward: dict[BeforeForward, None] = {}
_undo: list[Callable[[], None]] = []


def register(optimizer: VSGD) -> None:
    """Add an optimizer to `OPTIMIZERS`. When the last one is gone, all effects are undone."""
    if optimizer not in OPTIMIZERS:
        OPTIMIZERS.add(optimizer)
        finalize(optimizer, undo_after_last).atexit = False


def undo_after_last() -> None:
    if not list(OPTIMIZERS):  # its length may include references that are about to be removed
        _before_forward.clear()
        while _undo:
            _undo.pop()()


def call_before_forward(function: BeforeForward) -> None:
    """Have a function called with every module and its arguments, before each forward pass."""
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
