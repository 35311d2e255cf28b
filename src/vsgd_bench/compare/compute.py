"""Train the runs of a table that are not stored."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from vsgd.errors import UserError
from vsgd_bench.compare.methods import Method, Setting
from vsgd_bench.compare.pretraining import with_checkpoint
from vsgd_bench.compare.processes import run_all
from vsgd_bench.compare.progress import Progress
from vsgd_bench.compare.rates import Chosen
from vsgd_bench.compare.runs import Job, Runs
from vsgd_bench.compare.table import TUNED_ON, absences, can_run, choose, searches, settings_of
from vsgd_bench.compare.train import Run
from vsgd_bench.compare.workloads import Workload

Key = tuple[str, str, Setting, int]

GROWTH = 2
"""Expected number of rates added to a grid, for the estimate of the remaining time."""


def key_of(job: Job) -> Key:
    return job.workload.name, job.method.name, job.setting, job.seed


class Plan:
    """The runs to train. The next runs of a search depend on its finished runs.

    Attributes:
        attempted: runs that this process has started. Failed runs are not repeated.
    """

    def __init__(
        self,
        workloads: Sequence[Workload],
        methods: Sequence[Method],
        seeds: int,
        runs: Runs,
        given: Chosen | None = None,
        suite_workloads: Sequence[Workload] | None = None,
    ):
        self.seeds, self.runs, self.given = seeds, runs, given
        self.suite_workloads = suite_workloads or workloads
        self.absent = absences([*self.suite_workloads], methods)
        self.methods = [method for method in methods if method.name not in self.absent]
        self.workloads = [workload for workload in workloads if workload.name not in self.absent]
        self.pairs = [(w, m) for w in self.workloads for m in self.methods if can_run(w, m)]
        self.attempted: set[Key] = set()

    def usable(self, job: Job, run: Run) -> bool:
        return self.runs.is_current(job) and (run.outcome != "failed" or key_of(job) in self.attempted)

    def jobs(self) -> list[Job]:
        """Return the runs to train next."""
        states, chosen = {}, self.given
        if chosen is None:
            states = searches(self.workloads, self.methods, self.runs, self.usable)
            chosen = choose(self.suite_workloads, self.methods, self.runs, self.usable, self.absent)
        found: dict[Key, Job] = {}
        for workload, method in self.pairs:
            state = states.get((workload.name, method.name))
            settings = settings_of(chosen, workload, method).values()
            jobs = [Job(workload, method, setting, TUNED_ON) for setting in (state.needed if state else ())]
            jobs += [Job(workload, method, each, seed) for each in settings if each for seed in range(self.seeds)]
            found.update({key_of(job): job for job in jobs if not self._is_done(job)})
        return list(found.values())

    def _is_done(self, job: Job) -> bool:
        run = self.runs.load(job)
        return key_of(job) in self.attempted or (run is not None and self.usable(job, run))

    def waiting(self, jobs: Sequence[Job]) -> dict[tuple[str, str], int]:
        """Return the expected number of runs of each workload and method, including later runs of searches."""
        now = Counter((job.workload.name, job.method.name) for job in jobs)
        if self.given is not None:
            return dict(now)
        expected = {}
        for workload, method in self.pairs:
            pair = workload.name, method.name
            planned = self.seeds
            if method.rates:
                planned = 3 * self.seeds - 2 + len(method.rates) + GROWTH + len(method.decays)
            expected[pair] = max(now[pair], planned - self.stored[pair]) if now[pair] else 0
        return expected

    @property
    def stored(self) -> Counter[tuple[str, str]]:
        return Counter((record["workload"], record["method"]) for record in self.runs)


def compute(
    workloads: Sequence[Workload],
    methods: Sequence[Method],
    seeds: int,
    processes: int,
    runs: Runs,
    given: Chosen | None = None,
    suite_workloads: Sequence[Workload] | None = None,
) -> None:
    """Train runs that are not stored, or that another version of the source or of a package trained.

    Given settings replace searches. If a run fails or cannot be saved, the others continue.
    """
    plan = Plan(workloads, methods, seeds, runs, given, suite_workloads)
    for name, why in plan.absent.items():
        if name in {workload.name for workload in workloads} | {method.name for method in methods}:
            print(f"{name} is left out: {why}")
    progress = Progress(processes)
    for record in runs:
        if record["seconds"]:
            progress.learn(record["workload"], record["method"], record["seconds"][-1])
    while jobs := plan.jobs():
        waiting = plan.waiting(jobs)
        plan.attempted.update(key_of(job) for job in jobs)
        prepared = [job._replace(workload=with_checkpoint(runs.checkpoints, job.workload)) for job in jobs]
        for job, run in run_all(prepared, processes):
            _save(runs, job, run)
            pair = job.workload.name, job.method.name
            if run.seconds:
                progress.learn(*pair, run.seconds[-1])
            waiting[pair] -= 1
            progress.finish(*pair)
            progress.show(waiting)


def _save(runs: Runs, job: Job, run: Run) -> None:
    what = f"{job.workload.name}, {job.method.name}, seed {job.seed}"
    if run.outcome == "failed":
        print(f"{what} failed: {run.message}", flush=True)
    try:
        runs.save(job, run)
    except (OSError, UserError) as error:
        print(f"{what} is not saved yet: {error} The next run that ends tries again.", file=sys.stderr, flush=True)
