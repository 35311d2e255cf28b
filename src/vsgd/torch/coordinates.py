"""What an engine works on: coordinates with their statistics, and the moments of a minibatch, as flat tensors.

Coordinates are cut into segments. All coordinates of a segment have the same count of samples: a segment is a dense
tensor, or a touched row of an embedding table.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vsgd.algorithms.strategy import Config, Rates, Totals
from vsgd.core import Moments, State
from vsgd.torch.distributed.shards import Shards


class Scratch:
    """Memory for intermediate results that are not needed after the update of a block. All blocks share it."""

    def __init__(self, size: int) -> None:
        """Make memory for blocks of up to `size` coordinates, at first use."""
        self._size = size
        self._buffers: dict[Any, Tensor] = {}

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Return memory for numbers as in `like`, which is flat."""
        key = name, like.dtype, like.device
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(self._size)
        return self._buffers[key][: len(like)]

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Workspace:
    """What a step uses again in the next one: memory for intermediate results, and what the engine has prepared."""

    OWN = ("grad", "rotated")
    """Buffers that hold the gradients of the block until its update."""
    SHARED = ("half", "back", "steps")
    """Buffers that are used within the update of one block, or to probe it."""

    def __init__(self, scratch: Scratch) -> None:
        self.plan: Any = None
        """What the engine has computed from coordinates that does not change from step to step."""
        self._scratch = scratch
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Return memory for numbers as in `like`.

        It is the same in all calls with a name in `OWN` or `SHARED`. Others are used in few steps, and have new memory.
        """
        if name not in self._buffers:
            if name not in (*self.OWN, *self.SHARED):
                return torch.empty_like(like)
            is_own = name in self.OWN
            self._buffers[name] = torch.empty_like(like) if is_own else self._scratch.buffer(name, like)
        return self._buffers[name]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether this is one of the buffers."""
        return any(tensor is each for each in self._buffers.values())

    def nbytes(self) -> int:
        """Return the bytes of the block's own buffers."""
        return sum(buffer.nbytes for name, buffer in self._buffers.items() if name in self.OWN)


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
        """Return the four moments and the memory."""
        return self.grad, self.grad_sq, self.curv, self.curv_sq, self.memory

    def state(self, seen: Tensor) -> State:
        """Return the statistics in the precision of the iterates."""
        *mean, memory = (part.to(self.theta.dtype) for part in self.statistics)
        return State(mean=Moments(*mean), memory=memory, seen=seen)

    def memory_for(self, name: str | None) -> Tensor:
        """Return memory for one number per coordinate; with a name and a workspace, see `Workspace.buffer`."""
        if name is None or self.workspace is None:
            return torch.empty_like(self.theta)
        return self.workspace.buffer(name, self.theta)

    def total_columns(self) -> Totals:
        return Totals(*self.totals.unbind(1))


class BatchMoments(NamedTuple):
    """Moments of one minibatch; means are over its samples."""

    grad: Tensor
    """Mean gradient in the coordinates of the block. All other fields but `plain_grad` and `counts` use these, too."""
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


class Inputs(NamedTuple):
    """What the update of a block starts from."""

    batch: BatchMoments
    delta: Tensor | None
    """Offset of the probe, if there was one."""
    rates: Rates
    weight: Any
    """Weight of the new iterates in the average, per segment."""
    samples: Any = None
    """Per segment, the number of samples in the data; 0 where no weight decay is estimated, None if nowhere."""
    starts: bool = True
    """Whether averages may just be started. Otherwise curvatures only change after a probe."""

    @property
    def measures_curvature(self) -> bool:
        """Return whether averages of the curvature change."""
        return self.delta is not None or self.starts

    @property
    def decays(self) -> bool:
        """Return whether weights decay."""
        return self.samples is not None or self.rates.weight_decay > 0


class Learned(NamedTuple):
    """What an engine has learned from a minibatch. Numbers are per segment."""

    steps: Tensor | None
    """The step of every coordinate; None if the coordinates have moved at once."""
    decay: Any
    """d in θ ← (θ − step) / (1 + d)."""
    outliers: Any
    products: Any = None
    """∇·(θ − θ̄) before the step. This and `penalty` are only set if the coordinates have moved at once."""
    penalty: Any = None
    """½ Σ |h̄^fd| (θ − θ̄)²"""


class Checks(NamedTuple):
    """What the numbers of a minibatch say before anything is learned from them. Each is a number on any device."""

    usable: Any
    """Whether every number is finite and can be squared."""
    norm_sq: Any
    """Largest squared norm of a gradient."""
    long_norm_sq: Any
    """The same of unusually long gradients; 0 if there is none."""


class Engine(Protocol):
    """Arithmetic on flat tensors. One implementation for CPU tensors, one for those of any other device.

    Numbers per segment are `Any`: arrays of the library with which the engine computes them fastest.
    """

    def numbers(self, values: Tensor) -> Any:
        """Return numbers per segment in the engine's own array type, in the same memory."""

    def squared_norms(self, values: Tensor, coordinates: Coordinates) -> Any:
        """Return Σ values² per segment, over all processes."""

    def check(self, grad: Tensor, counts: Tensor, limit: float, coordinates: Coordinates, config: Config) -> Checks:
        """Return whether squared norms of gradients are below a limit, the largest, and the largest unusual one."""

    def probe(self, coordinates: Coordinates, batch: BatchMoments, seeds: list[int] | None, config: Config) -> Tensor:
        """Return the offset δ of every coordinate. Without `seeds` signs are opposite to those of the gradient."""

    def learn(self, coordinates: Coordinates, inputs: Inputs, config: Config, moves: bool) -> Learned:
        """Update the statistics and totals. Return the steps to take.

        Args:
            coordinates: of the block; they change in place.
            inputs: of the update.
            config: constants of the algorithm.
            moves: whether coordinates also `move`; see `moves_at_once`.
        """

    def move(self, coordinates: Coordinates, inputs: Inputs, steps: Tensor, decay: Any, config: Config) -> Any:
        """Let θ ← (θ − step + momentum (θ − θ̄)) / (1 + decay), and the average and the momentum follow.

        Return ∇·(θ − θ̄) per segment, as it was before. Steps are in the parameters' own coordinates.
        """

    def moves_at_once(self, coordinates: Coordinates) -> bool:
        """Return whether `learn` can move coordinates that are not rotated and do not decay."""

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


def lengths_of(coordinates: Coordinates) -> Tensor:
    """Return the coordinates of each segment, those in other processes included."""
    return lengths_on(coordinates.whole_lengths, coordinates.totals.device, coordinates.totals.dtype)


def lengths_on(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the lengths of segments as a tensor, cached unless the segments are rows of a table."""
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


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the precision that parameters of this precision are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
