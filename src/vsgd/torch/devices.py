"""What a device can do, its random numbers, and the threads of the CPU.

Tensors on a CPU are computed by compiled loops, those on any other device by functions of whole tensors. Other modules
only distinguish the CPU from the rest.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RandomState = Mapping[torch.device, Tensor]
"""The states of random generators, that of the CPU always included."""

CPU = torch.device("cpu")


@functools.cache
def runs_on(kind: str, operation: Callable[[Tensor], Any], dtype: torch.dtype) -> bool:
    """Return whether a kind of device, such as "cuda", has an operation on matrices. It is tried once."""
    if kind in ("cpu", "meta"):
        return True
    try:
        matrix = torch.eye(2, dtype=dtype, device=kind)
        operation(matrix + matrix)
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
    return torch.float64 if runs_on(device.type, torch.linalg.vector_norm, torch.float64) else torch.float32


def for_factorization(matrix: Tensor) -> Tensor:
    """Return a matrix where it can be factorized: a copy on the CPU if its device cannot do so."""
    operations = torch.linalg.qr, torch.geqrf
    return matrix if all(runs_on(matrix.device.type, each, torch.float32) for each in operations) else matrix.cpu()


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
    known = dict(enumerate(numbers))
    for device in {number.device for number in numbers if isinstance(number, Tensor) and not number.is_cpu}:
        own = [k for k, number in enumerate(numbers) if isinstance(number, Tensor) and number.device == device]
        values = torch.stack([numbers[k].to(sum_dtype(device)) for k in own]).tolist()
        known.update(zip(own, values, strict=True))
    return [float(number) for number in known.values()]


# --- threads of the CPU -----------------------------------------------------------------------------------------------

PARTS_PER_THREAD = 8
"""A range is shared in this many times as many parts as there are threads, since some threads are slower."""

OPENMP_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def share_range(call: Callable[[int, int], None], length: int, threads: int) -> None:
    """Call a function with parts of the range from 0 to `length`, in several threads at the same time.

    Each thread takes the next part when it has finished one. The calling thread is one of them.

    Args:
        call: takes the begin and the end of a part. It should release the GIL, as compiled code does.
        length: length of the range.
        threads: number of threads.
    """
    count = threads * PARTS_PER_THREAD
    edges = itertools.pairwise(length * k // count for k in range(count + 1))
    parts = iter([(begin, end) for begin, end in edges if begin < end])
    errors: list[BaseException] = []

    def work(_: Any = None) -> None:
        try:
            for begin, end in parts:
                call(begin, end)
        except BaseException as error:  # it would be lost in a callback
            errors.append(error)

    run_on_openmp = openmp_parallel()
    if threads == 1:
        call(0, length)
    elif run_on_openmp is not None:
        run_on_openmp(OPENMP_FUNCTION(work), None, threads, 0)
    else:
        tasks = [pool(threads - 1).submit(work) for _ in range(threads - 1)]
        work()
        wait(tasks)
    if errors:
        raise errors[0]


@functools.cache
def openmp_parallel() -> Any:
    """Return the function `GOMP_parallel` of the OpenMP library of torch; None if there is none.

    It runs a function on the threads of torch. These keep their cores busy for some milliseconds after an operation of
    torch, and other threads would have to share the cores with them. Compilers call this function: the OpenMP libraries
    of GNU, Intel and LLVM on Linux have it. Its arguments are a function, a pointer that the function is called with,
    the number of threads, and flags.
    """
    try:
        return ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None


@functools.cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="vsgd")
