"""A progress line: the number of finished runs, and the estimated remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

FIRST_GUESS_SECONDS = 10.0
"""Estimated time of a run before any run has finished."""


def duration(seconds: float) -> str:
    """Return a duration in words, rounded as an estimate."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"


class Progress:
    """Counts runs, and estimates the remaining time.

    The time of a run is the mean over earlier runs of the same workload and method. If there are none, it is the mean
    over the workload, or over all runs. The estimate is multiplied by the ratio of elapsed to estimated time of the
    finished runs, so that it includes evaluation and adapts to the number of processes.
    """

    def __init__(self, processes: int, clock: Callable[[], float] = time.monotonic):
        self.processes, self.clock, self.began = processes, clock, clock()
        self.seconds: dict[tuple[str, ...], list[float]] = {}
        self.done, self.expected_done = 0, 0.0

    def learn(self, workload: str, method: str, seconds: float) -> None:
        """Add the time of a run to the estimates."""
        for key in ((workload, method), (workload,), ()):
            self.seconds.setdefault(key, []).append(seconds)

    def expected(self, workload: str, method: str) -> float:
        """Return the estimated seconds of a run."""
        for key in ((workload, method), (workload,), ()):
            if found := self.seconds.get(key):
                return sum(found) / len(found)
        return FIRST_GUESS_SECONDS

    def finish(self, workload: str, method: str) -> None:
        """Count a finished run."""
        self.done += 1
        self.expected_done += self.expected(workload, method)

    def left(self, waiting: dict[tuple[str, str], int]) -> float:
        """Return the estimated seconds until all runs are finished. `waiting` counts them by workload and method."""
        total = sum(count * self.expected(*pair) for pair, count in waiting.items())
        if self.expected_done > 0:
            return total * (self.clock() - self.began) / self.expected_done
        return total / self.processes

    def line(self, waiting: dict[tuple[str, str], int]) -> str:
        return f"{self.done} runs done, about {sum(waiting.values())} to go, {duration(self.left(waiting))} left"

    def show(self, waiting: dict[tuple[str, str], int], stream: Any = None) -> None:
        """Print the line. On a terminal it replaces the last one; elsewhere it is printed at intervals."""
        stream = stream or sys.stderr
        if stream.isatty():
            stream.write(f"\r\x1b[K{self.line(waiting)}")
        elif self.done % 20 == 1 or not sum(waiting.values()):
            stream.write(f"{self.line(waiting)}\n")
        stream.flush()
