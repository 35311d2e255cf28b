"""Running statistics, as BatchNorm has them, of the averaged weights, though layers mostly meet the iterates.

Now and then a minibatch is evaluated at the averaged weights, too. That tells two things. What a layer saw there, which
is what is wanted, but of one minibatch only. And how it differs from what the same minibatch showed at the iterates: a
shift of the mean and a factor on the variance, in which the choice of the minibatch cancels out. Corrected by these,
what a layer sees at the iterates counts in every step, and the less so the more values a minibatch has to offer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.torch.closure import Saving

INTERVAL = 23
"""One step of so many evaluates its minibatch at the averaged weights, too. A prime number, since layers or data may
come in turns."""

ITERATES_WORTH = 1000.0
"""What is seen at the iterates counts for as much as so many values at the averaged weights: it is of many minibatches,
but iterates come and go."""


class Layer(NamedTuple):
    """A normalization whose running statistics may have moved, and what these were before."""

    module: Any
    mean: Tensor
    var: Tensor
    updates: Tensor
    """How many have made them, `num_batches_tracked`."""


class Seen(NamedTuple):
    """Mean and variance of what passed through a layer."""

    mean: Tensor
    var: Tensor
    values: float
    """How many of each channel; 0 if that is not known, or if a layer keeps plain means, where none may count more."""


class Correction(NamedTuple):
    """From what a layer sees at the iterates to what it would see at the averaged weights."""

    shift: Tensor
    """Of the mean."""
    factor: Tensor
    """On the variance."""
    trust: Tensor
    """Between 0 and 1: how much one minibatch at the averaged weights counts against all at the iterates."""


def is_due(steps: int) -> bool:
    """Does the minibatch of a step, with so many `steps` before it, go through the averaged weights?

    At first, when the average hardly differs from the iterates, statistics of these will do.
    """
    return steps > 0 and steps % INTERVAL == 0


def moved_layers(savings: Iterable[Saving]) -> list[Layer]:
    """Layers whose statistics may have moved since they were saved; where more than once, since the first time."""
    found: dict[Any, dict[str, Tensor]] = {}
    for each in (each for saving in savings for each in saving.buffers if each.is_statistic):
        found.setdefault(each.module, {}).setdefault(each.name, each.value)
    return [
        Layer(module, values["running_mean"], values["running_var"], values["num_batches_tracked"])
        for module, values in found.items()
    ]


def key_of(module: Any, places: Mapping[Any, int], others: list[Any]) -> str:
    """What a layer is called in a checkpoint: by the place of its weight, or by its own among `others`.

    The latter are layers whose weight is not trained, in the order in which they first came.
    """
    if module.weight in places:
        return f"parameter {places[module.weight]}"
    if module not in others:
        others.append(module)
    return f"layer {others.index(module)}"


def share_kept(layer: Layer) -> Tensor:
    """The share that statistics from before have in the present ones."""
    module, (_, mean, _, updates) = layer.module, layer
    if module.momentum is None:  # a plain mean
        return torch.div(updates.to(mean), module.num_batches_tracked)
    # InstanceNorm does not count its calls; a part of a model that was not called keeps all
    calls = torch.maximum(module.num_batches_tracked - updates, (module.running_mean != mean).any())
    return torch.as_tensor((1 - module.momentum) ** calls.to(mean))


def seen(saving: Saving) -> dict[Any, Seen]:
    """What passed through each layer since its statistics were saved; not finite if they have not moved."""
    result = {}
    for layer in moved_layers([saving]):
        module, kept = layer.module, share_kept(layer)
        mean = (module.running_mean - kept * layer.mean) / (1 - kept)
        var = ((module.running_var - kept * layer.var) / (1 - kept)).clamp(min=0)
        result[module] = Seen(mean, var, 0 if module.momentum is None else saving.values.get(module, 0))
    return result


def measured(iterate: Seen, average: Seen, eps: float) -> Correction | None:
    """From the same minibatch at the iterates and at the averaged weights; None if it is not finite."""
    trust = torch.tensor(average.values / (average.values + ITERATES_WORTH)).to(average.mean)
    correction = Correction(average.mean - iterate.mean, (average.var + eps) / (iterate.var + eps), trust)
    return correction if bool((correction.shift + correction.factor).isfinite().all()) else None


def correct(layer: Layer, correction: Correction, average: Seen | None) -> None:
    """Let statistics move as if the layer had met the averaged weights; `average` is what it saw there, if it did."""
    module, kept = layer.module, share_kept(layer)
    shift, factor, trust = (each.to(layer.mean) for each in correction)
    old = kept * layer.var
    mean, var = module.running_mean + (1 - kept) * shift, old + factor * (module.running_var - old).clamp(min=0)
    mean, var = torch.lerp(mean, layer.mean, trust), torch.lerp(var, layer.var, trust)
    if average is not None:
        mean, var = torch.lerp(mean, average.mean, trust), torch.lerp(var, average.var, trust)
    module.running_mean.copy_(mean)
    module.running_var.copy_(var)
