"""The part of a parameter and its state that a step touches: their own memory where possible, copies to be put back
where not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.options import Options
from vsgd.torch.update import Slots

NATIVE = (torch.float32, torch.float64)
"""Precisions that the loops run in. Others are computed, and remembered, in float32."""

LIKE_PARAMETER = Slots._fields[:-1]
"""All of the state but `seen` has the parameter's shape."""


class Window(NamedTuple):
    """Contiguous tensors to work on. `rows` are those of a table that were touched; None means all of the parameter."""

    theta: Tensor
    average: Tensor | None
    slots: Slots
    rows: Tensor | None


def precision(parameter: Tensor) -> torch.dtype:
    return parameter.dtype if parameter.dtype in NATIVE else torch.float32


def new_state(parameter: Tensor, options: Options, apart: bool) -> dict[str, Tensor]:
    """The state before the first sample. With `apart` the samples of every row are counted apart."""

    def zeros(shape: Any) -> Tensor:
        return torch.zeros(shape, dtype=precision(parameter), device=parameter.device)

    state = {name: zeros(parameter.shape) for name in LIKE_PARAMETER}
    state["seen"] = zeros(parameter.shape[0] if apart else 1)
    if not by_rows(state):
        state["memory"].fill_(options.memory)
    return state


def by_rows(state: dict[str, Tensor]) -> bool:
    return state["seen"].numel() > 1


def count_by_rows(state: dict[str, Tensor], parameter: Tensor) -> None:
    """From now on, count the samples of every row apart."""
    if not by_rows(state):
        state["seen"] = state["seen"].expand(parameter.shape[0]).clone()


def conform(parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Let the state follow a parameter that was given another precision or device; loops trust what they are told."""
    for name, tensor in state.items():
        dtype = parameter.dtype if name == "iterate" else precision(parameter)
        if tensor.dtype != dtype or tensor.device != parameter.device:
            state[name] = tensor.to(parameter.device, dtype)


def average_in(state: dict[str, Tensor]) -> Tensor | None:
    """The average of the iterates, during a step."""
    return state.get("average", state.get("iterate"))


def touched(tensor: Tensor, parameter: Tensor, rows: Tensor | None) -> Tensor:
    """The touched rows of a tensor shaped like the parameter, in the precision of the loops."""
    tensor = tensor.detach() if rows is None else tensor.detach().index_select(0, rows)
    return tensor.to(precision(parameter)).contiguous()


def open_window(parameter: Tensor, state: dict[str, Tensor], rows: Tensor | None, options: Options) -> Window:
    average = average_in(state)
    slots = Slots(*(state[name] for name in Slots._fields))
    tensors = (parameter, *slots) if average is None else (parameter, average, *slots)
    if rows is None and parameter.dtype in NATIVE and all(tensor.is_contiguous() for tensor in tensors):
        window = Window(parameter, average, slots, None)
    else:
        seen = state["seen"] if rows is None else state["seen"].index_select(0, rows)
        window = Window(
            theta=touched(parameter, parameter, rows),
            average=None if average is None else touched(average, parameter, rows),
            slots=Slots(**{name: touched(state[name], parameter, rows) for name in LIKE_PARAMETER}, seen=seen),
            rows=rows,
        )
    if by_rows(state):
        # a row that was never touched has its memory set now: a large table is not written just to say so
        memory = window.slots.memory.view(window.slots.seen.numel(), parameter.shape[1:].numel())
        memory.add_((window.slots.seen == 0)[:, None] * (options.memory - memory))
    return window


def look_again(window: Window, parameter: Tensor) -> Window:
    """The same window on what the parameter holds now, rounded to its precision."""
    return window if window.theta is parameter else window._replace(theta=touched(parameter, parameter, window.rows))


def put_back_theta(window: Window, parameter: Tensor, theta: Tensor) -> None:
    """Write values for the window's part of the parameter, unless they are in its memory already."""
    if window.rows is not None:
        parameter.index_copy_(0, window.rows, theta.view(-1, *parameter.shape[1:]).to(parameter.dtype))
    elif theta.data_ptr() != parameter.data_ptr():
        parameter.copy_(theta.view(parameter.shape))
    else:
        torch.autograd.graph.increment_version(parameter)  # compiled loops write behind autograd's back


def put_back_state(window: Window, parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Write copies back; of a window that is the parameter itself there are none."""
    if window.theta is parameter:
        return
    for name, part in zip(Slots._fields, window.slots, strict=True):
        if window.rows is not None:
            state[name].index_copy_(0, window.rows, part.view(-1, *state[name].shape[1:]))
        elif part.data_ptr() != state[name].data_ptr():
            state[name] = part.view(state[name].shape)
    average = average_in(state)
    if window.average is not None and average is not None:
        if window.rows is not None:
            average.index_copy_(0, window.rows, window.average.to(average.dtype))
        elif window.average.data_ptr() != average.data_ptr():
            average.copy_(window.average)
        if "average" in state:
            state["iterate"].copy_(average)
