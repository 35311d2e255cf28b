"""Undo the changes that a second evaluation of a batch makes to the attributes of a trainer or module."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

DICTS = (dict, defaultdict, OrderedDict, Counter)
CONTAINERS = (*DICTS, list, deque, set)

MAX_FOLLOWED = 1000
"""The elements of larger containers are not copied, since these hold data rather than counters."""

PARTS_OF_MODULES = ("_parameters", "_buffers", "_modules")
"""Attributes of every `nn.Module`. The optimizer restores parameters and buffers itself."""


@contextmanager
def attributes_restored(*owners: Any) -> Iterator[None]:
    """Restore the attributes of `owners` on exit: numbers, lists, dictionaries, sets, and tensors of one element.

    Containers are restored in place, so other references to them stay valid. Other objects are not copied.
    """
    containers: dict[int, tuple[Any, Any]] = {}
    scalars: dict[int, tuple[Tensor, Tensor]] = {}
    pending: list[Any] = []
    for owner in owners:
        containers[id(vars(owner))] = (vars(owner), vars(owner).copy())
        pending += [value for name, value in vars(owner).items() if name not in PARTS_OF_MODULES]
    while pending:
        each = pending.pop()
        if isinstance(each, Tensor):
            if each.numel() == 1 and not each.requires_grad:
                scalars[id(each)] = (each, each.clone())
        elif type(each) in CONTAINERS and id(each) not in containers:
            containers[id(each)] = (each, each.copy())
            if len(each) <= MAX_FOLLOWED:
                pending += each.values() if isinstance(each, dict) else each
    try:
        yield
    finally:
        for container, content in containers.values():
            restore(container, content)
        for scalar, value in scalars.values():
            if not torch.equal(scalar, value):
                scalar.copy_(value)


def restore(container: Any, content: Any) -> None:
    """Restore the content of a container. Only changed entries of a dictionary are written."""
    if isinstance(container, dict):
        for key in container.keys() - content.keys():
            del container[key]
        for key, value in content.items():
            if key not in container or container[key] is not value:
                container[key] = value
        return
    container.clear()
    if isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)
