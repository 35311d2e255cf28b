"""What a device can do, and its random numbers. Other modules only tell the CPU from the rest.

Tensors on a CPU are computed by compiled loops, those on any other device by functions of whole tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RandomState = Mapping[torch.device, Tensor]
"""The states of random generators, that of the CPU always included."""

CPU = torch.device("cpu")


@functools.cache
def runs_on(kind: str, operation: str, dtype: torch.dtype) -> bool:
    """Return whether a kind of device, such as "cuda", has an operation of `torch.linalg`. It is tried once."""
    if kind in ("cpu", "meta"):
        return True
    try:
        matrix = torch.eye(2, dtype=dtype, device=kind)
        getattr(torch.linalg, operation)(matrix + matrix)
    except (TypeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True


@functools.cache
def multiplies_bfloat16(kind: str) -> bool:
    """Return whether a kind of device has instructions for products of matrices in bfloat16, as far as is known."""
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        flags = Path("/proc/cpuinfo").read_text().split() if kind == "cpu" else []
    except OSError:  # not on Linux
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the precision of counts and of sums over many coordinates: float64 where the device has it.

    Apple's MPS and some GPUs of Intel have no float64.
    """
    return torch.float64 if runs_on(device.type, "vector_norm", torch.float64) else torch.float32


def for_factorization(matrix: Tensor) -> Tensor:
    """Return a matrix where it can be factorized: a copy on the CPU if its device has no `torch.linalg.qr`."""
    return matrix if runs_on(matrix.device.type, "qr", torch.float32) else matrix.cpu()


def address_space(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors whose addresses can be compared; None for a tensor without memory.

    CPU storages may overlap, as those of NumPy arrays do. The address of a tensor on another device may be that of an
    object which stands for its memory, so only tensors of one storage are compared there.
    """
    if not tensor.numel() or tensor.device.type == "meta" or not tensor.data_ptr():
        return None
    return "cpu" if tensor.is_cpu else (tensor.device, tensor.untyped_storage().data_ptr())


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
    on_devices = {number.device for number in numbers if isinstance(number, Tensor) and not number.is_cpu}
    found: dict[int, float] = {}
    for device in on_devices:
        own = [k for k, number in enumerate(numbers) if isinstance(number, Tensor) and number.device == device]
        values = torch.stack([numbers[k].to(sum_dtype(device)) for k in own]).tolist()
        found.update(zip(own, values, strict=True))
    return [found[k] if k in found else float(number) for k, number in enumerate(numbers)]
