"""The `Block` protocol: parameters that are updated together, and what a step does to them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from vsgd.algorithms.networks import Averaging, Progress, momentum_obstacle
from vsgd.algorithms.strategy import Rates, strategy_of
from vsgd.eigenbasis import Basis
from vsgd.torch.coordinates import BatchMoments, Checks, Coordinates
from vsgd.torch.moments import Sampling
from vsgd.torch.update import Report, Rule

Group = dict[str, Any]
"""A parameter group of the optimizer."""


class Update(NamedTuple):
    """What a step will do to one block."""

    block: Block
    coordinates: Coordinates
    batch: BatchMoments
    delta: Tensor | None = None
    """Offset at which the second gradient is taken."""
    rows: Tensor | None = None
    """Touched rows of a table; None for dense tensors."""


class Block(Protocol):
    """Parameters that are updated together.

    A step calls `collect` and `check`, `probe` if a second gradient is due, `complete` and `apply`. Only
    `apply` changes the state. Parameters hold the iterates between `open` and `close`.
    """

    parameters: list[Tensor]
    group: Group
    rule: Rule
    is_table: bool
    """Whether the block is a table, of which a step touches some rows."""

    @property
    def coordinates(self) -> Coordinates | None:
        """Return all coordinates; None for a table, whose touched rows are copied in each step."""

    def buffer_bytes(self) -> int:
        """Return the bytes that are kept between steps besides the state."""

    def bases(self) -> dict[Tensor, Basis]:
        """Return the bases of those parameters that have one."""

    def adopt_changes(self) -> Any:
        """Adopt weights that the user has set since the last step.

        Return whether any were set, as a bool or as a tensor on a device. Several processes then compare their weights.
        """

    def open(self) -> None:
        """Let the parameters hold the iterates."""

    def close(self) -> None:
        """Let the parameters hold the weights to evaluate."""

    def collect(self, sampling: Sampling) -> Update | None:
        """Return the update from first gradients; None if there are none."""

    def complete(self, update: Update, sampling: Sampling) -> Update:
        """Return the update with what the sampling knows after the second gradients."""

    def check(self, update: Update) -> Checks:
        """Return whether the numbers of the minibatch are usable, and how long the gradient is."""

    def is_starting(self, update: Update) -> bool:
        """Return whether averages are just being started, so that a second gradient is due."""

    def probe(self, update: Update, indices: dict[Tensor, int]) -> Update:
        """Let the parameters hold θ + δ. `indices` number the parameters, on which random signs depend."""

    def apply(self, update: Update) -> Report:
        """Learn from the minibatch and move the iterates and their average."""


def rates_of(group: Group) -> Rates:
    """Return the settings of a group that scale its learning rates."""
    averaging, progress = Averaging(*group["averaging"][:2]), Progress(*group["progress"])
    return Rates(
        lr=float(group["lr"]),
        horizon=float(progress.horizon),
        weight_decay=float(group["weight_decay"]),
        momentum_obstacle=float(momentum_obstacle(averaging, progress)),
    )


def estimates_decay(group: Group) -> bool:
    """Return whether weights decay by the estimate now: the steps per epoch are known, and no strength is set."""
    if group["steps_per_epoch"] is None or float(group["weight_decay"]) > 0:
        return False
    return strategy_of(group["algorithm"]).decay_has_begun(group["steps"], group["steps_per_epoch"], group["algorithm"])
