"""Correct the running statistics of BatchNorm: layers are evaluated at the iterates, and used at the averaged weights.

In some steps a minibatch is also evaluated at the averaged weights. This yields the desired statistics, but of one
minibatch only. The difference to the statistics of the same minibatch at the iterates is a correction: a shift of the
mean and a factor on the variance. In it the choice of the minibatch cancels out. It is applied to the running
statistics in every step. The more values a minibatch has, the smaller the weight of statistics at the iterates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vsgd.torch.replay import Saving

if TYPE_CHECKING:
    from vsgd.torch.blocks import Blocks
    from vsgd.torch.evaluation import Run

INTERVAL = 23
"""Steps between evaluations at the averaged weights. It is a prime number, since layers or data may have a period."""

ITERATES_WORTH = 1000.0
"""Equivalent sample size, in values per channel, of statistics collected at the iterates."""


class Layer(NamedTuple):
    """A normalization layer whose running statistics may have changed, and their earlier values."""

    module: Any
    mean: Tensor
    var: Tensor
    updates: Tensor
    """`num_batches_tracked`."""


class LayerMoments(NamedTuple):
    """Mean and variance of the inputs of a layer."""

    mean: Tensor
    var: Tensor
    values: float
    """Number of values per channel; 0 if it is not known, or if the layer averages over all minibatches."""


class Correction(NamedTuple):
    """Correction of statistics at the iterates to statistics at the averaged weights."""

    shift: Tensor
    """Shift of the mean."""
    factor: Tensor
    """Factor on the variance."""
    trust: Tensor
    """Weight, between 0 and 1, of one minibatch at the averaged weights relative to all at the iterates."""


def is_due(steps: int) -> bool:
    """Return whether the step after `steps` others also evaluates its minibatch at the averaged weights."""
    return steps > 0 and steps % INTERVAL == 0


def moved_layers(savings: Iterable[Saving]) -> list[Layer]:
    """Return layers whose statistics may have changed since they were first saved."""
    found: dict[Any, dict[str, Tensor]] = {}
    for saving in savings:
        for each in saving.buffers:
            if each.is_statistic:
                found.setdefault(each.module, {}).setdefault(each.name, each.value)
    return [
        Layer(module, values["running_mean"], values["running_var"], values["num_batches_tracked"])
        for module, values in found.items()
    ]


def key_of(module: Any, places: Mapping[Any, int], others: list[Any]) -> str:
    """Return the name of a layer in a checkpoint: the index of its weight, or its own index among `others`.

    `others` are layers whose weight is not trained, in the order of their first use. A new one is added.
    """
    if module.weight in places:
        return f"parameter {places[module.weight]}"
    if module not in others:
        others.append(module)
    return f"layer {others.index(module)}"


def remaining_share(layer: Layer) -> Tensor:
    """Return the weight of earlier statistics in the present ones."""
    module, (_, mean, _, updates) = layer.module, layer
    if module.momentum is None:  # a plain mean
        return torch.div(updates.to(mean), module.num_batches_tracked)
    # InstanceNorm does not count its calls; the statistics of a layer that was not called are unchanged
    calls = torch.maximum(module.num_batches_tracked - updates, (module.running_mean != mean).any())
    share: Tensor = (1 - module.momentum) ** calls.to(mean)
    return share


def layer_moments(saving: Saving) -> dict[Any, LayerMoments]:
    """Return the moments of the inputs of each layer since its statistics were saved; NaN if it was not called."""
    result = {}
    for layer in moved_layers([saving]):
        module, share = layer.module, remaining_share(layer)
        mean = (module.running_mean - share * layer.mean) / (1 - share)
        var = ((module.running_var - share * layer.var) / (1 - share)).clamp(min=0)
        result[module] = LayerMoments(mean, var, 0 if module.momentum is None else saving.values.get(module, 0))
    return result


def measure_correction(iterate: LayerMoments, average: LayerMoments, eps: float) -> Correction | None:
    """Return the correction from one minibatch at the iterates and at the averaged weights; None if not finite."""
    trust = torch.tensor(average.values / (average.values + ITERATES_WORTH), dtype=torch.float32, device="cpu")
    trust = trust.to(average.mean)
    correction = Correction(average.mean - iterate.mean, (average.var + eps) / (iterate.var + eps), trust)
    return correction if bool((correction.shift + correction.factor).isfinite().all()) else None


def correct(layer: Layer, correction: Correction, average: LayerMoments | None) -> None:
    """Correct the change of a layer's statistics. `average` are its moments at the averaged weights, if measured."""
    module, share = layer.module, remaining_share(layer)
    shift, factor, trust = (each.to(layer.mean) for each in correction)
    old = share * layer.var
    mean, var = module.running_mean + (1 - share) * shift, old + factor * (module.running_var - old).clamp(min=0)
    mean, var = torch.lerp(mean, layer.mean, trust), torch.lerp(var, layer.var, trust)
    if average is not None:
        mean, var = torch.lerp(mean, average.mean, trust), torch.lerp(var, average.var, trust)
    module.running_mean.copy_(mean)
    module.running_var.copy_(var)


class BatchNormStatistics:
    """Keeps the running statistics of normalization layers at the averaged weights."""

    def __init__(self, corrections: Mapping[str, Correction] = MappingProxyType({})) -> None:
        self.corrections = dict(corrections)
        """The last correction of each layer."""
        self._other_layers: list[Any] = []

    def update(self, run: Run, blocks: Blocks, steps: int) -> None:
        """Correct the statistics that the first evaluations of a step have changed. Call it while blocks are open."""
        measured = self._measure(run, blocks) if is_due(steps) else {}
        moved = moved_layers([replay.saved for replay in run.replays])
        indices = {p: k for k, p in enumerate(run.parameters)} if moved else {}
        for layer in moved:
            key = key_of(layer.module, indices, self._other_layers)
            new, average = measured.get(layer.module, (None, None))
            if new is not None:
                self.corrections = {**self.corrections, key: new}
            correction = self.corrections.get(key)
            if correction is not None and correction.shift.shape == layer.mean.shape:
                correct(layer, correction, average)

    def _measure(self, run: Run, blocks: Blocks) -> dict[Any, tuple[Correction, LayerMoments]]:
        """Return finite corrections of layers, and their moments at the averaged weights."""
        iterates, averages = layer_moments(run.replays[-1].saved), dict[Any, LayerMoments]()
        if run.processes.all("layers with running statistics", not iterates):
            return {}
        grads = {p: p.grad for p in run.parameters}
        blocks.close()
        run.evaluate_last(lambda saved: averages.update(layer_moments(saved)))
        run.processes.numbers("end of an evaluation at the averaged weights")
        blocks.open()  # changes of weights by the closure are discarded, unlike those between steps
        for parameter, grad in grads.items():
            parameter.grad = grad
        pairs = {module: (iterates[module], average) for module, average in averages.items() if module in iterates}
        found = {module: (measure_correction(*pair, module.eps), pair[1]) for module, pair in pairs.items()}
        return {module: (new, average) for module, (new, average) in found.items() if new is not None}
