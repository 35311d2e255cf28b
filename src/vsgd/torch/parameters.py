"""Checks of the parameters that an optimizer is given: real numbers, each with memory of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.parameter import is_lazy

from vsgd.torch.distributed import check_sharding, is_sharded, local_of


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
