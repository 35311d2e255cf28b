"""Search for the best setting of a method on a workload. All methods with a learning rate use the same rule.

1. A grid of rates is extended by factors of √10 until its best rate is not at an end, or is at a limit of `RATES`.
2. All values of weight decay are tried at the best rate.
3. A grid is extended again at the best decay, starting with the best rate and its two neighbors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from vsgd_bench.compare.methods import DECAYS, RATES, Method, Setting

FIRST_DECAY = DECAYS[1]
"""Weight decay of the first grid."""

MAX_RATIO = 10.0
"""Ratios of losses are clipped to this and its reciprocal. A diverged run has this ratio."""

FindLoss = Callable[[Setting], float | None]
"""Returns the final loss of a run on the tuning seed, or None if there is no such run."""


class Search(NamedTuple):
    """The state of a search."""

    needed: tuple[Setting, ...]
    """Settings to run next; empty if the search is finished."""
    best: Setting | None
    """The best setting; None until the search is finished."""


def best_of(settings: Iterable[Setting], loss: FindLoss) -> Search:
    """Return the best of some settings, or the settings that have not been run."""
    losses = {setting: loss(setting) for setting in settings}
    if needed := tuple(setting for setting, value in losses.items() if value is None):
        return Search(needed, None)
    return Search((), min((value, setting) for setting, value in losses.items() if value is not None)[1])


def grow(rates: Sequence[float], decay: float | None, loss: FindLoss) -> Search:
    """Extend a grid of learning rates until its best rate is not at an end."""
    low, high = RATES.index(rates[0]), RATES.index(rates[-1])
    while True:
        grid = [Setting(rate, decay) for rate in RATES[low : high + 1]]
        found = best_of(grid, loss)
        if found.best == grid[0] and low > 0:
            low -= 1
        elif found.best == grid[-1] and high < len(RATES) - 1:
            high += 1
        else:
            return found


def search(method: Method, loss: FindLoss) -> Search:
    """Return the best setting of a method, or the settings to run next."""
    first = FIRST_DECAY if method.decays else None
    found = grow(method.rates, first, loss)
    if found.best is None or found.best.rate is None or not method.decays:
        return found
    rate = found.best.rate
    found = best_of((Setting(rate, decay) for decay in method.decays), loss)
    if found.best is None or found.best.decay == first:
        return found
    center = RATES.index(rate)
    return grow(RATES[max(center - 1, 0) : center + 2], found.best.decay, loss)


def log_ratio(ours: float, theirs: float) -> float:
    """Return the logarithm of the ratio of two losses, clipped to ±log `MAX_RATIO`; 0 if both runs diverged."""
    if ours == theirs:
        return 0.0
    limit = math.log(MAX_RATIO)
    if min(ours, theirs) <= 0 or math.isinf(max(ours, theirs)):
        return limit if ours > theirs else -limit
    return min(max(math.log(ours / theirs), -limit), limit)


def best_single(losses: Mapping[str, Mapping[Setting, float]]) -> Setting | None:
    """Return the setting with the lowest geometric mean of loss ratios over all workloads, in hindsight.

    Args:
        losses: losses by workload and setting. Ratios are relative to the lowest loss of a workload. Settings that
            were not run on every workload are skipped.
    """
    common = [setting for found in losses.values() for setting in found]
    common = [setting for setting in dict.fromkeys(common) if all(setting in found for found in losses.values())]

    def total(setting: Setting) -> float:
        return sum(log_ratio(found[setting], min(found.values())) for found in losses.values())

    return min(common, key=total, default=None)
