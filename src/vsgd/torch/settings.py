"""Check the arguments of `VSGD`: settings of its groups, the definition of a sample, and parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vsgd.torch.closures import warn
from vsgd.torch.devices import address_space
from vsgd.torch.distributed.messages import Replicas
from vsgd.torch.distributed.shards import check_sharding, is_sharded, local_of

LEFTOVER_LR = 0.05
"""A factor on the rates below this is more likely a learning rate left over from another optimizer."""

LEFTOVER_STEPS = 20
"""A schedule that has `lr` below `LEFTOVER_LR` for this many steps was probably made for another optimizer."""

LEFTOVER = (
    "{what} multiplies the learning rates that VSGD estimates, so training makes little progress. If it is a learning "
    "rate or a schedule for another optimizer, remove it."
)


class Rows(NamedTuple):
    """Setting of `VSGD`: every row of the minibatch is a sample, as in the paper.

        VSGD(model.parameters(), per_sample=Rows(model, reduction="sum"))

    Args:
        model: the model whose parameters are trained.
        reduction: "mean" if the loss is a mean over the rows, "sum" if it is a sum.
        reweight: whether to give a row less weight if its gradient is similar to those of other rows. Its weight is
            one over the sum of the absolute cosines between its gradient and the gradients of all rows (section 4.1
            of the paper).
    """

    model: nn.Module
    reduction: Literal["mean", "sum"] = "mean"
    reweight: bool = False


OLD_OF_ROWS = ("reduction", "reweight")
OLD_OF_REPLICAS = ("samples", "reduce_dtype", "process_group")
"""Deprecated arguments of `VSGD` in version 0.2, which are fields of `Rows` and `Replicas` now."""


def check_sampling(
    per_sample: nn.Module | Rows | None, distributed: Replicas | None, old: dict[str, Any]
) -> tuple[Rows | None, Replicas]:
    """Return the settings that define a sample, from arguments of `VSGD`, of which `old` are deprecated.

    Raises:
        TypeError: an argument has the wrong type, or is unknown.
        ValueError: a setting is impossible, or two exclude each other.
    """
    if unknown := old.keys() - {*OLD_OF_ROWS, *OLD_OF_REPLICAS}:
        raise TypeError(f"VSGD got an unexpected argument {min(unknown)!r}")
    rows = Rows(per_sample) if isinstance(per_sample, nn.Module) else per_sample
    if rows is not None and not (isinstance(rows, Rows) and isinstance(rows.model, nn.Module)):
        raise TypeError(f"per_sample is {per_sample!r}, it must be a model or a vsgd.torch.Rows")
    rows = translate_rows({name: old[name] for name in OLD_OF_ROWS if old.get(name) is not None}, rows)
    given = {name: old[name] for name in OLD_OF_REPLICAS if old.get(name) is not None}
    distributed = translate_replicas(given, distributed)
    if rows is not None and rows.reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {rows.reduction!r}, it must be 'mean' or 'sum'")
    if distributed is None:  # gradients are averaged over all processes before VSGD receives them
        return rows, Replicas(as_samples=False)
    if not isinstance(distributed, Replicas):
        raise TypeError(f"distributed is {distributed!r}, it must be a vsgd.torch.Replicas")
    if distributed.reduce_dtype not in (None, torch.bfloat16):
        raise ValueError(f"reduce_dtype is {distributed.reduce_dtype}, it must be torch.bfloat16 or left out")
    if distributed.reduce_dtype is not None and not distributed.as_samples:
        raise ValueError("reduce_dtype is the precision of moments of samples, so it needs Replicas(as_samples=True)")
    if distributed.as_samples and rows is not None:
        raise ValueError("with per_sample every row is a sample, so replicas cannot be: Replicas(as_samples=False)")
    return rows, distributed


def translate_rows(old: dict[str, Any], rows: Rows | None) -> Rows | None:
    """Return the setting of rows with deprecated arguments."""
    if not old:
        return rows
    arguments = ", ".join(f"{name}={value!r}" for name, value in old.items())
    warn(f"VSGD({arguments}) is deprecated; use per_sample=vsgd.torch.Rows(model, {arguments})", DeprecationWarning)
    if rows is None and old.get("reweight"):
        raise ValueError("reweight needs the model: per_sample=vsgd.torch.Rows(model, reweight=True)")
    return rows and rows._replace(**old)


def translate_replicas(old: dict[str, Any], distributed: Replicas | None) -> Replicas | None:
    """Return the setting of replicas that replaces deprecated arguments."""
    if not old:
        return distributed
    samples = old.pop("samples", "minibatch")
    if samples not in ("minibatch", "replicas"):
        raise ValueError(f"samples is {samples!r}, it must be 'minibatch' or 'replicas'")
    replicas = {"as_samples": samples == "replicas", **old}
    arguments = ", ".join(f"{name}={value!r}" for name, value in replicas.items())
    warn(
        "the arguments samples, reduce_dtype and process_group of VSGD are deprecated; use "
        f"distributed=vsgd.torch.Replicas({arguments})",
        DeprecationWarning,
    )
    return Replicas(**replicas)


def check_settings(group: dict[str, Any]) -> None:
    """Raise ValueError unless the settings of a group that users may change are in their ranges."""
    for name in ("lr", "weight_decay"):
        try:
            value = float(group[name])
        except (OverflowError, RuntimeError, TypeError, ValueError):  # a tensor of several numbers: RuntimeError
            raise ValueError(f"{name} is {group[name]!r}, it must be a number") from None
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value:g}, it must be finite and at least 0")
    steps = group["steps_per_epoch"]
    if steps is not None and not (isinstance(steps, int | float) and 1 <= steps < math.inf):
        raise ValueError(
            f"steps_per_epoch is {steps!r}; it must be the number of steps in which all training data are seen once, "
            "at least 1, for example len(loader). Leave it out if data are not repeated."
        )
    check_flag("maximize", group["maximize"])


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless a setting is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, it must be True or False")


class LearningRateWatch:
    """Warns once about an `lr` that was probably chosen for another optimizer."""

    def __init__(self) -> None:
        self._largest = 0.0

    def see_new_group(self, lr: Any) -> None:
        """Warn if a new group has a small `lr`."""
        if isinstance(lr, float) and 0 < lr < LEFTOVER_LR:
            self._largest = LEFTOVER_LR  # one warning is enough
            warn(LEFTOVER.format(what=f"lr={lr:g}"))

    def see_step(self, groups: list[dict[str, Any]]) -> None:
        """Raise ValueError for a setting outside its range. Warn if `lr` was small in all of the first steps."""
        for group in groups:
            check_settings(group)
        self._largest = max(self._largest, *(float(group["lr"]) for group in groups))
        if groups[0]["steps"] == LEFTOVER_STEPS and 0 < self._largest < LEFTOVER_LR:
            what = f"an lr of at most {self._largest:g} in the first {LEFTOVER_STEPS} steps"
            warn(LEFTOVER.format(what=what))


# --- parameters -------------------------------------------------------------------------------------------------------


def check_listed_once(params: list[Any]) -> None:
    """Raise ValueError if a list of parameters, or of pairs of a name and a parameter, contains one of them twice."""
    places: dict[int, int] = {}
    for place, each in enumerate(params):
        parameter = each[1] if isinstance(each, tuple) else each
        first = places.setdefault(id(parameter), place)
        if first != place:
            raise ValueError(
                f"a parameter appears twice in the list of parameters, at positions {first} and {place}; list it once, "
                "however many layers use it"
            )


def check_parameters(groups: list[dict[str, Any]]) -> None:
    """Check that parameter groups can be optimized.

    Raises:
        TypeError: a parameter is complex, has no floating-point numbers, or is sharded in a way that is not supported.
        ValueError: elements of parameters share memory.
    """
    spaces: dict[Any, dict[str, Tensor]] = {}
    for name, parameter in named_parameters(groups):
        if not isinstance(parameter, Tensor):
            raise TypeError(f"{name} is {type(parameter).__name__}, it must be a tensor")
        if parameter.is_complex() or (parameter.requires_grad and not parameter.is_floating_point()):
            raise TypeError(f"a parameter is {parameter.dtype}; VSGD takes real numbers, so split a complex one in two")
        if is_sharded(parameter):
            check_sharding(parameter)
        if is_lazy(parameter):  # it has no memory yet
            continue
        part = local_of(parameter).detach()
        if (space := address_space(part)) is not None:
            spaces.setdefault(space, {})[name] = part
    for parts in spaces.values():
        check_memory(parts)


def check_initialized(parameters: list[Tensor]) -> None:
    """Raise RuntimeError if parameters belong to lazy modules that have not been called yet."""
    if lazy := sum(map(is_lazy, parameters)):
        raise RuntimeError(
            f"{lazy} of {len(parameters)} parameters have no shape yet, because their lazy modules have not been "
            "called; call the model once before the first step: model(x)"
        )


def named_parameters(groups: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter with a name for messages."""
    for number, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            name = f"parameter {index} of group {number}"
            yield (f"{name} ({group['param_names'][index]})" if "param_names" in group else name), parameter


def check_memory(parts: dict[str, Tensor]) -> None:
    """Raise ValueError if any two elements of these tensors, whose addresses are comparable, share memory.

    Tensors whose address ranges are disjoint share nothing. Where ranges overlap, as those of `b[::2]` and `b[1::2]`,
    every element is compared.
    """
    cluster: dict[str, Tensor] = {}
    end = 0
    for name, part in sorted(parts.items(), key=lambda item: item[1].data_ptr()):
        if part.data_ptr() >= end:
            check_elements(cluster)
            cluster = {}
        cluster[name] = part
        end = max(end, end_of(part))
    check_elements(cluster)


def end_of(part: Tensor) -> int:
    """Return the address of the first byte after a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.data_ptr() + (last + 1) * part.element_size()


def has_nested_axes(part: Tensor) -> bool:
    """Return whether each axis steps over all that the axes of smaller strides cover. Then no elements overlap."""
    extent = 1
    for stride, size in sorted(zip(part.stride(), part.shape, strict=True)):
        if size > 1 and stride < extent:
            return False
        extent += (size - 1) * stride
    return True


def check_elements(parts: dict[str, Tensor]) -> None:
    """Raise ValueError if elements of these tensors share memory, by marking the owner of each element in an array."""
    if all(map(has_nested_axes, parts.values())) and len(parts) < 2:
        return
    start, end = min(part.data_ptr() for part in parts.values()), max(map(end_of, parts.values()))
    unit = math.gcd(*(n for part in parts.values() for n in (part.element_size(), part.data_ptr() - start)))
    owners = np.zeros((end - start) // unit, np.int32)
    for number, (name, part) in enumerate(parts.items(), start=1):
        item = part.element_size() // unit
        memory = owners[(part.data_ptr() - start) // unit : (end_of(part) - start) // unit]
        strides = (*(stride * item * owners.itemsize for stride in part.stride()), owners.itemsize)
        elements = np.lib.stride_tricks.as_strided(memory, (*part.shape, item), strides)
        overlaps_itself = elements.size > memory.size  # an expanded tensor may have too many elements to mark
        if not overlaps_itself:
            if owner := int(elements.max()):
                other = list(parts)[owner - 1]
                raise ValueError(f"{other} and {name} share memory; tie weights by using one parameter in both places")
            elements[...] = number
            overlaps_itself = bool(np.count_nonzero(memory == number) < elements.size)
        if overlaps_itself:
            raise ValueError(
                f"{name}, of shape {list(part.shape)} and strides {list(part.stride())}, overlaps itself: some of its "
                "elements share memory. Give it memory of its own: nn.Parameter(parameter.detach().clone())"
            )
