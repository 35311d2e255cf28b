"""Mistakes that are better told at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Closure = Callable[[], Any]

NO_CLOSURE = """VSGD takes a second gradient where it needs one, so step() wants a function that computes the loss:

    def closure():
        opt.zero_grad()
        loss = ...
        loss.backward()
        return loss

    opt.step(closure)"""


def checked_closures(closure: Closure | Sequence[Closure] | None) -> list[Closure]:
    closures = list(closure) if isinstance(closure, Sequence) else [closure]
    if not closures or not all(callable(each) for each in closures):
        raise TypeError(NO_CLOSURE)
    return closures  # type: ignore[return-value]


def check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"the closure returned {type(loss).__name__}; it must end with `return loss`, a tensor")
    if loss.numel() != 1:
        raise ValueError(f"the closure returned a loss of shape {tuple(loss.shape)}; take its mean or sum")


def check_parameters(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        if parameter.is_complex() or (parameter.requires_grad and not parameter.is_floating_point()):
            raise TypeError(f"a parameter is {parameter.dtype}; VSGD takes real numbers, so split a complex one in two")
    places = [(p.device, p.data_ptr()) for p in parameters if p.numel() and p.device.type != "meta"]
    if len(set(places)) < len(places):
        raise ValueError("two parameters share memory; tie weights by using one parameter twice")
