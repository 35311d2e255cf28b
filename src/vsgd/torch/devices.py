"""What a device can do, and its random numbers. Other modules only tell the CPU from the rest.

Tensors on a CPU are computed by compiled loops, those on any other device by functions of whole tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

RandomState = Mapping[torch.device, Tensor]
"""The states of random generators, that of the CPU always included."""

CPU = torch.device("cpu")


class Features(NamedTuple):
    """What a kind of device offers."""

    float64: bool
    """Apple's MPS and some GPUs of Intel have no float64."""
    qr: bool
    """Whether `torch.linalg.qr` runs on the device."""
    bfloat16: bool
    """Whether matrix products in bfloat16 are several times as fast as in float32."""


@functools.cache
def features_of(kind: str) -> Features:
    """Return what a kind of device, such as "cuda", offers. Each feature is tried once."""

    def runs(dtype: torch.dtype, operation: str) -> bool:
        try:
            matrix = torch.eye(2, dtype=dtype, device=kind)
            getattr(torch.linalg, operation)(matrix + matrix)
        except (TypeError, RuntimeError):  # NotImplementedError is a RuntimeError
            return False
        return True

    if kind in ("cpu", "meta"):
        return Features(True, True, bfloat16=kind == "cpu" and cpu_has_bfloat16())
    bfloat16 = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return Features(runs(torch.float64, "vector_norm"), runs(torch.float32, "qr"), bfloat16)


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has instructions for matrix products in bfloat16, as far as Linux tells."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the precision of counts and of sums over many coordinates: float64 where the device has it."""
    return torch.float64 if features_of(device.type).float64 else torch.float32


def for_factorization(matrix: Tensor) -> Tensor:
    """Return a matrix where it can be factorized: a copy on the CPU if its device has no `torch.linalg.qr`."""
    return matrix if features_of(matrix.device.type).qr else matrix.cpu()


def random_state(tensors: Iterable[Tensor]) -> RandomState:
    """Return the states of the random generators of the CPU and of the devices of these tensors."""
    states = {CPU: torch.get_rng_state()}
    for device in {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}:
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(states: RandomState) -> None:
    """Restore random generators."""
    for device, state in states.items():
        if device == CPU:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def read_numbers(numbers: Sequence[Any]) -> list[float]:
    """Return numbers, some of which are tensors on devices, as floats. This waits once for each device."""
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor) and not number.is_cpu:
            places.setdefault(number.device, []).append(place)
    on_devices = {place for own in places.values() for place in own}
    found = [0.0 if place in on_devices else float(number) for place, number in enumerate(numbers)]
    for device, own in places.items():
        values = torch.stack([numbers[place].to(sum_dtype(device)) for place in own]).tolist()
        for place, value in zip(own, values, strict=True):
            found[place] = value
    return found
