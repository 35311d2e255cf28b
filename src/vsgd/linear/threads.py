"""Large minibatches on several threads.

`kernel.train` runs interpreted here, and the compiled functions that it calls are spread if they take a range. Those
treat rows, slots or coordinates each by itself, and what is added up over rows is added up by one thread in their
order, so that the number of threads does not change a bit of the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from vsgd.kernels import calling, kept
from vsgd.linear import kernel
from vsgd.options import Options

WORTHWHILE = 1024
"""Rows of a minibatch below which handing out the work takes longer than it saves."""


def spread(phase: Callable[..., None], pool: ThreadPoolExecutor, parts: int) -> Callable[..., None]:
    """The same phase on threads, each with a part of the range."""

    def run(first: int, last: int, *arguments: Any) -> None:
        edges = np.linspace(first, last, parts + 1).astype(int).tolist()
        own, *others = pairwise(edges)
        tasks = [pool.submit(phase, *part, *arguments) for part in others]
        phase(*own, *arguments)
        for task in tasks:
            task.result()

    return run


def train(threads: int, options: Options, *arguments: Any) -> float:
    """`kernel.train` on so many threads."""
    with ThreadPoolExecutor(threads - 1) as pool:

        def compiled(function: Callable[..., Any], **constants: Any) -> Callable[..., Any]:
            takes_range = [*inspect.signature(function).parameters][:2] == ["first", "last"]
            return spread(kept(function, **constants), pool, threads) if takes_range else kept(function, **constants)

        return float(calling(kernel.train, compiled, OPTIONS=options)(*arguments))
