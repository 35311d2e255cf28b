"""Run compiled loops on several threads: those of torch if possible."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

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
