"""Other `VSGD` optimizers in this process: those whose networks a closure uses, and those with the same parameters.

Networks that train against each other (GANs, actor and critic) must see each other's iterates, not averaged weights.
An optimizer therefore lets the parameters of its companions hold their iterates while its own closure runs. A companion
is an optimizer whose parameters the closure uses and that trains in turn with this one. A network whose training has
ended, such as the teacher in distillation, is not a companion: its averaged weights are used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from vsgd.torch.process import OPTIMIZERS

if TYPE_CHECKING:
    from vsgd.torch.optimizer import VSGD
    from vsgd.torch.replay import Saving

SHARED_PARAMETERS = (
    "another VSGD has changed parameters of this one since its last step. Two optimizers cannot train the same "
    "parameters in turn: use one VSGD with the sum of the losses, or with parameter groups. If the other one has "
    "finished, make a new VSGD."
)

_clock = itertools.count(1)


class Turns(NamedTuple):
    """When an optimizer has taken its first and its last step, on a clock that counts the steps of all; 0: never."""

    first: int = 0
    last: int = 0


def next_turn(turns: Turns) -> Turns:
    """Return the turns of an optimizer that has just taken a step."""
    now = next(_clock)
    return Turns(turns.first or now, now)


def is_last_to_step(own: VSGD) -> bool:
    """Return whether this optimizer has taken a step and no other has taken one since."""
    return own.turns.last > 0 and all(other.turns.last <= own.turns.last for other in list(OPTIMIZERS))


def check_unshared(own: VSGD) -> None:
    """Raise if another optimizer has stepped on parameters of this one since its last step."""
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
