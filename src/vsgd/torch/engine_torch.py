"""The engine for tensors of any device but the CPU: the text of an algorithm on whole tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vsgd.algorithms import networks
from vsgd.algorithms.networks import TensorContext
from vsgd.algorithms.strategy import Config, Strategy
from vsgd.core import Moments, State, descend, ema, measured_curvature
from vsgd.torch.coordinates import BatchMoments, Coordinates
from vsgd.torch.distributed import summed


class TorchEngine:
    """Runs functions of whole tensors, compiled by torch. Implements `Engine`."""

    def numbers(self, values: Tensor) -> Any:
        return values

    def squared_norms(self, values: Tensor, coordinates: Coordinates) -> Any:
        return sums_of(values.double().square(), coordinates)

    def probe(
        self, coordinates: Coordinates, batch: BatchMoments, seeds: list[int] | None, strategy: Strategy, config: Config
    ) -> Tensor:
        size, positive = None, None
        if strategy.uses_signs:
            size = spread(strategy.probe_size(coordinates.total_columns().scale, config), coordinates)
            positive = (batch.grad < 0).to(torch.int64) if seeds is None else random_bits(coordinates, seeds)
        state, counts = coordinates.state(spread(coordinates.seen, coordinates)), spread(batch.counts, coordinates)
        delta: Tensor = strategy.probe(state, batch.grad, counts, size, positive, config)
        return delta

    def learn(
        self,
        coordinates: Coordinates,
        batch: BatchMoments,
        delta: Tensor | None,
        context: TensorContext,
        lr: float,
        strategy: Strategy,
        config: Config,
        writes_curvature: bool,
        weight: Any,
    ) -> tuple[Tensor | None, Any]:
        numbers = [spread(value, coordinates) for value in (coordinates.seen, batch.counts, *context)]
        factor = torch.as_tensor(lr, dtype=coordinates.theta.dtype, device=coordinates.theta.device)
        learn, state = strategy.learn(coordinates.decoupled), coordinates.state(numbers[0])
        new, steps, values = compiled_learn()(learn, state, batch, delta, numbers[1:], factor, config)
        for target, value in zip(coordinates.statistics, (*new.mean, new.memory), strict=True):
            target.copy_(value)
        return steps, torch.stack([sums_of(value.double(), coordinates) for value in values], dim=1)

    def move(self, coordinates: Coordinates, grad: Tensor, steps: Tensor, decay: Any, weight: Any) -> Any:
        theta, average = coordinates.theta, coordinates.average
        products = torch.zeros(len(coordinates.lengths), dtype=torch.float64)
        if average is not None:
            products = sums_of((grad * (theta - average)).double(), coordinates)
        theta.copy_(descend(theta, steps, spread(decay, coordinates)))
        if average is not None:
            average.copy_(ema(average, theta, spread(weight, coordinates)))
        return products

    def moves_at_once(self, coordinates: Coordinates) -> bool:
        return False


def spread(values: Any, coordinates: Coordinates) -> Tensor:
    """Return numbers per segment as numbers per coordinate."""
    theta = coordinates.theta
    lengths = torch.tensor(coordinates.lengths, dtype=torch.long, device=theta.device)
    return torch.repeat_interleave(torch.as_tensor(values).to(theta), lengths, output_size=len(theta))


def sums_of(values: Tensor, coordinates: Coordinates) -> Tensor:
    """Return sums over segments, of all processes."""
    return summed(torch.stack([part.sum() for part in values.split(coordinates.lengths)]), coordinates.shards)


def random_bits(coordinates: Coordinates, seeds: list[int]) -> Tensor:
    """Return 0 or 1 for every coordinate, from the seed of its segment."""
    device, lengths = coordinates.theta.device, coordinates.lengths
    offsets = (0,) * len(lengths) if coordinates.shards is None else coordinates.shards.offsets
    places = [torch.arange(k, k + length, device=device) for k, length in zip(offsets, lengths, strict=True)]
    return torch.cat([networks.random_bit(place, seed) for place, seed in zip(places, seeds, strict=True)])


@functools.cache
def compiled_learn() -> Callable[..., Any]:
    """Compiled once for all shapes: whatever changes from step to step comes as a tensor."""
    return torch.compile(learn_whole, dynamic=True)


def learn_whole(
    learn: Callable[..., Any],
    state: State,
    batch: BatchMoments,
    delta: Tensor | None,
    numbers: list[Tensor],
    lr: Tensor,
    config: Config,
) -> tuple[State, Tensor, list[Tensor]]:
    """Return the new statistics, the steps, and the values of which there are sums."""
    count, *shared = numbers
    h, h_sq = state.mean.curv, state.mean.curv_sq
    if delta is not None:
        diff = batch.diff if batch.probed_grad is None else batch.probed_grad - batch.grad
        diff_sq = batch.diff_sq if batch.probed_grad is None else diff * diff  # type: ignore[operator]
        h, h_sq = measured_curvature(state.mean, diff, diff_sq, delta)
    moments = Moments(batch.grad, batch.grad * batch.grad if batch.grad_sq is None else batch.grad_sq, h, h_sq)
    direction = batch.grad if batch.direction is None else batch.direction
    new, info, steps = learn(state, moments, direction, count, lr, config, TensorContext(*shared))
    outliers = info.outlier.to(steps.dtype)
    return new, steps, [new.mean.grad_sq, new.mean.grad**2, abs(new.mean.curv), new.mean.curv_sq, outliers]
