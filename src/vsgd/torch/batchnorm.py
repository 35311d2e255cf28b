"""Average the running statistics of BatchNorm over the same window as the weights.

Layers are evaluated at the iterates, but used at the averaged weights. To first order, a statistic of a layer is a
linear function of the weights. Its value at the average of the iterates is then the average of its values at the
iterates. An iterate enters the average of the weights with weight 1/window, so its statistics enter the running
statistics with the same weight. This replaces the momentum of the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.torch.replay import Saving


class Layer(NamedTuple):
    """A normalization layer whose running statistics may have changed, and their earlier values."""

    module: Any
    mean: Tensor
    var: Tensor
    updates: Tensor
    """`num_batches_tracked`."""


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


def relative_weight(layer: Layer, window: float) -> Tensor:
    """Return the weight of new statistics in an average over `window`, relative to their weight in the layer's own.

    The first minibatches of a new layer are averaged with equal weights. The result is 0 if the layer was not called.
    """
    module = layer.module
    dtype = torch.promote_types(layer.mean.dtype, torch.float32)
    calls = (module.num_batches_tracked - layer.updates).to(dtype)
    weight = torch.where(calls > 0, 1 / (layer.updates + 1).to(dtype), 0).clamp(min=1 / window)
    # InstanceNorm does not count its calls
    calls = torch.maximum(calls, (module.running_mean != layer.mean).any())
    own_weight = 1 - (1 - module.momentum) ** calls
    return torch.where(own_weight > 0, weight / own_weight, 0).to(layer.mean)


def average_over_window(layer: Layer, window: float) -> None:
    """Let the last statistics of a layer enter its running statistics with weight 1/window.

    A layer without momentum keeps the plain mean over all minibatches.
    """
    module = layer.module
    if module.momentum is None:
        return
    weight = relative_weight(layer, window)
    module.running_mean.copy_(torch.lerp(layer.mean, module.running_mean, weight))
    module.running_var.copy_(torch.lerp(layer.var, module.running_var, weight).clamp(min=0))


def average_statistics(savings: Iterable[Saving], groups: list[dict[str, Any]]) -> None:
    """Average the running statistics that the first evaluations of a step have changed.

    The window of a layer is that of its weight, or of the first group if the optimizer does not train its weight.

    Args:
        savings: buffers as they were before the evaluations of the step.
        groups: parameter groups of the optimizer.
    """
    layers = moved_layers(savings)
    windows = {p: group["averaging"][0] for group in groups for p in group["params"]} if layers else {}
    for layer in layers:
        average_over_window(layer, windows.get(layer.module.weight, groups[0]["averaging"][0]))
