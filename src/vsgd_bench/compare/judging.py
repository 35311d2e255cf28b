"""What the runs say: who is better than whom, and how soon a target is reached."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from vsgd_bench.compare.opponents import ADAMW_COSINE, FREE, MUON_COSINE, SOAP_COSINE
from vsgd_bench.compare.ours import OURS
from vsgd_bench.compare.table import Cell, Table
from vsgd_bench.compare.train import Run
from vsgd_bench.compare.workloads import Workload

AXES = {"updates": "updates", "evaluations": "gradient evaluations", "seconds": "seconds"}
"""Fields of `Run` that a budget can be counted in, and what to call them."""

MEASURES = {"final": "held-out", "best": "best on the way", "final_training": "training"}
"""Fields of `Run` that methods are compared by, and what to call them."""

REFERENCE = ADAMW_COSINE.name
TOLERANCE = 1.02
"""The target of a workload and seed is the final loss of the best `REFERENCE` times this."""


class Bar(NamedTuple):
    """What is asked of our optimizer against an opponent: shares of workloads on which to be better, or not worse."""

    not_worse: float = 0.0
    better: float = 0.0

    @property
    def words(self) -> str:
        shares = {"not worse": self.not_worse, "better": self.better}
        return ", ".join(f"{word} on {share:.0%}" for word, share in shares.items() if share)

    def is_met(self, counts: dict[str, int]) -> bool:
        better, total = counts["better"], sum(counts.values())
        return better >= self.better * total - 1e-9 and better + counts["not worse"] >= self.not_worse * total - 1e-9


HELD_OUT_BARS = {
    "sgd": Bar(not_worse=1),
    "momentum": Bar(not_worse=2 / 3),
    "adam": Bar(not_worse=2 / 3),
    "adam-default": Bar(better=3 / 4),
    "adamw-cosine": Bar(not_worse=0.8, better=0.5),
    "soap-cosine": Bar(not_worse=3 / 4),
    "muon-cosine": Bar(not_worse=3 / 4),
    **{method.name: Bar(better=3 / 4) for method in FREE},
}
TRAINING_BARS = {method.name: Bar(better=3 / 4) for method in (ADAMW_COSINE, SOAP_COSINE, MUON_COSINE, *FREE)}
SECONDS_BARS = {"sgd": Bar(not_worse=3 / 4), "adamw-cosine": Bar(not_worse=2 / 3)}


class Comparison(NamedTuple):
    """A loss to compare by, what is equal then, and what is asked by opponent."""

    measure: str
    axis: str
    bars: dict[str, Bar]


AT_EQUAL_UPDATES = (
    Comparison("final", "updates", HELD_OUT_BARS),
    Comparison("best", "updates", HELD_OUT_BARS),
    Comparison("final_training", "updates", TRAINING_BARS),
)
COMPARISONS = (
    *AT_EQUAL_UPDATES,
    Comparison("final", "evaluations", {}),
    Comparison("final", "seconds", SECONDS_BARS),
)


class Spread(NamedTuple):
    mean: float
    error: float
    """Standard error of the mean; 0 where there is but one seed."""


def spread(values: Any) -> Spread:
    values = np.asarray(values, float)
    if not np.isfinite(values).all():
        return Spread(math.inf, 0.0)
    return Spread(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0)


def has_failed(cell: Cell) -> bool:
    """A crash says nothing about the optimizer, so it is no defeat."""
    return any(run.outcome == "failed" for run in cell.runs.values())


def verdict(ours: list[float], theirs: list[float]) -> str:
    """Whether our losses are beyond one standard error of the paired difference. Runs are paired by seed."""
    lost = sum(math.isinf(a) and math.isfinite(b) for a, b in zip(ours, theirs, strict=True))
    won = sum(math.isfinite(a) and math.isinf(b) for a, b in zip(ours, theirs, strict=True))
    if lost != won:
        return "worse" if lost > won else "better"
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not pairs:
        return "not worse"
    mean, error = spread([a - b for a, b in pairs])
    return "better" if mean < -error else "worse" if mean > error else "not worse"


def loss_at(run: Run, axis: str, budget: float) -> float:
    """The held-out loss when so much was spent."""
    spent = getattr(run, axis)
    if budget >= spent[-1]:
        return run.held_out[-1]
    with np.errstate(invalid="ignore"):
        loss = float(np.interp(budget, spent, run.held_out))
    return loss if math.isfinite(loss) else math.inf


def compared(table: Table, workload: Workload, opponent: str, comparison: Comparison) -> str | None:
    """Our verdict against an opponent on a workload; None if it cannot be told."""
    mine, its = table.cells.get((workload.name, OURS)), table.cells.get((workload.name, opponent))
    if mine is None or its is None or has_failed(mine) or has_failed(its):
        return None
    pairs = [(mine.runs[seed], its.runs[seed]) for seed in range(table.seeds)]
    measure, axis = comparison.measure, comparison.axis
    if axis == "updates":
        return verdict([getattr(a, measure) for a, _ in pairs], [getattr(b, measure) for _, b in pairs])
    if workload.online:
        return None  # less of a stream is other rows
    budgets = [min(getattr(a, axis)[-1], getattr(b, axis)[-1]) for a, b in pairs]
    return verdict(
        [loss_at(a, axis, budget) for (a, _), budget in zip(pairs, budgets, strict=True)],
        [loss_at(b, axis, budget) for (_, b), budget in zip(pairs, budgets, strict=True)],
    )


def count_verdicts(said: list[str | None]) -> dict[str, int]:
    return {word: said.count(word) for word in ("better", "not worse", "worse")}


def targets(table: Table, workload: Workload) -> dict[int, float]:
    """The held-out loss that is to be reached, by seed: held-out rows differ between seeds."""
    if (cell := table.cells.get((workload.name, REFERENCE))) is None:
        return {}
    return {seed: TOLERANCE * run.final for seed, run in cell.runs.items() if math.isfinite(run.final)}


def time_to(run: Run, goal: float, axis: str, online: bool) -> float:
    """What was spent until the loss was first as low; infinite if it never was."""
    spent: list[float] = getattr(run, axis)
    losses = run.held_out
    if online:
        return spent[-1] if run.final <= goal else math.inf  # the mean over the stream is known at its end
    for k, loss in enumerate(losses):
        if loss <= goal:
            if k == 0:
                return max(spent[0], 1e-9)
            share = (losses[k - 1] - goal) / (losses[k - 1] - loss)
            return spent[k - 1] + share * (spent[k] - spent[k - 1])
    return math.inf


class Race(NamedTuple):
    """What each method spent until the target of a workload and seed was reached; infinite if it never was."""

    workload: str
    seed: int
    spent: dict[str, float]


def races(table: Table, axis: str) -> list[Race]:
    """All workloads and seeds that have a target, with the methods that were run on them."""
    return [
        Race(
            workload.name,
            seed,
            {
                method.name: time_to(cell.runs[seed], goal, axis, workload.online)
                for method in table.methods
                if (cell := table.cells.get((workload.name, method.name))) is not None and not has_failed(cell)
            },
        )
        for workload in table.workloads
        for seed, goal in targets(table, workload).items()
    ]


def profiles(table: Table, axis: str) -> dict[str, Any]:
    """For each method, how many times longer than the fastest it took, on each workload and seed that it was run on."""
    ratios: dict[str, list[float]] = {method.name: [] for method in table.methods}
    for race in races(table, axis):
        fastest = min(race.spent.values(), default=math.inf)
        for name, spent in race.spent.items():
            ratios[name].append(spent / fastest if math.isfinite(spent) else math.inf)
    return {name: np.sort(values) for name, values in ratios.items() if values}
