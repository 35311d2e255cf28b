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
from vsgd.algorithms.networks import Networks, TensorCurvature
from vsgd.algorithms.paper import Paper
from vsgd.core import Moments, State, descend, ema, measured_curvature
from vsgd.jit import kept
from vsgd.torch import loops

Config = Paper | Networks


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
    """`Totals`, per segment."""
    lengths: tuple[int, ...]
    """Coordinates of each segment."""


class BatchStatistics(NamedTuple):
    """What one minibatch says about the coordinates of a block; means are over its samples."""

    grad: Tensor
    counts: Tensor
    """Samples per segment; 0 where there is no gradient."""
    probed_grad: Tensor | None = None
    """The gradient at θ + δ, if the minibatch is one sample and there was a second gradient."""
    grad_sq: Tensor | None = None
    """Mean square, if there are several samples."""
    diff_abs: Tensor | None = None
    """Mean |∇_θ − ∇_{θ+δ}|, if there are several samples and a second gradient."""
    diff_sq: Tensor | None = None
    direction: Tensor | None = None
    """What the step goes along, if it is not the mean gradient."""


class Factors(NamedTuple):
    """What a user may set for a group of parameters."""

    lr: Any
    weight_decay: Any


class Totals(NamedTuple):
    """Numbers per segment, columns of `Block.totals`: sums over its coordinates, and |δ| of the last probe."""

    grad_sq: Tensor
    """Σ v̄"""
    signal: Tensor
    """Σ ḡ²"""
    curv: Tensor
    curv_sq: Tensor
    probe_size: Tensor


LEAST_PROBE = 1e-5
"""No probe is smaller; differences of gradients will be divided by it, and squared."""


def averages_iterates(config: Config) -> bool:
    """Are the weights to evaluate an average of the iterates?"""
    return isinstance(config, Networks) and bool(config.average_iterates)


def averaging_weights(seen: Tensor, count: Tensor, config: Config) -> Tensor:
    """The weight with which the new iterate enters the average, per segment."""
    weight: Tensor = networks.averaging_weight(seen, count, config) if isinstance(config, Networks) else seen * 0 + 1
    return weight


def state_of(block: Block, seen: Tensor) -> State:
    """The block as whole tensors in the precision of its parameters."""
    dtype = block.theta.dtype
    mean = Moments(*(part.to(dtype) for part in (block.grad, block.grad_sq, block.curv, block.curv_sq)))
    return State(mean=mean, memory=block.memory.to(dtype), seen=seen)


def spread(values: Tensor, block: Block) -> Tensor:
    """Numbers per segment as numbers per coordinate."""
    lengths = torch.tensor(block.lengths, device=block.theta.device)
    return torch.repeat_interleave(values.to(block.theta), lengths, output_size=len(block.theta))


def totals_of(block: Block) -> Totals:
    return Totals(*block.totals.unbind(1))


def lengths_of(block: Block) -> Tensor:
    return torch.tensor(block.lengths, dtype=torch.float64, device=block.totals.device)


def squared_norms(values: Tensor, block: Block) -> Tensor:
    """Σ values² per segment."""
    if not values.is_cpu:
        return torch.stack([part.double().square().sum() for part in values.split(block.lengths)])
    pieces = all_pieces(block)
    sums = np.zeros(len(pieces))
    loops.on_threads(kept(loops.norm_loop), pieces, values.numpy(), sums)
    return torch.from_numpy(np.bincount(pieces[:, 0], sums, len(block.lengths)))


def root_mean_squares(values: Tensor, block: Block) -> Tensor:
    return (squared_norms(values, block) / lengths_of(block)).sqrt()


def all_pieces(block: Block) -> Any:
    return loops.pieces_of(block.lengths, (True,) * len(block.lengths))


def verdict(block: Block, batch: BatchStatistics, config: Config) -> Tensor:
    """Two booleans: is every number usable, and is the gradient of any segment unusually long?"""
    norms = squared_norms(batch.grad, block)
    limit = torch.finfo(block.theta.dtype).max * LEAST_PROBE**2
    others = (batch.probed_grad, batch.grad_sq, batch.diff_sq)
    sizes = [norms.max(), *(part.abs().max().double() for part in others if part is not None and part.numel())]
    usable = torch.stack([size < limit for size in sizes]).all()
    if isinstance(config, Paper):
        return torch.stack([usable, torch.zeros_like(usable)])
    count, totals = batch.counts.to(norms.device), totals_of(block)
    expected = (totals.grad_sq + (count - 1) * totals.signal) / count.clamp(min=1)
    return torch.stack([usable, (networks.is_long(norms, expected, config) & (count > 0)).any()])


def probe(block: Block, batch: BatchStatistics, seeds: Tensor | None, config: Config) -> Tensor:
    """The offset δ of every coordinate.

    Rows of a table have no `seeds` of random signs: they move against their gradients, by a size that is known.
    """
    delta: Tensor
    if isinstance(config, Paper):
        delta = paper.probe(state_of(block, spread(block.seen, block)), batch.grad, spread(batch.counts, block), config)
        return delta
    if seeds is None:
        delta = networks.probe(spread(totals_of(block).probe_size, block), (batch.grad < 0).to(torch.int64))
        return delta
    sizes = networks.probe_size(root_mean_squares(block.theta, block), config)
    if block.theta.is_cpu:
        delta = torch.empty_like(block.theta)
        starts, sizes = np.cumsum([0, *block.lengths[:-1]]), sizes.to(delta.dtype).numpy()
        loops.on_threads(kept(loops.probe_loop), all_pieces(block), delta.numpy(), starts, sizes, seeds.numpy())
        return delta
    places = (torch.arange(length, device=block.theta.device) for length in block.lengths)
    bits = [networks.random_bit(place, seed) for place, seed in zip(places, seeds.tolist(), strict=True)]
    delta = networks.probe(spread(sizes, block), torch.cat(bits))
    return delta


def tensor_curvature(block: Block, config: Config) -> TensorCurvature:
    """What the curvature of each coordinate is shrunk towards, per segment."""
    totals, lengths = totals_of(block), lengths_of(block)
    if isinstance(config, Paper):
        return TensorCurvature(lengths * 0, lengths * 0)
    rms, size = (totals.signal / lengths).sqrt(), totals.probe_size.clamp(min=LEAST_PROBE)
    return networks.curvature_shrinkage(totals.curv / lengths, totals.curv_sq / lengths, rms, size, config)


def changes_curvature(block: Block, batch: BatchStatistics, delta: Tensor | None, config: Config) -> bool:
    """Are the averages of the curvature written? Only if it was measured, or where a bootstrap may end."""
    if delta is not None or isinstance(config, Paper):
        return True
    return bool(((block.seen < config.bootstrap) & (batch.counts > 0)).any())


def update(block: Block, batch: BatchStatistics, delta: Tensor | None, factors: Factors, config: Config) -> Tensor:
    """Learn from the minibatch and move all coordinates of a block, in place. Returns its outliers per segment."""
    totals = totals_of(block)
    if delta is not None:
        totals.probe_size.copy_(root_mean_squares(delta, block))
    changed = changes_curvature(block, batch, delta, config)
    run = update_loops if block.theta.is_cpu else update_tensors
    *sums, outliers = run(block, batch, delta, tensor_curvature(block, config), factors, config)
    active = batch.counts.to(block.totals.device) > 0
    for total, value in zip(totals, sums if changed else sums[:2], strict=False):
        total.copy_(torch.where(active, value.to(total), total))
    block.seen.add_(batch.counts)
    return outliers


def rates(block: Block, count: float, config: Config) -> Tensor:
    """η* of every coordinate for a minibatch of `count` samples, from the statistics so far."""
    mean = state_of(block, block.seen).mean
    rate: Tensor
    if isinstance(config, Paper):
        rate = paper.rate(mean, count, config)
    else:
        tensor = TensorCurvature(*(spread(part, block) for part in tensor_curvature(block, config)))
        rate = networks.rate(mean, count, config, tensor)
    return rate


# --- compiled loops -----------------------------------------------------------------------------------------------


def update_loops(
    block: Block,
    batch: BatchStatistics,
    delta: Tensor | None,
    tensor: TensorCurvature,
    factors: Factors,
    config: Config,
) -> list[Tensor]:
    """Sums of v̄, ḡ², h̄^fd, v̄^fd and outliers per segment."""
    number = block.theta.numpy().dtype.type
    nothing = np.empty(0, number)
    several = batch.grad_sq is not None

    def array(part: Tensor | None) -> Any:
        """The memory of a tensor; that of a bfloat16 as its bits."""
        if part is None:
            return nothing
        return part.view(torch.int16).numpy().view(np.uint16) if part.dtype == torch.bfloat16 else part.numpy()

    def typed(values: Any) -> Any:
        """Numbers in the precision of the loop, so that float32 stays float32."""
        return type(values)._make(value if isinstance(value, bool) else number(value) for value in values)

    weights = averaging_weights(block.seen, batch.counts, config)
    pieces = loops.pieces_of(block.lengths, tuple((batch.counts > 0).tolist()))
    sums = np.zeros((len(pieces), loops.SUMS))
    loop = loops.update_loop(
        isinstance(config, Networks),
        block.grad.dtype == torch.bfloat16,
        block.curv.dtype == torch.bfloat16,
        several,
        delta is not None,
        changes_curvature(block, batch, delta, config),
        block.average is not None,
        factors.weight_decay != 0,
    )
    diff = batch.diff_abs if several else batch.probed_grad
    direction = batch.grad if batch.direction is None else batch.direction
    loops.on_threads(
        loop,
        pieces,
        array(block.theta),
        array(block.average),
        (array(block.grad), array(block.grad_sq)),
        (array(block.curv), array(block.curv_sq)),
        array(block.memory),
        tuple(map(array, (batch.grad, batch.grad_sq, diff, batch.diff_sq, direction))),
        array(delta),
        torch.stack([block.seen, batch.counts, weights, *tensor]).to(block.theta.dtype).numpy(),
        typed(factors),
        typed(config),
        sums,
    )
    return [torch.from_numpy(np.bincount(pieces[:, 0], column, len(block.lengths))) for column in sums.T]


# --- whole tensors ------------------------------------------------------------------------------------------------


def update_tensors(
    block: Block,
    batch: BatchStatistics,
    delta: Tensor | None,
    tensor: TensorCurvature,
    factors: Factors,
    config: Config,
) -> list[Tensor]:
    """Sums of v̄, ḡ², h̄^fd, v̄^fd and outliers per segment."""
    device, dtype = block.theta.device, block.theta.dtype
    weights = averaging_weights(block.seen, batch.counts, config)
    numbers = [spread(value, block) for value in (block.seen, batch.counts, weights, *tensor)]
    scalars = Factors(*(torch.as_tensor(value, dtype=dtype, device=device) for value in factors))
    values = compiled_tensors()(block, batch, delta, numbers, scalars, config)
    return [torch.stack([part.sum() for part in value.split(block.lengths)]) for value in values]


@functools.cache
def compiled_tensors() -> Callable[..., Any]:
    """Compiled once for all shapes: whatever changes from step to step comes as a tensor."""
    return torch.compile(update_whole, dynamic=True)


def update_whole(
    block: Block,
    batch: BatchStatistics,
    delta: Tensor | None,
    numbers: list[Tensor],
    factors: Factors,
    config: Config,
) -> list[Tensor]:
    """`loops.make_update_loop` without the loop. Returns what there are sums of."""
    seen, count, weight, curv, curv_sq = numbers
    state = state_of(block, seen)
    h, h_sq = state.mean.curv, state.mean.curv_sq
    if delta is not None:
        if batch.probed_grad is not None:
            diff = batch.grad - batch.probed_grad
            h, h_sq = measured_curvature(state.mean, abs(diff), diff * diff, delta)
        else:
            h, h_sq = measured_curvature(state.mean, batch.diff_abs, batch.diff_sq, delta)
    moments = Moments(batch.grad, batch.grad * batch.grad if batch.grad_sq is None else batch.grad_sq, h, h_sq)
    if isinstance(config, Networks):
        new, info = networks.learn(state, moments, count, config, TensorCurvature(curv, curv_sq))
    else:
        new, info = paper.learn(state, moments, count, config)
    eta = factors.lr * info.rate
    direction = batch.grad if batch.direction is None else batch.direction
    theta = descend(block.theta, eta * direction, eta * factors.weight_decay)
    block.theta.copy_(theta)
    if block.average is not None:
        block.average.copy_(ema(block.average, theta, weight))
    for target, value in zip(block[2:7], (*new.mean, new.memory), strict=True):
        target.copy_(value)
    return [new.mean.grad_sq, new.mean.grad**2, new.mean.curv, new.mean.curv_sq, info.outlier.to(theta.dtype)]
