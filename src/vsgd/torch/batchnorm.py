"""Average the running statistics of BatchNorm over the same window as the weights.

Layers are evaluated at the iterates, but used at the averaged weights. To first order, a statistic of a layer is a
linear function of the weights. Its value at the average of the iterates is then the average of its values at the
iterates. An iterate enters the average of the weights with weight 1/window, so its statistics enter the running
statistics with the same weight. This replaces the momentum of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.algorithms.strategy import strategy_of
from vsgd.torch.block import Group
from vsgd.torch.replay import Saving

STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}

ROUNDINGS = 8
"""Weights below this many rounding errors of the statistics are not used, since small changes would be lost."""


class Layer(NamedTuple):
    """A normalization whose running statistics may have changed, and their earlier values."""

    module: Any
    mean: Tensor
    var: Tensor
    updates: Tensor
    """`num_batches_tracked`."""
    calls: int | None
    """Number of calls in this step; None in compiled code, where they are not seen."""


def moved_layers(savings: Sequence[Saving], with_compiled: bool = True) -> list[Layer]:
    """Return layers whose statistics may have changed in these evaluations.

    Args:
        savings: what each evaluation has saved.
        with_compiled: whether to return layers of compiled modules.
    """
    found: dict[Any, Layer] = {}
    for saving in savings:
        for module, (mean, var, updates, calls) in saving.normalizations.items():
            before = found.get(module, Layer(module, mean, var, updates, 0))
            found[module] = before._replace(calls=(before.calls or 0) + calls)
    compiled: dict[Any, dict[str, Tensor]] = {}
    for saving in savings if with_compiled else ():
        for each in saving.buffers:
            if each.module not in found and each.is_statistic:
                compiled.setdefault(each.module, {}).setdefault(each.name, each.value)
    for module, values in compiled.items():
        if values.keys() >= STATISTICS:
            mean, var, updates = (values[name] for name in ("running_mean", "running_var", "num_batches_tracked"))
            found[module] = Layer(module, mean, var, updates, None)
    return list(found.values())


def relative_weight(layer: Layer, window: float) -> Tensor:
    """Return the weight of new statistics in an average over `window`, relative to their weight in the layer's own.

    The first minibatches of a new layer are averaged with equal weights. The result is 1, which changes nothing, if
    the weight of the layer's own average is too small to be divided by.
    """
    module, least = layer.module, ROUNDINGS * torch.finfo(layer.mean.dtype).eps
    counted = (module.num_batches_tracked - layer.updates).to(torch.promote_types(layer.mean.dtype, torch.float32))
    first = counted / (layer.updates + counted).clamp(min=1)  # InstanceNorm does not count its calls
    weight = first.clamp(min=max(1 / window, least))
    if layer.calls is None:
        calls = torch.maximum(counted, (module.running_mean != layer.mean).any())
    else:
        calls = torch.full_like(weight, layer.calls)
    own_weight = 1 - (1 - module.momentum) ** calls
    return torch.where(own_weight >= least, weight / own_weight, 1).to(layer.mean)


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


def window_of(group: Group) -> float | None:
    """Return the window of the average of a group; None if its iterates are not averaged."""
    averages = strategy_of(group["algorithm"]).averages_iterates(group["algorithm"])
    return float(group["averaging"][0]) if averages else None


def average_statistics(
    savings: Sequence[Saving], groups: Sequence[Group], default: Group, several_processes: bool
) -> None:
    """Average the running statistics that the first evaluations of a step have changed.

    The window of a layer is that of its weight, whichever optimizer trains it. Layers of groups whose iterates are not
    averaged keep their own average. So do layers of compiled modules in several processes: their statistics before
    the step are not known, since DistributedDataParallel replaces them.

    Args:
        savings: what each evaluation has saved.
        groups: parameter groups of this optimizer and of its companions.
        default: the group whose window is used for layers without a trained weight.
        several_processes: whether other processes train the same model.
    """
    layers = moved_layers(savings, with_compiled=not several_processes)
    if not layers:
        return
    windows = {parameter: window_of(group) for group in groups for parameter in group["params"]}
    for layer in layers:
        window = windows.get(layer.module.weight, window_of(default))
        if window is not None:
            average_over_window(layer, window)
