"""The table of a suite: its stored runs, its missing runs, and the chosen settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from vsgd_bench.compare.methods import RATES, Method, Setting
from vsgd_bench.compare.rates import Chosen
from vsgd_bench.compare.runs import Job, Runs
from vsgd_bench.compare.search import FindLoss, Search, best_single, search
from vsgd_bench.compare.train import Run
from vsgd_bench.compare.workloads import Workload
from vsgd_bench.datasets import MissingData, locate

TUNED_ON = 0
"""The seed on which settings are chosen."""

TUNED, SINGLE, DEFAULT = "tuned", "one setting", "default"
"""The rows of a method with a grid: tuned on each workload, at one setting for all workloads, at its defaults."""

Usable = Callable[[Job, Run], bool]


class Cell(NamedTuple):
    """An optimizer on a workload, at one setting."""

    setting: Setting
    runs: dict[int, Run]
    """The runs by seed."""
    outdated: int = 0
    """Number of runs that were trained with another version of the source or of a package."""

    @property
    def at_limit(self) -> bool:
        """True if the best rate is at a limit of the search."""
        return self.setting.rate in (RATES[0], RATES[-1])


class Table(NamedTuple):
    workloads: tuple[Workload, ...]
    methods: tuple[Method, ...]
    """The rows. A method with a grid has three, see `rows_of`."""
    seeds: int
    cells: dict[tuple[str, str], Cell]
    """Cells by the names of workload and row. They have runs on every seed."""
    absent: dict[str, str]
    """Reason why a workload or method cannot run, by name."""
    missing: Mapping[tuple[str, str], str] = MappingProxyType({})
    """Description of the missing runs of a workload and row that are not in `cells`."""
    chosen: Chosen = Chosen()


def rows_of(method: Method) -> dict[str, Method]:
    """Return the rows of a method by kind of tuning. The name of a row differs from that of its method."""
    if not method.rates:
        return {DEFAULT: method}
    names = {TUNED: method.name, SINGLE: f"{method.name}/single", DEFAULT: f"{method.name}/default"}
    return {kind: method._replace(name=name, title=f"{method.title}, {kind}") for kind, name in names.items()}


def why_absent(item: Workload | Method) -> str | None:
    """Return what to do before a workload or method can run; None if it can."""
    if isinstance(item, Method):
        missing = importlib.util.find_spec(item.module) is None
        return f"pip install {item.package}" if missing else None
    try:
        for name in item.files:
            locate(name)
    except MissingData as missing_data:
        return str(missing_data)
    return None


def absences(workloads: Iterable[Workload], methods: Iterable[Method]) -> dict[str, str]:
    """Return the reasons why workloads and methods cannot run, by name."""
    items: list[Workload | Method] = [*workloads, *methods]
    return {item.name: why for item in items if (why := why_absent(item))}


def can_run(workload: Workload, method: Method) -> bool:
    return workload.full_batch or not method.full_batch_only


def find_loss(runs: Runs, workload: Workload, method: Method, usable: Usable) -> FindLoss:
    def loss(setting: Setting) -> float | None:
        job = Job(workload, method, setting, TUNED_ON)
        run = runs.load(job)
        return run.final if run is not None and usable(job, run) else None

    return loss


def searches(
    workloads: Iterable[Workload], methods: Iterable[Method], runs: Runs, usable: Usable
) -> dict[tuple[str, str], Search]:
    """Return the state of every search, by the names of workload and method."""
    pairs = [(w, m) for w in workloads for m in methods if m.rates and can_run(w, m)]
    return {(w.name, m.name): search(m, find_loss(runs, w, m, usable)) for w, m in pairs}


def choose(
    workloads: Sequence[Workload], methods: Iterable[Method], runs: Runs, usable: Usable, absent: Collection[str] = ()
) -> Chosen:
    """Choose settings by the runs on the tuning seed.

    The single setting is chosen after all searches have finished, except those on workloads that cannot run.
    """
    methods = [method for method in methods if method.rates]
    states = searches(workloads, methods, runs, usable)
    tuned = {pair: state.best for pair, state in states.items() if state.best is not None}
    single = {}
    for method in methods:
        if any((w.name, method.name) not in tuned and w.name not in absent for w in workloads):
            continue
        tried = [Setting(rate, decay) for rate in RATES for decay in (method.decays or (None,))]
        found = {}
        for workload in (w for w in workloads if (w.name, method.name) in tuned):
            loss = find_loss(runs, workload, method, usable)
            found[workload.name] = {setting: value for setting in tried if (value := loss(setting)) is not None}
        if (best := best_single(found)) is not None:
            single[method.name] = best
    return Chosen(tuned, single)


def settings_of(chosen: Chosen, workload: Workload, method: Method) -> dict[str, Setting | None]:
    """Return the setting of each row of a method on a workload; None if it is not yet known."""
    if not method.rates:
        return {DEFAULT: method.default}
    tuned, single = chosen.tuned.get((workload.name, method.name)), chosen.single.get(method.name)
    return {TUNED: tuned, SINGLE: single, DEFAULT: method.default}


def assemble(
    workloads: Sequence[Workload],
    methods: Sequence[Method],
    seeds: int,
    runs: Runs,
    given: Chosen | None = None,
    stored_only: bool = False,
) -> Table:
    """Return the table of stored and missing runs. It includes stored runs whose data are absent.

    If `stored_only`, data and packages are not required.
    """
    absent = {} if stored_only else absences(workloads, methods)
    chosen = given or choose(workloads, methods, runs, lambda job, run: True, absent)
    cells, missing = {}, {}
    for workload in workloads:
        for method in (m for m in methods if m.name not in absent and can_run(workload, m)):
            settings = settings_of(chosen, workload, method)
            for kind, row in rows_of(method).items():
                found = _cell(runs, workload, method, settings[kind], seeds, chosen, kind)
                if isinstance(found, Cell):
                    cells[workload.name, row.name] = found
                else:
                    missing[workload.name, row.name] = found
    rows = tuple(row for method in methods for row in rows_of(method).values())
    absent = absent | {row.name: absent[m.name] for m in methods if m.name in absent for row in rows_of(m).values()}
    return Table(tuple(workloads), rows, seeds, cells, absent, missing, chosen)


def _cell(
    runs: Runs, workload: Workload, method: Method, setting: Setting | None, seeds: int, chosen: Chosen, kind: str
) -> Cell | str:
    """Return the stored runs of a method on a workload, or a description of the missing ones."""
    if setting is None:
        return f"no setting in {chosen.file_name}" if chosen.file else f"search of its {kind} setting not finished"
    jobs = [Job(workload, method, setting, seed) for seed in range(seeds)]
    found = {job.seed: run for job in jobs if (run := runs.load(job)) is not None}
    if len(found) < seeds:
        return f"{len(found)} of {seeds} seeds" if found else "not run"
    return Cell(setting, found, sum(not runs.is_current(job) for job in jobs))


def what_was_run(table: Table) -> Table:
    """Return the table without workloads and methods that have no results."""
    return table._replace(
        workloads=tuple(w for w in table.workloads if any(name == w.name for name, _ in table.cells)),
        methods=tuple(m for m in table.methods if any(name == m.name for _, name in table.cells)),
    )
