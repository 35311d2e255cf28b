"""A parameter and its state as rows × columns: their own memory where possible, copies to be put back where not."""

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
    """What the loops work on. `rows` are those of a table that were touched; None means all of the parameter."""

    theta: Tensor
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
    return len(state["seen"]) > 1


def count_by_rows(state: dict[str, Tensor], parameter: Tensor) -> None:
    """From now on, count the samples of every row apart."""
    if not by_rows(state):
        state["seen"] = state["seen"].expand(parameter.shape[0]).clone()


def rows_of(tensor: Tensor, parameter: Tensor, rows: Tensor | None, width: int) -> Tensor:
    """The touched rows of a tensor shaped like the parameter, in the precision of the loops."""
    tensor = tensor.detach() if rows is None else tensor.detach().index_select(0, rows)
    return tensor.to(precision(parameter)).contiguous().view(-1, width)


def open_window(parameter: Tensor, state: dict[str, Tensor], rows: Tensor | None, options: Options) -> Window:
    width = parameter.shape[1:].numel() if by_rows(state) else parameter.numel()
    seen = state["seen"] if rows is None else state["seen"].index_select(0, rows)
    slots = Slots(**{name: rows_of(state[name], parameter, rows, width) for name in LIKE_PARAMETER}, seen=seen)
    if by_rows(state):
        # a row that was never touched has its memory set now: a large table is not written just to say so
        slots.memory.add_((seen == 0)[:, None] * (options.memory - slots.memory))
    return Window(theta=rows_of(parameter, parameter, rows, width), slots=slots, rows=rows)


def look_again(window: Window, parameter: Tensor) -> Window:
    """The same window on what the parameter holds now, rounded to its precision."""
    return window._replace(theta=rows_of(parameter, parameter, window.rows, window.theta.shape[1]))


def put_back_theta(window: Window, parameter: Tensor, theta: Tensor) -> None:
    """Write values for the window's part of the parameter, unless they are in its memory already."""
    if window.rows is not None:
        parameter.index_copy_(0, window.rows, theta.view(-1, *parameter.shape[1:]).to(parameter.dtype))
    elif theta.data_ptr() != parameter.data_ptr():
        parameter.copy_(theta.view(parameter.shape))
    else:
        torch.autograd.graph.increment_version(parameter)  # compiled loops write behind autograd's back


def put_back_state(window: Window, state: dict[str, Tensor]) -> None:
    for name, part in zip(Slots._fields, window.slots, strict=True):
        if window.rows is not None:
            state[name].index_copy_(0, window.rows, part.view(-1, *state[name].shape[1:]))
        elif part.data_ptr() != state[name].data_ptr():
            state[name] = part.view(state[name].shape)
