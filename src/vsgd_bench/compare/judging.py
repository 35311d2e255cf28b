"""Compare runs: wins and losses, ratios of losses with confidence intervals, goals, and the time to a target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.opponents import ADAMW_COSINE, MUON_COSINE, SOAP_COSINE
from vsgd_bench.compare.ours import OURS
from vsgd_bench.compare.search import log_ratio
from vsgd_bench.compare.table import Cell, Table
from vsgd_bench.compare.train import Run
from vsgd_bench.compare.workloads import Workload

AXES = {"updates": "updates", "evaluations": "gradient evaluations", "seconds": "seconds"}
"""Fields of `Run` that measure a budget, and their names on pages."""

MEASURES = {"final": "final", "best": "best", "final_training": "training"}
"""Fields of `Run` that methods are compared by, and their names on pages."""

SIGNS = {"better": "+", "not worse": "=", "worse": "−"}

CONFIDENCE = 0.95
RESAMPLES = 10_000

REFERENCE = ADAMW_COSINE.name
TOLERANCE = 1.02
"""The target of a workload and seed is the final loss of the tuned `REFERENCE` times this."""


class Goal(NamedTuple):
    """A goal for vSGD against an opponent on the workloads of a suite.

    Attributes:
        not_worse: minimum fraction of workloads on which its loss is not worse.
        better: minimum fraction of workloads on which its loss is better.
        ratio_below: upper limit of the geometric mean of its loss ratios.
    """

    not_worse: float = 0.0
    better: float = 0.0
    ratio_below: float = math.inf

    @property
    def words(self) -> str:
        shares = {"not worse": self.not_worse, "better": self.better}
        parts = [f"{word} on {share:.0%}" for word, share in shares.items() if share]
        return ", ".join(parts + ([f"mean ratio below {self.ratio_below:g}"] if self.ratio_below < math.inf else []))

    def is_reached(self, found: Sequence[Difference]) -> bool:
        counts = count_signs(found)
        not_worse = counts["better"] + counts["not worse"]
        shares = counts["better"] >= self.better * len(found) - 1e-9, not_worse >= self.not_worse * len(found) - 1e-9
        return all(shares) and effect([each.ratio for each in found]).mean < self.ratio_below


TUNED_GOALS = {
    ("final", ADAMW_COSINE.name): Goal(not_worse=0.85),
    ("final", SOAP_COSINE.name): Goal(not_worse=0.75),
    ("final", MUON_COSINE.name): Goal(not_worse=0.75),
    ("final_training", SOAP_COSINE.name): Goal(better=0.6),
}


def goal_of(row: Method, comparison: Comparison) -> Goal | None:
    """Return the goal against a row of the table, as stated in `docs/protocol.md`."""
    if comparison.axis != "updates" or row.ours:
        return None
    at_defaults = not row.rates or row.name.endswith("/default")
    if comparison.measure == "final" and at_defaults and not row.full_batch_only:
        return Goal(ratio_below=1.0)
    return TUNED_GOALS.get((comparison.measure, row.name))


class Comparison(NamedTuple):
    """The loss to compare, and the budget at which losses are compared."""

    measure: str
    axis: str


AT_EQUAL_UPDATES = (
    Comparison("final", "updates"),
    Comparison("best", "updates"),
    Comparison("final_training", "updates"),
)
COMPARISONS = (*AT_EQUAL_UPDATES, Comparison("final", "evaluations"), Comparison("final", "seconds"))


class Spread(NamedTuple):
    mean: float
    error: float
    """Standard error of the mean; 0 if there is only one seed."""


def spread(values: Any) -> Spread:
    values = np.asarray(values, float)
    if not np.isfinite(values).all():
        return Spread(math.inf, 0.0)
    return Spread(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0)


class Effect(NamedTuple):
    """A geometric mean of ratios over workloads, and its bootstrap confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return "" if math.isnan(self.mean) else f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def effect(ratios: Sequence[float]) -> Effect:
    """Return the geometric mean of ratios. The interval comes from resampling the workloads."""
    if not ratios:
        return Effect(math.nan, math.nan, math.nan)
    logs = np.log(ratios)
    drawn = np.random.default_rng(0).integers(len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.quantile(logs[drawn].mean(axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Effect(*(float(np.exp(value)) for value in (logs.mean(), low, high)))


class Difference(NamedTuple):
    """The losses of vSGD compared with those of an opponent on a workload."""

    sign: str
    """"better", "not worse" or "worse"."""
    ratio: float
    """Geometric mean over seeds of the loss of vSGD divided by that of the opponent."""


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Compare losses that are paired by seed.

    The sign depends on the confidence interval of the mean logarithm of the ratio (paired t). If one of the two
    diverges on more seeds, it is worse. With a single seed there is no interval, and the difference decides.
    """
    pairs = list(zip(ours, theirs, strict=True))
    logs = [log_ratio(a, b) for a, b in pairs]
    diverged = sum(math.isinf(a) for a in ours) - sum(math.isinf(b) for b in theirs)
    mean, error = spread(logs)
    margin = error * float(stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2)) if len(logs) > 1 else 0.0
    sign = "worse" if diverged > 0 else "better" if diverged < 0 else _sign(mean, margin)
    return Difference(sign, math.exp(mean))


def _sign(mean: float, margin: float) -> str:
    return "better" if mean < -margin else "worse" if mean > margin else "not worse"


def has_failed(cell: Cell) -> bool:
    """Return whether a run failed. Failed runs are not compared, since a crash is not a result of the optimizer."""
    return any(run.outcome == "failed" for run in cell.runs.values())


def loss_at(run: Run, axis: str, budget: float) -> float:
    """Return the held-out loss at a budget, by linear interpolation."""
    spent = getattr(run, axis)
    if budget >= spent[-1]:
        return run.held_out[-1]
    with np.errstate(invalid="ignore"):
        loss = float(np.interp(budget, spent, run.held_out))
    return loss if math.isfinite(loss) else math.inf


def compared(table: Table, workload: Workload, opponent: str, comparison: Comparison) -> Difference | None:
    """Compare the runs of vSGD and an opponent on a workload. Return None if they cannot be compared."""
    mine, its = table.cells.get((workload.name, OURS)), table.cells.get((workload.name, opponent))
    if mine is None or its is None or has_failed(mine) or has_failed(its):
        return None
    pairs = [(mine.runs[seed], its.runs[seed]) for seed in range(table.seeds)]
    measure, axis = comparison.measure, comparison.axis
    if axis == "updates":
        return difference([getattr(a, measure) for a, _ in pairs], [getattr(b, measure) for _, b in pairs])
    if workload.online:
        return None  # a part of a stream has other rows
    budgets = [min(getattr(a, axis)[-1], getattr(b, axis)[-1]) for a, b in pairs]
    return difference(
        [loss_at(a, axis, budget) for (a, _), budget in zip(pairs, budgets, strict=True)],
        [loss_at(b, axis, budget) for (_, b), budget in zip(pairs, budgets, strict=True)],
    )


def differences(table: Table, opponent: str, comparison: Comparison) -> list[Difference]:
    """Return the differences between vSGD and an opponent on all workloads where they are known."""
    found = (compared(table, workload, opponent, comparison) for workload in table.workloads)
    return [each for each in found if each is not None]


def count_signs(found: Iterable[Difference]) -> dict[str, int]:
    signs = [each.sign for each in found]
    return {sign: signs.count(sign) for sign in SIGNS}


def target_ratios(table: Table, opponent: str, axis: str) -> list[float]:
    """Return the ratio of the budgets of vSGD and an opponent to the target, by workload; a geometric mean over seeds.

    The budget is infinite if the target is missed, and ratios are clipped. Seeds on which both miss it are skipped.
    """
    logs: dict[str, list[float]] = {}
    for race in races(table, axis):
        ours, theirs = race.spent.get(OURS, math.inf), race.spent.get(opponent, math.inf)
        if OURS in race.spent and opponent in race.spent and math.isfinite(min(ours, theirs)):
            logs.setdefault(race.workload, []).append(log_ratio(ours, theirs))
    return [math.exp(sum(found) / len(found)) for found in logs.values()]


def targets(table: Table, workload: Workload) -> dict[int, float]:
    """Return the target loss of each seed. Held-out rows differ between seeds."""
    if (cell := table.cells.get((workload.name, REFERENCE))) is None:
        return {}
    return {seed: TOLERANCE * run.final for seed, run in cell.runs.items() if math.isfinite(run.final)}


def time_to(run: Run, goal: float, axis: str, online: bool) -> float:
    """Return the budget until the loss first reached the goal; infinite if it never did."""
    spent: list[float] = getattr(run, axis)
    losses = run.held_out
    if online:
        return spent[-1] if run.final <= goal else math.inf  # the mean over the stream is known only at its end
    for k, loss in enumerate(losses):
        if loss <= goal:
            if k == 0:
                return max(spent[0], 1e-9)
            share = (losses[k - 1] - goal) / (losses[k - 1] - loss)
            return spent[k - 1] + share * (spent[k] - spent[k - 1])
    return math.inf


class Race(NamedTuple):
    """The budget of each method until it reached the target of a workload and seed; infinite if it never did."""

    workload: str
    seed: int
    spent: dict[str, float]


def races(table: Table, axis: str) -> list[Race]:
    """Return the races of all workloads and seeds that have a target."""
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
    """Return the time of each method relative to the fastest, for each workload and seed that it ran on."""
    ratios: dict[str, list[float]] = {method.name: [] for method in table.methods}
    for race in races(table, axis):
        fastest = min(race.spent.values(), default=math.inf)
        for name, spent in race.spent.items():
            ratios[name].append(spent / fastest if math.isfinite(spent) else math.inf)
    return {name: np.sort(values) for name, values in ratios.items() if values}
