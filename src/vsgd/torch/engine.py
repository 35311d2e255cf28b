"""Runs an algorithm over flat buffers: compiled loops on a CPU, one function compiled by torch elsewhere.

A `Block` is a set of coordinates that are updated together, cut into segments. All coordinates of a segment have the
same count: a segment is a dense tensor, or a touched row of an embedding table. Both engines run the text of
`vsgd.algorithms`; nothing of it is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vsgd.algorithms import networks, paper
from vsgd.algorithms.networks import Networks, TensorContext
from vsgd.algorithms.paper import Paper
from vsgd.core import Moments, State, descend, ema, measured_curvature
from vsgd.jit import kept
from vsgd.tensors import (
    Config,
    Totals,
    averaging_weight,
    expected_norm_sq,
    gradient_limit,
    learn_of,
    probe_size,
)
from vsgd.tensors import context as context_of
from vsgd.tensors import weight_decay as decay_of
from vsgd.torch import loops
from vsgd.torch.shards import Shards, summed


class Block(NamedTuple):
    """Coordinates and their state as flat tensors, the segments one after the other."""

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
    """Samples so far, per segment. On the CPU for dense tensors, whose count is known without asking a device."""
    totals: Tensor
    """The columns are those of `Totals`, per segment."""
    lengths: tuple[int, ...]
    """Coordinates of each segment."""
    decoupled: bool
    """Are these coordinates in which the covariance of the gradient is nearly diagonal?"""
    shards: Shards | None = None
    """How segments continue in other processes, if they do."""


class BatchStatistics(NamedTuple):
    """What one minibatch says about the coordinates of a block; means are over its samples."""

    grad: Tensor
    plain_grad: Tensor
    """The mean gradient in the parameters' own coordinates; the rest is in those of the block."""
    counts: Tensor
    """Samples per segment; 0 where there is no gradient."""
    probed_grad: Tensor | None = None
    """The gradient at θ + δ, if the minibatch is one sample and there was a second gradient."""
    grad_sq: Tensor | None = None
    """Mean square, if there are several samples."""
    diff: Tensor | None = None
    """Mean ∇_{θ+δ} − ∇_θ in decoupled coordinates, elsewhere mean |∇_{θ+δ} − ∇_θ|; several samples and a probe."""
    diff_sq: Tensor | None = None
    direction: Tensor | None = None
    """What the step goes along, if it is not the mean gradient."""


def state_of(block: Block, seen: Tensor) -> State:
    """The block as whole tensors in the precision of its parameters."""
    dtype = block.theta.dtype
    mean = Moments(*(part.to(dtype) for part in (block.grad, block.grad_sq, block.curv, block.curv_sq)))
    return State(mean=mean, memory=block.memory.to(dtype), seen=seen)


def numpy_if_cpu(values: Tensor) -> Any:
    """A few numbers as the array with which arithmetic costs least: NumPy's on a CPU, in the same memory."""
    return values.numpy() if values.is_cpu else values


def spread(values: Any, block: Block) -> Tensor:
    """Numbers per segment as numbers per coordinate."""
    lengths = torch.tensor(block.lengths, dtype=torch.long, device=block.theta.device)
    return torch.repeat_interleave(torch.as_tensor(values).to(block.theta), lengths, output_size=len(block.theta))


def totals_of(block: Block) -> Totals:
    return Totals(*block.totals.unbind(1))


@functools.lru_cache(256)
def tensor_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(lengths, dtype=torch.float64, device=device)


def whole_lengths(block: Block) -> tuple[int, ...]:
    """Coordinates of each segment, those in other processes included."""
    return block.lengths if block.shards is None else block.shards.lengths


def lengths_of(block: Block) -> Tensor:
    return tensor_of(whole_lengths(block), block.totals.device)


def all_pieces(block: Block) -> Any:
    return loops.pieces_of(block.lengths, (True,) * len(block.lengths))


def squared_norms(values: Tensor, block: Block) -> Tensor:
    """Σ values² per segment."""
    if not values.is_cpu:
        parts = values.split(block.lengths)
        return summed(torch.stack([part.double().square().sum() for part in parts]), block.shards)
    pieces = all_pieces(block)
    sums = np.zeros(len(pieces))
    loops.on_threads(kept(loops.norm_loop), pieces, values.numpy(), sums)
    return summed(per_segment(sums, pieces, block), block.shards)


def per_segment(sums: Any, pieces: Any, block: Block) -> Tensor:
    """Sums over pieces as sums over segments."""
    if pieces is all_pieces(block) and len(pieces) == len(block.lengths):
        return torch.from_numpy(sums)  # each segment is one piece
    totals = np.zeros((len(block.lengths), *sums.shape[1:]))
    np.add.at(totals, pieces[:, 0], sums)
    return torch.from_numpy(totals)


def verdict(block: Block, batch: BatchStatistics, config: Config, by_rows: bool) -> tuple[Any, Any, Any]:
    """Return whether every number is usable, the largest squared gradient norm, and that of unusually long gradients.

    The norms are per segment. Rows of tables have no unusually long gradients.
    """
    norms = numpy_if_cpu(squared_norms(batch.grad, block))
    limit = gradient_limit(torch.finfo(block.theta.dtype).max)
    usable = norms.max() < limit
    for part in (batch.probed_grad, batch.grad_sq, batch.diff_sq):
        if part is not None and part.numel():
            least, most = map(numpy_if_cpu, part.aminmax())
            usable = usable & (-limit < least) & (most < limit)
    if block.shards is not None:
        usable = block.shards.add_up(torch.as_tensor(usable == 0, dtype=torch.float64, device=block.theta.device)) == 0
    if by_rows or isinstance(config, Paper):
        return usable, norms.max(), 0.0
    counts = numpy_if_cpu(batch.counts.to(block.totals.device))
    long = networks.is_long(norms, expected_norm_sq(Totals(*numpy_if_cpu(block.totals).T), counts), config)
    return usable, norms.max(), (norms * (long & (counts > 0))).max()


# --- the probe ----------------------------------------------------------------------------------------------------


def probe(block: Block, batch: BatchStatistics, seeds: Tensor | None, config: Config) -> Tensor:
    """The offset δ of every coordinate.

    Rows of a table have no `seeds` of random signs: they move against their gradients.
    """
    delta: Tensor
    if isinstance(config, Paper):
        delta = paper.probe(state_of(block, spread(block.seen, block)), batch.grad, spread(batch.counts, block), config)
        return delta
    sizes = probe_size(totals_of(block).scale, config)
    offsets = (0,) * len(block.lengths) if block.shards is None else block.shards.offsets
    if seeds is None:
        delta = networks.probe(spread(sizes, block), (batch.grad < 0).to(torch.int64))
    elif block.theta.is_cpu:
        delta = torch.empty_like(block.theta)
        starts = np.cumsum([0, *block.lengths[:-1]]) - np.array(offsets)
        arrays = delta.numpy(), starts, sizes.to(delta.dtype).numpy(), seeds.numpy()
        loops.on_threads(kept(loops.probe_loop), all_pieces(block), *arrays)
    else:
        pairs = zip(offsets, block.lengths, strict=True)
        places = (torch.arange(start, start + length, device=block.theta.device) for start, length in pairs)
        bits = [networks.random_bit(place, seed) for place, seed in zip(places, seeds.tolist(), strict=True)]
        delta = networks.probe(spread(sizes, block), torch.cat(bits))
    return delta


def context(block: Block, config: Config, horizon: float) -> TensorContext:
    """What coordinates are told of their tensor, per segment."""
    return context_of(Totals(*numpy_if_cpu(block.totals).T), numpy_if_cpu(lengths_of(block)), config, horizon)


def rates(block: Block, count: float, config: Config, horizon: float) -> Tensor:
    """η* of every coordinate for a minibatch of `count` samples, from the statistics so far."""
    state = state_of(block, block.seen)
    rate: Tensor
    if isinstance(config, Paper):
        rate = paper.rate(state.mean, count, config)
    else:
        tensor = TensorContext(*(spread(part, block) for part in context(block, config, horizon)))
        rate = networks.rate(state.mean, state.memory, count, config, tensor, block.decoupled)
    return rate


# --- learning: statistics and steps -------------------------------------------------------------------------------


def learn(
    block: Block,
    batch: BatchStatistics,
    delta: Tensor | None,
    lr: float,
    horizon: float,
    config: Config,
    weight: Any = None,
) -> tuple[Tensor, Any]:
    """Learn from the minibatch. Returns the step of every coordinate, and sums per segment: see `learn_loops`.

    Rates are optimal for the `horizon`, and multiplied by `lr`. With a `weight` for the average, steps are taken, too:
    see `moves_at_once`.
    """
    if delta is not None:
        totals_of(block).probe_size.copy_((squared_norms(delta, block) / lengths_of(block)).sqrt())
    known = 4 if changes_curvature(block, batch, delta, config) else 2
    if block.theta.is_cpu:
        steps, sums = learn_loops(block, batch, delta, lr, horizon, config, weight)
    else:
        steps, sums = learn_tensors(block, batch, delta, lr, horizon, config)
    sums = summed(sums, block.shards)
    totals = numpy_if_cpu(block.totals)[:, :known]
    active = numpy_if_cpu(batch.counts.to(block.totals.device))[:, None] > 0
    totals[:] = active * numpy_if_cpu(sums)[:, :known] + (active == 0) * totals
    block.seen.add_(batch.counts)
    return steps, numpy_if_cpu(sums)


def moves_at_once(block: Block, counts: Tensor, decay_strength: float) -> bool:
    """Can compiled loops learn and move in one go? Where something is rotated, steps have to be rotated in between."""
    return block.average is not None and block.average.is_cpu and decay_strength == 0 and bool(counts.all())


def changes_curvature(block: Block, batch: BatchStatistics, delta: Tensor | None, config: Config) -> bool:
    """Are the averages of the curvature written? Only if it was measured, or where a bootstrap may end."""
    if delta is not None or isinstance(config, Paper) or not block.seen.is_cpu:  # to ask a device would be to wait
        return True
    return is_starting(block, batch, config)


def is_starting(block: Block, batch: BatchStatistics, config: Networks) -> bool:
    """Does any segment with a gradient have averages that are just being started?"""
    return bool(((numpy_if_cpu(block.seen) < config.bootstrap) & (numpy_if_cpu(batch.counts) > 0)).any())


@functools.lru_cache(256)
def in_precision(config: Config, dtype: np.dtype[Any]) -> Config:
    """Constants in the precision of the loop, so that float32 stays float32."""
    return type(config)._make(value if isinstance(value, bool) else dtype.type(value) for value in config)


def learn_loops(
    block: Block,
    batch: BatchStatistics,
    delta: Tensor | None,
    lr: float,
    horizon: float,
    config: Config,
    weight: Any = None,
) -> tuple[Tensor, Tensor]:
    """Steps, and sums of v̄, ḡ², |h̄^fd|, v̄^fd and outliers per segment, by compiled loops.

    With a `weight` for the average the steps are taken, not returned; further sums are ∇·(θ − θ̄) and ½|h̄^fd|(θ − θ̄)².
    """
    dtype = block.theta.numpy().dtype
    nothing = block.theta[:0]

    def array(part: Tensor | None) -> Any:
        """The memory of a tensor; that of a bfloat16 as its bits."""
        if part is None:
            return nothing.numpy()
        return part.view(torch.int16).numpy().view(np.uint16) if part.dtype == torch.bfloat16 else part.numpy()

    several, moves = batch.grad_sq is not None, weight is not None
    steps = nothing if moves else torch.zeros_like(block.theta)
    pieces = loops.pieces_of(block.lengths, tuple(batch.counts.numpy() > 0))
    sums = np.zeros((len(pieces), loops.BEND + 1))
    flags = several, delta is not None, changes_curvature(block, batch, delta, config), moves
    compact = block.grad.dtype == torch.bfloat16, block.curv.dtype == torch.bfloat16
    diff = batch.diff if several else batch.probed_grad
    direction = batch.grad if batch.direction is None else batch.direction
    segments = (
        numpy_if_cpu(block.seen),
        numpy_if_cpu(batch.counts),
        *context(block, config, horizon),
        *([] if weight is None else [weight]),
    )
    loops.on_threads(
        loops.learn_loop(learn_of(config, block.decoupled), *compact, *flags),
        pieces,
        (array(block.grad), array(block.grad_sq)),
        (array(block.curv), array(block.curv_sq)),
        array(block.memory),
        tuple(map(array, (batch.grad, batch.grad_sq, diff, batch.diff_sq, direction))),
        array(delta),
        np.array(segments, dtype),
        dtype.type(lr),
        in_precision(config, dtype),
        array(steps),
        array(block.theta),
        array(block.average),
        sums,
    )
    return steps, per_segment(sums, pieces, block)


def learn_tensors(
    block: Block, batch: BatchStatistics, delta: Tensor | None, lr: float, horizon: float, config: Config
) -> tuple[Tensor, Tensor]:
    """The same on whole tensors, compiled by torch."""
    numbers = [spread(value, block) for value in (block.seen, batch.counts, *context(block, config, horizon))]
    factor = torch.as_tensor(lr, dtype=block.theta.dtype, device=block.theta.device)
    steps, values = compiled_tensors()(block, batch, delta, numbers, factor, config)
    sums = [torch.stack([part.double().sum() for part in value.split(block.lengths)]) for value in values]
    return steps, torch.stack(sums, dim=1)


@functools.cache
def compiled_tensors() -> Callable[..., Any]:
    """Compiled once for all shapes: whatever changes from step to step comes as a tensor."""
    return torch.compile(learn_whole, dynamic=True)


def learn_whole(
    block: Block, batch: BatchStatistics, delta: Tensor | None, numbers: list[Tensor], lr: Tensor, config: Config
) -> tuple[Tensor, list[Tensor]]:
    """`loops.make_learn_loop` without the loop. Returns the steps and what there are sums of."""
    seen, count, *shared = numbers
    state, tensor = state_of(block, seen), TensorContext(*shared)
    h, h_sq = state.mean.curv, state.mean.curv_sq
    if delta is not None:
        diff = batch.diff if batch.probed_grad is None else batch.probed_grad - batch.grad
        diff_sq = batch.diff_sq if batch.probed_grad is None else diff * diff  # type: ignore[operator]
        h, h_sq = measured_curvature(state.mean, diff, diff_sq, delta)
    moments = Moments(batch.grad, batch.grad * batch.grad if batch.grad_sq is None else batch.grad_sq, h, h_sq)
    new, info = learn_of(config, block.decoupled)(state, moments, count, config, tensor)
    direction = batch.grad if batch.direction is None else batch.direction
    steps = networks.limited_step(lr * info.rate, direction, state.mean.grad_sq, tensor)
    for target, value in zip(block[2:7], (*new.mean, new.memory), strict=True):
        target.copy_(value)
    outliers = info.outlier.to(steps.dtype)
    return steps, [new.mean.grad_sq, new.mean.grad**2, abs(new.mean.curv), new.mean.curv_sq, outliers]


# --- moving -------------------------------------------------------------------------------------------------------


def move(block: Block, grad: Tensor, steps: Tensor, decay: Any, weight: Any) -> Tensor:
    """θ ← (θ − step) / (1 + decay), and the average of the iterates follows with `weight`; both per segment.

    Returns ∇·(θ − θ̄) per segment, before that. All in the parameters' own coordinates.
    """
    if not block.theta.is_cpu:
        gains = torch.zeros(len(block.lengths), dtype=torch.float64)
        if block.average is not None:
            products = grad * (block.theta - block.average)
            gains = summed(torch.stack([part.double().sum() for part in products.split(block.lengths)]), block.shards)
        block.theta.copy_(descend(block.theta, steps, spread(decay, block)))
        if block.average is not None:
            block.average.copy_(ema(block.average, block.theta, spread(weight, block)))
        return gains
    pieces = all_pieces(block)
    sums = np.zeros(len(pieces))
    average = block.theta[:0] if block.average is None else block.average
    arrays = [part.numpy() for part in (block.theta, average, steps, grad)]
    segments = np.array([decay, weight], arrays[0].dtype)
    loops.on_threads(kept(loops.move_loop), pieces, *arrays, segments, sums)
    return summed(per_segment(sums, pieces, block), block.shards)


def averaging_weights(block: Block, counts: Tensor, window: float | None, config: Config) -> Any:
    """The weight with which a new iterate enters the average, per segment; rows of a table have no common `window`."""
    seen, count = numpy_if_cpu(block.seen), numpy_if_cpu(counts)
    if isinstance(config, Paper):
        return seen >= 0  # nothing is averaged
    if window is None:
        return networks.row_averaging_weight(seen, count, config)
    return averaging_weight(seen, window, config) * (count > 0)


def weight_decay(block: Block, steps: Tensor, strength: float) -> Any:
    """Return the decay of each segment: `strength` times the RMS of its steps, as `tensors.weight_decay` defines it."""
    if strength == 0:
        return np.zeros(len(block.lengths))
    return decay_of(strength, *map(numpy_if_cpu, (squared_norms(steps, block), lengths_of(block))))


def bend(block: Block, into: Callable[[Tensor], Tensor]) -> Tensor:
    """½ (θ−θ̄)ᵀ |H| (θ−θ̄), in coordinates in which H is nearly diagonal; 0 if nothing is averaged."""
    if block.average is None:
        return torch.zeros((), dtype=torch.float64, device=block.totals.device)
    offset = into(block.theta - block.average)
    return summed((block.curv.to(offset.dtype).abs() * offset * offset).sum().double() / 2, block.shards)
