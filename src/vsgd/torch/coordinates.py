"""What an engine works on: coordinates with their statistics, and the moments of a minibatch, as flat tensors.

Coordinates are cut into segments. All coordinates of a segment have the same count of samples: a segment is a dense
tensor, or a touched row of an embedding table.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vsgd.algorithms.networks import TensorContext
from vsgd.algorithms.strategy import Config, Strategy, Totals
from vsgd.core import Moments, State
from vsgd.torch.distributed import Shards


class Workspace:
    """What a step uses again in the next one: memory for intermediate results, and what the engine has prepared."""

    def __init__(self) -> None:
        self.plan: Any = None
        """What the engine has computed from coordinates that does not change from step to step."""
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Return memory for numbers as in `like`. It is the same in all calls with this name."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty_like(like)
        return self._buffers[name]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether this is one of the buffers."""
        return any(tensor is each for each in self._buffers.values())

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Coordinates(NamedTuple):
    """Iterates and statistics of the coordinates that are updated together, the segments one after the other."""

    theta: Tensor
    """The iterates."""
    average: Tensor | None
    """Their average, if there is one."""
    grad: Tensor
    grad_sq: Tensor
    curv: Tensor
    curv_sq: Tensor
    memory: Tensor
    seen: Tensor
    """Samples so far, per segment. On the CPU for dense tensors."""
    totals: Tensor
    """The columns are those of `Totals`, per segment."""
    lengths: tuple[int, ...]
    """Coordinates of each segment in this process."""
    decoupled: bool
    """Whether the covariance of the gradient is nearly diagonal in these coordinates."""
    shards: Shards | None = None
    """How segments continue in other processes, if they do."""
    workspace: Workspace | None = None
    """Memory for the steps to come; None if these coordinates are those of one step."""

    @property
    def whole_lengths(self) -> tuple[int, ...]:
        """Coordinates of each segment, those in other processes included."""
        return self.lengths if self.shards is None else self.shards.lengths

    @property
    def statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The four moments and the memory."""
        return self.grad, self.grad_sq, self.curv, self.curv_sq, self.memory

    def state(self, seen: Tensor) -> State:
        """Return the statistics in the precision of the iterates."""
        *mean, memory = (part.to(self.theta.dtype) for part in self.statistics)
        return State(mean=Moments(*mean), memory=memory, seen=seen)

    def total_columns(self) -> Totals:
        return Totals(*self.totals.unbind(1))


class BatchMoments(NamedTuple):
    """Moments of one minibatch; means are over its samples."""

    grad: Tensor
    """Mean gradient in the coordinates of the block, as all that follows but `plain_grad`."""
    plain_grad: Tensor
    """Mean gradient in the parameters' own coordinates."""
    counts: Tensor
    """Samples per segment; 0 where there is no gradient."""
    probed_grad: Tensor | None = None
    """Gradient at θ + δ, if the minibatch is one sample and there was a second gradient."""
    grad_sq: Tensor | None = None
    """Mean square, if there are several samples."""
    diff: Tensor | None = None
    """Mean ∇_{θ+δ} − ∇_θ in decoupled coordinates, elsewhere mean |∇_{θ+δ} − ∇_θ|; several samples and a probe."""
    diff_sq: Tensor | None = None
    direction: Tensor | None = None
    """Direction of the step, if it is not the mean gradient."""
    samples: Any = None
    """First gradients of the single samples, where their differences to second ones may be needed."""


class Rates(NamedTuple):
    """Settings of a group that scale its learning rates."""

    lr: float
    """Factor on all rates."""
    horizon: float
    """Number of steps that rates are optimal for."""
    weight_decay: float = 0.0
    """λ of AdamW; 0 leaves weight decay to the estimate."""
    advantage: float = 0.0
    """`Averaging.advantage`: how much better the average of the iterates is than the newest."""


class Motion(NamedTuple):
    """Numbers per segment for moving iterates and their average."""

    decay: Any
    """d in θ ← (θ − step) / (1 + d)."""
    weight: Any
    """Weight with which new iterates enter the average."""
    momentum: Any
    """Factor on θ − θ̄, which is added to the iterates."""


class LearnInputs(NamedTuple):
    """What the coordinates of a block learn from in one step."""

    batch: BatchMoments
    delta: Tensor | None
    """Offset of the probe, if there was one."""
    context: TensorContext
    """Quantities that the coordinates of a segment share, per segment."""
    lr: float
    writes_curvature: bool
    """Whether the averages of the curvature change."""
    motion: Motion | None = None
    """How iterates move, if steps are taken at once."""


class Engine(Protocol):
    """Arithmetic on flat tensors. One implementation for CPU tensors, one for those of any other device.

    Numbers per segment are `Any`: arrays of the library with which the engine computes them fastest.
    """

    def numbers(self, values: Tensor) -> Any:
        """Return numbers per segment in the engine's own array type, in the same memory."""

    def squared_norms(self, values: Tensor, coordinates: Coordinates) -> Any:
        """Return Σ values² per segment, over all processes."""

    def probe(
        self, coordinates: Coordinates, batch: BatchMoments, seeds: list[int] | None, strategy: Strategy, config: Config
    ) -> Tensor:
        """Return the offset δ of every coordinate. Without `seeds` signs are opposite to those of the gradient."""

    def learn(
        self, coordinates: Coordinates, inputs: LearnInputs, strategy: Strategy, config: Config
    ) -> tuple[Tensor | None, Any]:
        """Update the statistics. Return the step of every coordinate, and sums per segment: see `SUMS`.

        If the inputs have a `motion`, steps are taken, too, and None is returned in their place; see `moves_at_once`.
        """

    def move(self, coordinates: Coordinates, grad: Tensor, steps: Tensor, motion: Motion) -> Any:
        """Let θ ← (θ − step + momentum (θ − θ̄)) / (1 + decay), and the average follow.

        Return ∇·(θ − θ̄) per segment, as it was before. All are in the parameters' own coordinates.
        """

    def moves_at_once(self, coordinates: Coordinates) -> bool:
        """Return whether `learn` can move coordinates that are not rotated."""

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy tensors of equal shapes."""

    def adopt(self, held: list[Tensor], weights: list[Tensor], iterates: list[Tensor], coordinates: Coordinates) -> Any:
        """Set the weights and iterates of those parameters that hold other weights.

        Args:
            held: the parameters.
            weights: what they held after the last step; views of the coordinates, as are the iterates.
            iterates: in the order of the parameters.
            coordinates: of the block.

        Returns:
            Whether there are any: a bool, or a tensor on the device.
        """


def lengths_on(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the lengths of segments as a tensor. Those of rows are not cached, since their number always differs."""
    if are_equal(lengths):
        return torch.full((len(lengths),), lengths[0], dtype=dtype, device=device)
    return cached_lengths(lengths, device, dtype)


@functools.lru_cache(256)
def cached_lengths(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(lengths, dtype=dtype, device=device)


def are_equal(lengths: tuple[int, ...]) -> bool:
    """Return whether several segments have the same length, as the touched rows of a table have."""
    return len(lengths) > 1 and lengths.count(lengths[0]) == len(lengths)


def spread(values: Tensor, coordinates: Coordinates) -> Tensor:
    """Return numbers per segment as numbers per coordinate."""
    theta = coordinates.theta
    lengths = lengths_on(coordinates.lengths, theta.device)
    return torch.repeat_interleave(values.to(theta, non_blocking=True), lengths, output_size=len(theta))


GRAD_SQ, SIGNAL, CURV, CURV_SQ, OUTLIERS, PRODUCTS, PENALTY = SUMS = range(7)
"""Columns of sums over a segment: v̄, ḡ², |h̄^fd|, v̄^fd, outliers, ∇·(θ − θ̄) and ½|h̄^fd|(θ − θ̄)².

Engines that do not move coordinates while they learn return the first five.
"""


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the precision that parameters of this precision are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
