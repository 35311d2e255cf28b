"""A line that shows how many runs are done and how long the others will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

FIRST_GUESS_SECONDS = 10.0
"""Of a run of which nothing similar is known."""


def duration(seconds: float) -> str:
    """Return a duration in words, with the precision that an estimate has."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"


class Progress:
    """Counts runs, and estimates the remaining time.

    The seconds of a run are the mean over earlier runs of the same workload and method, else of the same workload,
    else of all. The estimate is scaled by the time that the finished runs really took, so it includes evaluation, and
    adapts to the number of processes.
    """

    def __init__(self, processes: int, clock: Callable[[], float] = time.monotonic):
        self.processes, self.clock, self.began = processes, clock, clock()
        self.seconds: dict[tuple[str, ...], list[float]] = {}
        self.done, self.expected_done = 0, 0.0

    def learn(self, workload: str, method: str, seconds: float) -> None:
        """Use the time that a run took in the estimates."""
        for key in ((workload, method), (workload,), ()):
            self.seconds.setdefault(key, []).append(seconds)

    def expected(self, workload: str, method: str) -> float:
        """Return the estimated seconds of a run."""
        for key in ((workload, method), (workload,), ()):
            if found := self.seconds.get(key):
                return sum(found) / len(found)
        return FIRST_GUESS_SECONDS

    def finish(self, workload: str, method: str) -> None:
        """Count a run that has ended."""
        self.done += 1
        self.expected_done += self.expected(workload, method)

    def left(self, waiting: dict[tuple[str, str], int]) -> float:
        """Return the estimated seconds until so many runs of each workload and method have ended."""
        total = sum(count * self.expected(*pair) for pair, count in waiting.items())
        if self.expected_done > 0:
            return total * (self.clock() - self.began) / self.expected_done
        return total / self.processes

    def line(self, waiting: dict[tuple[str, str], int]) -> str:
        return f"{self.done} runs done, about {sum(waiting.values())} to go, {duration(self.left(waiting))} left"

    def show(self, waiting: dict[tuple[str, str], int], stream: Any = None) -> None:
        """Print the line: over the last one on a terminal, otherwise now and then."""
        stream = stream or sys.stderr
        if stream.isatty():
            stream.write(f"\r\x1b[K{self.line(waiting)}")
        elif self.done % 20 == 1 or not sum(waiting.values()):
            stream.write(f"{self.line(waiting)}\n")
        stream.flush()
