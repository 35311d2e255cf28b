"""Arguments of `VSGD` with their checks: settings of its groups, what a sample is, and parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vsgd.torch.closures import warn
from vsgd.torch.distributed import AVERAGED, Replicas, check_replicas, check_sharding, is_sharded, local_of

LEFTOVER_LR = 0.05
"""A factor on the rates below this is more likely a learning rate left over from another optimizer."""

LEFTOVER_STEPS = 20
"""A schedule that has `lr` below `LEFTOVER_LR` for this many steps was probably made for another optimizer."""

LEFTOVER = (
    "{what} multiplies the learning rates that VSGD finds, so training hardly moves. If it is a learning rate or a "
    "schedule for another optimizer, remove it."
)


class Rows(NamedTuple):
    """Setting of `VSGD`: every row of the minibatch is a sample, as in the paper.

        VSGD(model.parameters(), per_sample=Rows(model, reduction="sum"))

    Args:
        model: the model whose parameters are trained.
        reduction: whether the loss is the "mean" or the "sum" over the rows.
        reweight: whether each row is weighted by one over the number of rows whose gradients interfere with its own
            (section 4.1 of the paper).
    """

    model: nn.Module
    reduction: Literal["mean", "sum"] = "mean"
    reweight: bool = False


DEPRECATED = ("reduction", "reweight", "samples", "reduce_dtype", "process_group")
"""Arguments of version 0.2. The first two are fields of `Rows` now, the others of `Replicas`."""


def check_sampling(
    per_sample: nn.Module | Rows | None, distributed: Replicas | None, old: dict[str, Any]
) -> tuple[Rows | None, Replicas]:
    """Return the settings of what a sample is, or raise if they do not fit together.

    Args:
        per_sample: argument of `VSGD`.
        distributed: argument of `VSGD`.
        old: deprecated arguments.
    """
    unknown = old.keys() - set(DEPRECATED)
    if unknown:
        raise TypeError(f"VSGD got an unexpected argument {min(unknown)!r}")
    rows = Rows(per_sample) if isinstance(per_sample, nn.Module) else per_sample
    if rows is not None and not (isinstance(rows, Rows) and isinstance(rows.model, nn.Module)):
        raise TypeError(f"per_sample is {per_sample!r}, it must be a model or a vsgd.torch.Rows")
    given = {name: old[name] for name in DEPRECATED if old.get(name) is not None}
    rows = translate_rows({name: given.pop(name) for name in DEPRECATED[:2] if name in given}, rows)
    distributed = translate_replicas(given, distributed)
    if rows is not None and rows.reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {rows.reduction!r}, it must be 'mean' or 'sum'")
    replicas = AVERAGED if distributed is None else check_replicas(distributed)
    if replicas.as_samples and rows is not None:
        raise ValueError("with per_sample every row is a sample, so replicas cannot be: Replicas(as_samples=False)")
    return rows, replicas


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
    """Return the setting of replicas that deprecated arguments stand for."""
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
    """Raise unless `lr`, `weight_decay` and `steps_per_epoch` of a group are possible."""
    for name in ("lr", "weight_decay"):
        try:
            value = float(group[name])
        except (TypeError, ValueError):
            raise ValueError(f"{name} is {group[name]!r}, it must be a number") from None
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value:g}, it must be finite and at least 0")
    check_steps_per_epoch(group["steps_per_epoch"])


def check_steps_per_epoch(value: Any) -> None:
    """Raise unless the value is None or a number of steps."""
    if value is not None and not (isinstance(value, int | float) and 1 <= value < math.inf):
        raise ValueError(
            f"steps_per_epoch is {value!r}; it must be the number of steps in which all training data are seen once, "
            "at least 1, for example len(loader). Leave it out if data are not repeated."
        )


class LearningRateWatch:
    """Warns once of an `lr` that was probably chosen for another optimizer."""

    def __init__(self) -> None:
        self._largest = 0.0

    def see_new_group(self, lr: Any) -> None:
        """Warn if a new group has a small `lr`."""
        if isinstance(lr, float) and 0 < lr < LEFTOVER_LR:
            self._largest = LEFTOVER_LR  # one warning is enough
            warn(LEFTOVER.format(what=f"lr={lr:g}"))

    def see_step(self, groups: list[dict[str, Any]]) -> None:
        """Raise if a setting is impossible. Warn if `lr` was small in all of the first steps."""
        for group in groups:
            check_settings(group)
        self._largest = max(self._largest, *(float(group["lr"]) for group in groups))
        if groups[0]["steps"] == LEFTOVER_STEPS and 0 < self._largest < LEFTOVER_LR:
            what = f"an lr of at most {self._largest:g} in the first {LEFTOVER_STEPS} steps"
            warn(LEFTOVER.format(what=what))


# --- parameters -------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where the elements of a tensor are in memory. All numbers but those of `shape` are bytes."""

    start: int
    end: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


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
    """Refuse parameter groups that cannot be optimized.

    Raises:
        TypeError: a parameter is complex, has no floating-point numbers, or is sharded in a way that is not supported.
        ValueError: elements of parameters share memory.
    """
    spaces: dict[Any, dict[str, Layout]] = {}
    for name, parameter in named_parameters(groups):
        if parameter.is_complex() or (parameter.requires_grad and not parameter.is_floating_point()):
            raise TypeError(f"a parameter is {parameter.dtype}; VSGD takes real numbers, so split a complex one in two")
        if is_sharded(parameter):
            check_sharding(parameter)
        if is_lazy(parameter):  # it has no memory yet
            continue
        part = local_of(parameter)
        if part.numel() and part.device.type != "meta" and part.data_ptr():
            spaces.setdefault(address_space(part), {})[name] = layout_of(part)
    for layouts in spaces.values():
        check_memory(layouts)


def check_initialized(parameters: list[Tensor]) -> None:
    """Refuse parameters of lazy modules that have not been called yet."""
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


def check_memory(layouts: dict[str, Layout]) -> None:
    """Raise ValueError if any two elements of these tensors, of one address space, share memory."""
    for name, layout in layouts.items():
        if overlaps_itself(layout):
            steps = [stride // layout.item for stride in layout.strides]
            raise ValueError(
                f"{name}, of shape {list(layout.shape)} and strides {steps}, overlaps itself: some elements share "
                "memory. Give it memory of its own: nn.Parameter(parameter.detach().clone())"
            )
    pair = find_overlap(list(layouts.values()))
    if pair is not None:
        first, second = (list(layouts)[k] for k in pair)
        raise ValueError(f"{first} and {second} share memory; tie weights by using one parameter in both places")


def address_space(tensor: Tensor) -> Any:
    """Return a key for tensors whose addresses can be compared.

    Addresses on the CPU are those of memory, and storages may overlap there, as those of NumPy arrays do. On other
    devices an address may be that of an object which stands for the memory. Only tensors of one storage are compared
    there.
    """
    return "cpu" if tensor.is_cpu else (tensor.device, tensor.untyped_storage().data_ptr())


def layout_of(tensor: Tensor) -> Layout:
    item, start = tensor.element_size(), tensor.data_ptr()
    shape, strides = tuple(tensor.shape), tuple(item * stride for stride in tensor.stride())
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return Layout(start, start + last + item, item, shape, strides)


def overlaps_itself(layout: Layout) -> bool:
    """Return whether two elements of a tensor share memory."""
    extent = layout.item
    for stride, size in sorted(zip(layout.strides, layout.shape, strict=True)):
        if size > 1 and stride < extent:
            break
        extent += (size - 1) * stride
    else:
        return False  # each axis steps over all that the axes of smaller strides cover
    elements, places = math.prod(layout.shape), (layout.end - layout.start) // layout.item
    if elements > places:
        return True
    owners = np.zeros(places, np.int32)
    elements_of(layout, owners, layout.start, layout.item)[...] = 1
    return int(np.count_nonzero(owners)) < elements


def find_overlap(layouts: list[Layout]) -> tuple[int, int] | None:
    """Return the indices of two tensors that share memory, or None. No tensor may overlap itself.

    Tensors whose address ranges are disjoint share nothing. Where ranges overlap, as those of `b[::2]` and `b[1::2]`,
    every element is compared.
    """
    cluster: list[int] = []
    end = 0
    for k in sorted(range(len(layouts)), key=lambda k: layouts[k].start):
        if layouts[k].start >= end:
            if (pair := find_overlap_of_elements(layouts, cluster)) is not None:
                return pair
            cluster = []
        cluster.append(k)
        end = max(end, layouts[k].end)
    return find_overlap_of_elements(layouts, cluster)


def find_overlap_of_elements(layouts: list[Layout], indices: list[int]) -> tuple[int, int] | None:
    """Return two of these indices whose tensors share memory, or None, by marking the owner of every element."""
    if len(indices) < 2:
        return None
    chosen = [layouts[k] for k in indices]
    start, end = min(each.start for each in chosen), max(each.end for each in chosen)
    unit = math.gcd(*(number for each in chosen for number in (each.item, each.start - start)))
    owners = np.zeros((end - start) // unit, np.int32)
    for number, layout in enumerate(chosen):
        elements = elements_of(layout, owners, start, unit)
        if (other := int(elements.max())) > 0:
            first, second = sorted((indices[other - 1], indices[number]))
            return first, second
        elements[...] = number + 1
    return None


def elements_of(layout: Layout, owners: np.ndarray[Any, Any], start: int, unit: int) -> np.ndarray[Any, Any]:
    """Return the view of `owners`, one entry for each `unit` of memory from `start`, that a tensor occupies."""
    entries = owners[(layout.start - start) // unit :]
    strides = [stride // unit * owners.itemsize for stride in layout.strides]
    return np.lib.stride_tricks.as_strided(entries, (*layout.shape, layout.item // unit), (*strides, owners.itemsize))
