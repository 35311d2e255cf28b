"""Averaged weights without a mode.

An optimizer that calls the closure itself knows when its own weights are wanted. Between steps the state of a parameter
keeps the `iterate`, and the parameter is the average: the weights to evaluate and save. During a step they change
places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from vsgd.torch.window import NATIVE, conform, precision

State = dict[str, Tensor]


class Mark(NamedTuple):
    """How a parameter was left; different if someone has written to it since."""

    version: int
    address: int


def mark(parameter: Tensor) -> Mark:
    return Mark(parameter._version, parameter.data_ptr())


def begin(parameter: Tensor, state: State) -> None:
    """Keep an average from now on. To be called during a step: the parameter is the iterate."""
    state["iterate"] = parameter.detach().clone()
    if parameter.dtype not in NATIVE:
        # small steps of the average would be lost in the parameter's own precision
        state["average"] = parameter.detach().to(precision(parameter), copy=True)


@contextmanager
def iterates_in_place(states: dict[Tensor, State], marks: dict[Tensor, Mark]) -> Iterator[None]:
    """Within, parameters are the iterates; afterwards, averages again. `marks` are kept from step to step."""
    for parameter, state in states.items():
        conform(parameter, state)
        if "iterate" in state:
            if marks.get(parameter, mark(parameter)) != mark(parameter):
                _start_from(parameter, state)
            _swap(parameter, state)
    try:
        yield
    finally:
        for parameter, state in states.items():
            if "iterate" in state:
                _swap(parameter, state)
                marks[parameter] = mark(parameter)


def _swap(parameter: Tensor, state: State) -> None:
    """Exchange the memory of the two; nothing is copied."""
    parameter.data, state["iterate"] = state["iterate"], parameter.data
    torch.autograd.graph.increment_version(parameter)


def _start_from(parameter: Tensor, state: State) -> None:
    """Someone has set the weights: go on from there."""
    state["iterate"].copy_(parameter)
    if "average" in state:
        state["average"].copy_(parameter)
