"""The engine for tensors of any device but the CPU: the text of an algorithm on whole tensors.

Nothing here waits for the device: numbers of the CPU are copied to it without blocking, and none is read back.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vsgd.algorithms.networks import Momentum, TensorContext, add_momentum, momentum_weight, random_bit
from vsgd.algorithms.strategy import Config, Sums, decay_of, limited_step, strategy_of
from vsgd.core import Moments, descend, ema, measured_curvature
from vsgd.torch.coordinates import (
    BatchMoments,
    Checks,
    Coordinates,
    Inputs,
    Learned,
    lengths_of,
    lengths_on,
    spread,
)
from vsgd.torch.distributed.shards import summed

PIECE = 1024
"""Sums over segments of different lengths are taken over pieces of this many coordinates first."""


class TorchEngine:
    """Runs functions of whole tensors, compiled by torch where it can. Implements `Engine`."""

    def numbers(self, values: Tensor) -> Any:
        return values

    def squared_norms(self, values: Tensor, coordinates: Coordinates) -> Any:
        return sums_of(values.to(coordinates.totals.dtype).square(), coordinates)

    def check(self, grad: Tensor, counts: Tensor, limit: float, coordinates: Coordinates, config: Config) -> Checks:
        norms, known = self.squared_norms(grad, coordinates), on_device(counts, coordinates)
        long = strategy_of(config).is_long(norms, coordinates.total_columns(), known, config)
        return Checks(norms.max() < limit, norms.max(), (norms * (long & (known > 0))).max())

    def probe(self, coordinates: Coordinates, batch: BatchMoments, seeds: list[int] | None, config: Config) -> Tensor:
        strategy = strategy_of(config)
        size, positive = None, None
        if strategy.uses_signs:
            size = spread(strategy.probe_size(coordinates.total_columns().scale, config), coordinates)
            positive = (batch.grad < 0).to(torch.int64) if seeds is None else random_bits(coordinates, seeds)
        state, counts = coordinates.state(spread(coordinates.seen, coordinates)), spread(batch.counts, coordinates)
        delta: Tensor = strategy.probe(state, batch.grad, counts, size, positive, config)
        return delta

    def learn(self, coordinates: Coordinates, inputs: Inputs, config: Config, moves: bool) -> Learned:
        strategy = strategy_of(config)
        batch, delta, rates, _, samples, _ = inputs
        columns, lengths = coordinates.total_columns(), lengths_of(coordinates)
        context = strategy.context(columns, lengths, config, rates.horizon)
        seen, count, *shared = spread_all((coordinates.seen, batch.counts, *context), coordinates)
        state = coordinates.state(seen)
        h, h_sq = state.mean.curv, state.mean.curv_sq
        if delta is not None:
            diff = batch.diff if batch.probed_grad is None else batch.probed_grad - batch.grad
            diff_sq = batch.diff_sq if batch.probed_grad is None else diff * diff  # type: ignore[operator]
            h, h_sq = measured_curvature(state.mean, diff, diff_sq, delta)
        moments = Moments(batch.grad, batch.grad * batch.grad if batch.grad_sq is None else batch.grad_sq, h, h_sq)
        direction = batch.grad if batch.direction is None else batch.direction
        factor = torch.full((), rates.lr, dtype=seen.dtype, device=seen.device)
        learn = compiled(strategy.learn(coordinates.decoupled), seen.device.type)
        tensor = TensorContext(*shared)
        new, info = learn(state, moments, count, config, tensor)
        step = compiled(limited_step, seen.device.type)
        steps = step(factor * info.rate, direction, state.mean.grad_sq, tensor)
        for target, value in zip(coordinates.statistics, (*new.mean, new.memory), strict=True):
            target.copy_(value)
        outliers = info.outlier.to(steps.dtype)
        values = [new.mean.grad_sq, new.mean.grad**2, abs(new.mean.curv), new.mean.curv_sq, outliers]
        if inputs.decays:
            values += [steps * steps, batch.grad * batch.grad]
        sums = sums_of(torch.stack(values), coordinates)
        active = on_device(batch.counts, coordinates) > 0
        known = coordinates.totals[:, : 4 if inputs.measures_curvature else 2]
        known.copy_(torch.where(active[:, None], sums[: known.shape[1]].T, known))
        decay = torch.zeros_like(lengths)
        if inputs.decays:
            in_data = torch.zeros_like(lengths) if samples is None else on_device(samples, coordinates)
            decay = decay_of(columns, Sums(*sums), lengths, in_data, rates)
        return Learned(steps, decay, sums[4])

    def move(self, coordinates: Coordinates, inputs: Inputs, steps: Tensor, decay: Any, config: Config) -> Any:
        theta, average, totals, rates = (
            coordinates.theta,
            coordinates.average,
            coordinates.total_columns(),
            inputs.rates,
        )
        weight = on_device(inputs.weight, coordinates)
        factor = momentum_weight(totals.momentum, weight, rates.lr)
        shrinkage, new_weight, momentum = spread_all((decay, weight, factor), coordinates)
        if average is None:
            theta.copy_(descend(theta, steps, shrinkage))
            return torch.zeros_like(totals.momentum)
        products = sums_of(inputs.batch.plain_grad * (theta - average), coordinates)
        theta.copy_(descend(theta, add_momentum(steps, theta, average, momentum), shrinkage))
        average.copy_(ema(average, theta, new_weight))
        before = Momentum(totals.momentum, totals.agreement)
        after = strategy_of(config).momentum(before, products, rates.momentum_obstacle, config)
        for column, new in zip(before, after, strict=True):
            column.copy_(torch.where(weight > 0, new, column))
        return products

    def moves_at_once(self, coordinates: Coordinates) -> bool:
        return False

    def adopt(self, held: list[Tensor], weights: list[Tensor], iterates: list[Tensor], coordinates: Coordinates) -> Any:
        """Replace weights and iterates without waiting: whether they are replaced is decided on the device."""
        theta = coordinates.theta
        found = torch.cat([each.detach().reshape(-1).to(theta.device) for each in held])
        expected = theta if coordinates.average is None else coordinates.average
        changes = sums_of((found != expected.to(found.dtype)).to(theta.dtype), coordinates._replace(shards=None))
        changed = spread(changes > 0, coordinates) > 0
        for buffer in (theta, coordinates.average):
            if buffer is not None:
                buffer.copy_(torch.where(changed, found, buffer))
        return changes.sum() > 0


# --- segments -----------------------------------------------------------------------------------------------------


def on_device(numbers: Any, coordinates: Coordinates) -> Tensor:
    """Return numbers per segment, which may be on the CPU, in the precision and on the device of the totals."""
    return torch.as_tensor(numbers).to(coordinates.totals, non_blocking=True)


def spread_all(numbers: Sequence[Any], coordinates: Coordinates) -> tuple[Tensor, ...]:
    """Return several numbers per segment, some of them on the CPU, as numbers per coordinate."""
    theta = coordinates.theta
    tensors = [each if isinstance(each, Tensor) else torch.as_tensor(each, device="cpu") for each in numbers]
    on_cpu = [k for k, each in enumerate(tensors) if each.is_cpu]
    if on_cpu:  # in one copy
        stacked = torch.stack([tensors[k].to(theta.dtype) for k in on_cpu]).to(theta.device, non_blocking=True)
        for k, row in zip(on_cpu, stacked, strict=True):
            tensors[k] = row
    rows = torch.stack([each.to(theta.dtype) for each in tensors])
    lengths = lengths_on(coordinates.lengths, theta.device)
    return torch.repeat_interleave(rows, lengths, dim=1, output_size=len(theta)).unbind(0)


def sums_of(values: Tensor, coordinates: Coordinates) -> Tensor:
    """Return sums over segments, of all processes, for values … × coordinates."""
    lengths, dtype = coordinates.lengths, coordinates.totals.dtype
    while len(set(lengths)) > 1:
        places, padding = pieces_of(lengths, values.device)
        pieces = values.index_select(-1, places).masked_fill_(padding, 0)
        values = pieces.unflatten(-1, (-1, PIECE)).sum(-1, dtype=dtype)
        lengths = tuple(-(-length // PIECE) for length in lengths)
    return summed(values.unflatten(-1, (len(lengths), -1)).sum(-1, dtype=dtype), coordinates.shards)


@functools.lru_cache(256)
def pieces_of(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which coordinate is at each place of the pieces, and which places are padding."""
    ends = np.cumsum(lengths)
    starts = [np.arange(end - length, end, PIECE) for end, length in zip(ends, lengths, strict=True)]
    limits = np.repeat(ends, [len(each) for each in starts])
    places = np.concatenate(starts)[:, None] + np.arange(PIECE)
    padding = places >= limits[:, None]
    places[padding] = 0
    return torch.from_numpy(places.reshape(-1).astype(np.int32)).to(device), torch.from_numpy(padding.reshape(-1)).to(
        device
    )


def random_bits(coordinates: Coordinates, seeds: list[int]) -> Tensor:
    """Return 0 or 1 for every coordinate, from its place in its segment and the seed of that."""
    theta, lengths = coordinates.theta, coordinates.lengths
    offsets = (0,) * len(lengths) if coordinates.shards is None else coordinates.shards.offsets
    starts = np.cumsum((0, *lengths[:-1])) - np.array(offsets)
    numbers = torch.from_numpy(np.array([starts, seeds], np.int64)).to(theta.device, non_blocking=True)
    repeats = lengths_on(lengths, theta.device)
    start, seed = torch.repeat_interleave(numbers, repeats, dim=1, output_size=len(theta)).unbind(0)
    bits: Tensor = random_bit(torch.arange(len(theta), device=theta.device) - start, seed)
    return bits


# --- the compiler -------------------------------------------------------------------------------------------------


class CompiledFunction:
    """A pure function, compiled by torch. It runs uncompiled from the moment when the compiler fails."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=True)

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            return self._function(*arguments)
        try:
            return self._compiled(*arguments)
        except Exception as error:
            result = self._function(*arguments)  # raises if it was no error of the compiler
            self._compiled = None
            logging.getLogger(__name__).warning("running uncompiled, because torch.compile failed: %s", error)
            return result


@functools.cache
def compiled(function: Callable[..., Any], device_type: str) -> CompiledFunction:
    """Return a pure function, compiled for all shapes. What changes from step to step comes as a tensor.

    Each function is compiled apart, since torch limits the number of variants of a function.
    """
    return CompiledFunction(function)
