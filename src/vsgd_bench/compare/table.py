"""The table of a suite: train what is missing, grids first, then the best setting of each on all seeds."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tqdm import tqdm

from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.pretraining import with_checkpoint
from vsgd_bench.compare.processes import run_all
from vsgd_bench.compare.rates import GivenRates, as_tried
from vsgd_bench.compare.runs import Job, Runs
from vsgd_bench.compare.train import Run
from vsgd_bench.compare.workloads import Workload
from vsgd_bench.datasets import MissingData, locate

TUNED_ON = 0
"""The seed that settings are chosen on."""


class Cell(NamedTuple):
    """An optimizer on a workload, at the setting that was best."""

    setting: float | None
    at_edge: bool
    """Whether the best setting is the first or last of several: a wider grid might hold a better one."""
    runs: dict[int, Run]
    """By seed."""
    outdated: int = 0
    """How many of the runs were trained with another version of the source or of a package."""


class Table(NamedTuple):
    workloads: tuple[Workload, ...]
    methods: tuple[Method, ...]
    seeds: int
    cells: dict[tuple[str, str], Cell]
    """By the names of workload and method; only what has been run on every seed."""
    absent: dict[str, str]
    """Why a workload or method could not be run, by name."""
    missing: Mapping[tuple[str, str], str] = MappingProxyType({})
    """What is not stored of a workload and method, for those that are not in `cells`."""
    rates: Mapping[tuple[str, str], float] = MappingProxyType({})
    """By the names of workload and method: the best of each whole grid, or those that were given."""
    given: GivenRates | None = None
    """The rates that were taken in place of grids, if they were."""


def why_absent(item: Workload | Method) -> str | None:
    """What to do before this can be run."""
    if isinstance(item, Method):
        missing = importlib.util.find_spec(item.module) is None
        return f"pip install {item.package}" if missing else None
    try:
        for name in item.files:
            locate(name)
    except MissingData as missing_data:
        return str(missing_data)
    return None


def tuning_runs(runs: Runs, workload: Workload, method: Method) -> dict[float | None, Run]:
    """Return the stored runs of a grid, by setting."""
    found = {setting: runs.load(Job(workload, method, setting, TUNED_ON)) for setting in method.settings}
    return {setting: run for setting, run in found.items() if run is not None}


def best_setting(method: Method, runs: dict[float | None, Run]) -> float | None:
    """The setting with the lowest final loss on one seed."""
    return min(method.settings, key=lambda setting: runs[setting].final if setting in runs else math.inf)


def absences(workloads: Iterable[Workload], methods: Iterable[Method]) -> dict[str, str]:
    """Why some cannot be run, by name."""
    items: list[Workload | Method] = [*workloads, *methods]
    return {item.name: why for item in items if (why := why_absent(item))}


def compute(
    workloads: Iterable[Workload],
    methods: Iterable[Method],
    seeds: int,
    processes: int,
    runs: Runs,
    given: GivenRates | None = None,
) -> None:
    """Train what is not stored, or was trained with another version of the source or of a package.

    Of grids, only the given rates run, if there are any.
    """
    absent = absences(workloads, methods)
    for name, why in absent.items():
        print(f"{name} is left out: {why}")
    present = [(w, m) for w in workloads for m in methods if w.name not in absent and m.name not in absent]
    pairs = [(w, tried) for w, m in present if (tried := as_tried(w, m, given)).settings]
    grids = [job for workload, method in pairs for job in _first_settings(workload, method, seeds)]
    _compute_missing(grids, processes, runs, "tuning")
    best = [job for workload, method in pairs for job in _best_settings(runs, workload, method, seeds)]
    _compute_missing(best, processes, runs, "all seeds")


def _first_settings(workload: Workload, method: Method, seeds: int) -> list[Job]:
    """Whole grids on one seed; what has no grid is not waited for."""
    if method.has_grid:
        return [Job(workload, method, setting, TUNED_ON) for setting in method.settings]
    return [Job(workload, method, method.settings[0], seed) for seed in range(seeds)]


def _best_settings(runs: Runs, workload: Workload, method: Method, seeds: int) -> list[Job]:
    """The best of each grid on the other seeds; what has no grid is done, or has failed once already."""
    if not method.has_grid:
        return []
    setting = best_setting(method, tuning_runs(runs, workload, method))
    return [Job(workload, method, setting, seed) for seed in range(seeds)]


def _compute_missing(jobs: list[Job], processes: int, runs: Runs, what: str) -> None:
    def missing(job: Job) -> bool:
        run = runs.load(job)
        return run is None or run.outcome == "failed" or not runs.is_current(job)

    todo = [job._replace(workload=with_checkpoint(runs.checkpoints, job.workload)) for job in jobs if missing(job)]
    with tqdm(total=len(todo), desc=what, unit="run", disable=None) as bar:
        for job, run in run_all(todo, processes):
            runs.save(job, run)
            bar.update()
            if run.outcome == "failed":
                bar.write(f"{job.workload.name}, {job.method.name}, seed {job.seed} failed: {run.message}")


def _chosen(runs: Runs, workload: Workload, method: Method, given: GivenRates | None) -> float | str | None:
    """The setting that a method is shown with, or what is missing to choose it."""
    tried = as_tried(workload, method, given)
    if given is not None and not tried.settings:
        return f"no rate in {given.name}"
    if not tried.has_grid:
        return tried.settings[0]
    tuned = tuning_runs(runs, workload, method)
    if len(tuned) < len(method.settings):  # half a grid has no best
        grid = [Job(workload, method, setting, TUNED_ON) for setting in method.settings]
        return _lacking(runs, grid, "settings of the grid")
    return best_setting(method, tuned)


def _cell(runs: Runs, workload: Workload, method: Method, setting: float | None, seeds: int) -> Cell | str:
    """Return what is stored of a method on a workload, or what is missing."""
    jobs = [Job(workload, method, setting, seed) for seed in range(seeds)]
    found = {job.seed: run for job in jobs if (run := runs.load(job)) is not None}
    if len(found) < seeds:
        return _lacking(runs, jobs, "seeds")
    ends = method.settings[0], method.settings[-1]
    outdated = sum(not runs.is_current(job) for job in jobs)
    return Cell(setting, method.has_grid and setting in ends, found, outdated)


def _lacking(runs: Runs, jobs: list[Job], what: str) -> str:
    found = sum(runs.load(job) is not None for job in jobs)
    return f"{found} of {len(jobs)} {what}" if found else "not run"


def assemble(
    workloads: Iterable[Workload],
    methods: Iterable[Method],
    seeds: int,
    runs: Runs,
    given: GivenRates | None = None,
    stored_only: bool = False,
) -> Table:
    """Collect what is stored and what is missing. Runs on data that are absent by now are shown as well.

    If nothing is going to be trained (`stored_only`), neither data nor packages are looked for.
    """
    absent = {} if stored_only else absences(workloads, methods)
    cells, missing, rates = {}, {}, {}
    for workload in workloads:
        for method in methods:
            if method.name in absent:
                continue
            pair = workload.name, method.name
            setting = _chosen(runs, workload, method, given)
            found = setting if isinstance(setting, str) else _cell(runs, workload, method, setting, seeds)
            if method.has_grid and isinstance(setting, float):
                rates[pair] = setting
            if isinstance(found, Cell):
                cells[pair] = found
            else:
                missing[pair] = found
    chosen = rates if given is None else given.rates
    return Table(tuple(workloads), tuple(methods), seeds, cells, absent, missing, chosen, given)


def what_was_run(table: Table) -> Table:
    """Without the workloads and methods that have no results at all."""
    return table._replace(
        workloads=tuple(w for w in table.workloads if any(name == w.name for name, _ in table.cells)),
        methods=tuple(m for m in table.methods if any(name == m.name for _, name in table.cells)),
    )
