"""Evaluating a closure a second time as if it were the first: same dropout masks, running statistics left alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase


def living_normalisations() -> weakref.WeakSet[_NormBase]:
    """All layers with running statistics that there are.

    An optimizer is given parameters, not modules, and hooks would not see inside compiled code. Looking through all
    objects takes a tenth of a second, once.
    """
    objects, kinds = gc.get_objects(), kinds_of(_NormBase)
    return weakref.WeakSet(compress(objects, map(kinds.__contains__, map(type, objects))))


def kinds_of(kind: type) -> set[type]:
    """A class and all that derive from it."""
    return {kind}.union(*map(kinds_of, kind.__subclasses__()))


class Replay:
    """One minibatch's evaluations: `first` runs the closure, `again` runs it on the same randomness."""

    def __init__(self, devices: Iterable[torch.device], normalisations: Iterable[_NormBase]):
        self._devices = [device for device in devices if device.type == "cuda"]
        self._statistics = [buffer for layer in normalisations for buffer in layer.buffers()]
        self._original: list[Tensor] = []
        self._before: list[Tensor] = []

    def first(self, closure: Callable[[], Any]) -> Any:
        self._before = self._random_state()
        self._original = [buffer.clone() for buffer in self._statistics]
        with torch.enable_grad():
            return closure()

    def again(self, closure: Callable[[], Any]) -> Any:
        kept = [buffer.clone() for buffer in self._statistics]
        after = self._random_state()
        self._set_random_state(self._before)
        torch.clear_autocast_cache()  # it would hand out the unshifted parameters
        try:
            with torch.enable_grad():
                return closure()
        finally:
            self._set_random_state(after)
            self._put_back(kept)

    def undo(self) -> None:
        """Take back what the first evaluation did to running statistics."""
        self._put_back(self._original)

    def _put_back(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._statistics, values, strict=False):
            buffer.copy_(value)

    def _random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    def _set_random_state(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)
