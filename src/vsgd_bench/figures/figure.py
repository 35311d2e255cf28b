"""The structure of a figure: parts to compute, a function that draws them, and key numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure as Canvas

from vsgd_bench.baselines import Algorithm
from vsgd_bench.problems import Elementary
from vsgd_bench.simulate import draw_noise, powers_of_two, simulate
from vsgd_bench.store import Arrays

BLUE, RED, GREEN, ORANGE, PURPLE, GREY = "#2563a8", "#c8442f", "#2c8a5b", "#d98e1f", "#9b3fa5", "#8a8f98"
COLORS = {"blue": BLUE, "red": RED, "green": GREEN, "orange": ORANGE, "purple": PURPLE, "grey": GREY}

RUNS_AT_ONCE = 100
"""Number of runs simulated at a time. It limits the memory for noise."""


class Request(NamedTuple):
    """Options of the command."""

    runs: int = 100
    updates: int = 1024
    seed: int = 0


class KeyNumber(NamedTuple):
    """A number that the figure shows, and its expected value."""

    what: str
    value: str
    expected: str = ""


Results = dict[str, Arrays]


def nothing(results: Results, request: Request) -> None:
    """Return None: the figure is not interactive."""


class Figure(NamedTuple):
    name: str
    title: str
    caption: str
    parts: Callable[[Request], dict[str, Callable[[], Arrays]]]
    """Functions that compute the parts of the figure. Each result is stored when it is finished."""
    draw: Callable[[Results, Request], Canvas]
    numbers: Callable[[Results, Request], list[KeyNumber]]
    data: Callable[[Results, Request], dict[str, Any] | None] = nothing
    """Data of the interactive version on the page (`vsgd_bench/web/report.js`), or None."""


def run_problems(problems: tuple[Elementary, ...], algorithm: Algorithm, n: int, request: Request) -> Any:
    """Return θ, problems × runs × checkpoints, at powers of two. Problems run in parallel on all cores."""
    checkpoints = powers_of_two(request.updates)
    thetas = np.empty((len(problems), request.runs, len(checkpoints)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(0, request.runs, RUNS_AT_ONCE):
            runs = range(first, min(first + RUNS_AT_ONCE, request.runs))
            noise = draw_noise(request.seed, runs, request.updates, n)
            tracks = [pool.submit(simulate, problem, algorithm, noise, checkpoints) for problem in problems]
            for row, track in zip(thetas, tracks, strict=True):
                row[runs.start : runs.stop] = track.result().theta
    return thetas


def loss_ratio(problem: Elementary, thetas: Any) -> Any:
    """Return the excess expected loss divided by its initial value."""
    return problem.excess_loss(thetas) / problem.excess_loss(1.0)
