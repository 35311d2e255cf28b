"""One block, parameters that are updated together: the `Block` protocol, and what a step does to a block.

A block checks the numbers of a minibatch. It learns in the coordinates of the eigenbasis, and moves the parameters in
their own coordinates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vsgd.algorithms.networks import Averaging, Progress, momentum_obstacle
from vsgd.algorithms.strategy import Config, Rates, Strategy, Totals, gradient_limit, strategy_of
from vsgd.eigenbasis import Basis
from vsgd.torch.coordinates import BatchMoments, Checks, Coordinates, Engine, Inputs, lengths_of
from vsgd.torch.distributed.shards import summed
from vsgd.torch.loops import identity
from vsgd.torch.moments import Sampling

Group = dict[str, Any]
"""A parameter group of the optimizer."""

Rotation = Callable[[Tensor], Tensor]


class Report(NamedTuple):
    """The results of a step for one block."""

    products: Any
    """∇·(θ − θ̄) before the step."""
    penalty: Any
    """½ (θ−θ̄)ᵀ|H|(θ−θ̄) before the step; None if it was not measured."""
    outliers: Any
    """Number of outliers of each segment; in the report of a block, a dictionary by the `id` of each parameter."""


class Rule(NamedTuple):
    """How a block learns: its engine, and its algorithm with the constants of that."""

    engine: Engine
    strategy: Strategy
    config: Config


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


# --- settings of the group --------------------------------------------------------------------------------------------


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


# --- the update -------------------------------------------------------------------------------------------------------


def check(coordinates: Coordinates, batch: BatchMoments, rule: Rule) -> Checks:
    """Return the checks of a minibatch."""
    engine, _, config = rule
    limit = largest_square(coordinates.theta.dtype)
    usable, longest, long = engine.check(batch.grad, batch.counts, limit, coordinates, config)
    if batch.probed_grad is not None:
        usable = usable & (engine.squared_norms(batch.probed_grad, coordinates).max() < limit)
    for part in (batch.grad_sq, batch.diff_sq):
        if part is not None and part.numel():
            least, most = map(engine.numbers, part.aminmax())
            usable = usable & (-limit < least) & (most < limit)
    if coordinates.shards is not None:
        unusable = torch.as_tensor(usable == 0, dtype=coordinates.totals.dtype, device=coordinates.totals.device)
        usable = coordinates.shards.add_up(unusable) == 0
    return Checks(usable, longest, long)


@functools.cache
def largest_square(dtype: torch.dtype) -> float:
    """Return the size beyond which squares of gradients are not usable in this precision."""
    return gradient_limit(torch.finfo(dtype).max)


def is_starting(coordinates: Coordinates, batch: BatchMoments, config: Config) -> bool:
    """Return whether a segment with a gradient has averages that are just being started."""
    seen: Any = coordinates.seen
    counts: Any = batch.counts
    if seen.is_cpu:  # NumPy takes less time for a few numbers
        seen, counts = seen.numpy(), counts.numpy()
    return bool(((seen < config.bootstrap) & (counts > 0)).any())


def learn_and_move(
    coordinates: Coordinates, inputs: Inputs, rule: Rule, rotation: tuple[Rotation, Rotation] | None
) -> Report:
    """Learn from a minibatch in coordinates, and move in the parameters' own.

    Args:
        coordinates: of the block; they change in place.
        inputs: of the update.
        rule: of the block.
        rotation: from the parameters' own coordinates to those of the block, and back; None if these are the same.
    """
    engine, _, config = rule
    batch, delta = inputs.batch, inputs.delta
    if delta is not None:
        size = (engine.squared_norms(delta, coordinates) / engine.numbers(lengths_of(coordinates))) ** 0.5
        engine.numbers(coordinates.totals)[:, Totals._fields.index("probe_size")] = size
    at_once = engine.moves_at_once(coordinates) and rotation is None and not inputs.decays
    at_once = at_once and bool(batch.counts.all())
    learned = engine.learn(coordinates, inputs, config, at_once)
    coordinates.seen.add_(batch.counts)
    if learned.steps is None:
        return Report(learned.products.sum(), None if delta is None else learned.penalty.sum(), learned.outliers)
    into, back = (identity, identity) if rotation is None else rotation
    penalty = None if delta is None else curvature_penalty(coordinates, into)
    products = engine.move(coordinates, inputs, back(learned.steps), learned.decay, config)
    return Report(products.sum(), penalty, learned.outliers)


def curvature_penalty(coordinates: Coordinates, into: Rotation) -> Any:
    """Return ½ (θ−θ̄)ᵀ |H| (θ−θ̄), in coordinates in which H is nearly diagonal; 0 if nothing is averaged."""
    if coordinates.average is None:
        return 0.0
    offset = torch.sub(coordinates.theta, coordinates.average, out=coordinates.memory_for("back"))
    rotated = into(offset)
    terms = rotated.mul_(rotated).mul_(coordinates.curv).abs_()
    return summed(terms.sum().to(coordinates.totals.dtype) / 2, coordinates.shards)
