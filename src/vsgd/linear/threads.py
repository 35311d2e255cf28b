"""Large minibatches on several threads.

`kernel.learn` runs once more here, interpreted, with its phases compiled and spread. Rows and slots are each treated by
themselves there, and what is added up over rows is added up by one thread in their order, so that the number of threads
does not change a bit of the result.
"""

from __future__ import annotations

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

PHASES = ("load", "evaluate", "choose_shifts", "move")
"""Those of `kernel.learn` that take a range of rows or slots."""


def spread(phase: Callable[..., None], pool: ThreadPoolExecutor, parts: int) -> Callable[..., None]:
    """The same phase on threads, each with a range of rows or slots."""

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
    learn = calling(kernel.learn, kept, OPTIONS=options)
    with ThreadPoolExecutor(threads - 1) as pool:
        for name in PHASES:
            learn.__globals__[name] = spread(learn.__globals__[name], pool, threads)
        return float(calling(kernel.train, lambda _: learn)(*arguments))
