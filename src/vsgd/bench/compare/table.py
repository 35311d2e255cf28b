"""The whole table: what is missing is computed, grids first, then the best setting of each on all seeds."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from vsgd.bench.compare.processes import run_all
from vsgd.bench.compare.rivals import Rival
from vsgd.bench.compare.runs import Job, load, save
from vsgd.bench.compare.train import Run
from vsgd.bench.compare.workloads import Workload
from vsgd.bench.datasets import MissingData, locate

TUNED_ON = 0
"""The seed that settings are chosen on."""


class Cell(NamedTuple):
    """An optimizer on a workload, at the setting that was best."""

    setting: float | None
    at_edge: bool
    """Whether the best setting is the first or last of several: a wider grid might hold a better one."""
    runs: dict[int, Run]
    """By seed."""


class Table(NamedTuple):
    workloads: tuple[Workload, ...]
    rivals: tuple[Rival, ...]
    seeds: int
    cells: dict[tuple[str, str], Cell]
    """By the names of workload and rival; only what has been run on every seed."""
    absent: dict[str, str]
    """Why a workload or rival could not be run, by name."""


def why_absent(item: Workload | Rival) -> str | None:
    """What to do before this can be run."""
    if isinstance(item, Rival):
        missing = importlib.util.find_spec(item.module) is None
        return f"pip install {item.package}, or 'vsgd[compare]' for all" if missing else None
    try:
        for name in item.files:
            locate(name)
    except MissingData as missing_data:
        return str(missing_data)
    return None


def tuning_runs(out: Path, workload: Workload, rival: Rival) -> dict[float | None, Run]:
    """What is stored of a grid, by setting."""
    runs = {setting: load(out, Job(workload, rival, setting, TUNED_ON)) for setting in rival.settings}
    return {setting: run for setting, run in runs.items() if run is not None}


def best_setting(rival: Rival, runs: dict[float | None, Run]) -> float | None:
    """The setting with the lowest final loss on one seed."""
    return min(rival.settings, key=lambda setting: runs[setting].final if setting in runs else math.inf)


def absences(workloads: Iterable[Workload], rivals: Iterable[Rival]) -> dict[str, str]:
    """Why some cannot be run, by name."""
    items: list[Workload | Rival] = [*workloads, *rivals]
    return {item.name: why for item in items if (why := why_absent(item))}


def compute(workloads: Iterable[Workload], rivals: Iterable[Rival], seeds: int, processes: int, out: Path) -> None:
    """Run what is not stored yet."""
    absent = absences(workloads, rivals)
    for name, why in absent.items():
        print(f"{name} is left out: {why}")
    pairs = [(w, r) for w in workloads for r in rivals if w.name not in absent and r.name not in absent]
    for choose in (_first_settings, _best_settings):
        jobs = [job for workload, rival in pairs for job in choose(out, workload, rival, seeds)]
        _compute_missing(jobs, processes, out, "tuning" if choose is _first_settings else "all seeds")


def _first_settings(out: Path, workload: Workload, rival: Rival, seeds: int) -> list[Job]:
    """Whole grids on one seed; what has no grid is not waited for."""
    if len(rival.settings) > 1:
        return [Job(workload, rival, setting, TUNED_ON) for setting in rival.settings]
    return [Job(workload, rival, rival.settings[0], seed) for seed in range(seeds)]


def _best_settings(out: Path, workload: Workload, rival: Rival, seeds: int) -> list[Job]:
    """The best of each grid on the other seeds; what has no grid is done, or has failed once already."""
    if len(rival.settings) == 1:
        return []
    setting = best_setting(rival, tuning_runs(out, workload, rival))
    return [Job(workload, rival, setting, seed) for seed in range(seeds)]


def _compute_missing(jobs: list[Job], processes: int, out: Path, what: str) -> None:
    def missing(job: Job) -> bool:
        run = load(out, job)
        return run is None or run.outcome == "failed"

    todo = [job for job in jobs if missing(job)]
    with tqdm(total=len(todo), desc=what, unit="run", disable=None) as bar:
        for job, run in run_all(todo, processes):
            save(out, job, run)
            bar.update()
            if run.outcome == "failed":
                bar.write(f"{job.workload.name}, {job.rival.name}, seed {job.seed} failed: {run.message}")


def assemble(workloads: Iterable[Workload], rivals: Iterable[Rival], seeds: int, out: Path) -> Table:
    """What the folder holds."""
    absent = absences(workloads, rivals)
    table = Table(tuple(workloads), tuple(rivals), seeds, {}, absent)
    for workload in table.workloads:
        for rival in table.rivals:
            if workload.name in absent or rival.name in absent:
                continue
            tuned = tuning_runs(out, workload, rival)
            if len(tuned) < len(rival.settings):
                continue  # half a grid has no best
            setting = best_setting(rival, tuned)
            found = {seed: load(out, Job(workload, rival, setting, seed)) for seed in range(seeds)}
            runs = {seed: run for seed, run in found.items() if run is not None}
            if len(runs) == seeds:
                ends = rival.settings[0], rival.settings[-1]
                table.cells[workload.name, rival.name] = Cell(
                    setting, len(rival.settings) > 1 and setting in ends, runs
                )
    return table
