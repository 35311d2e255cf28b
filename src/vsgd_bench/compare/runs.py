"""Stored runs of the comparison: one file per suite, with the provenance of each run."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from vsgd.errors import UserError
from vsgd_bench.compare.methods import Method, Setting
from vsgd_bench.compare.opponents import ADAMW_COSINE
from vsgd_bench.compare.train import Run, train
from vsgd_bench.compare.workloads import Workload
from vsgd_bench.provenance import definitions_digest, describe, digest, modules_digest
from vsgd_bench.results import Record, RunFile

KEYS = ("workload", "method", "rate", "decay", "seed")
"""Fields of a record that identify a run in the file of a suite."""

OPTIMIZER_MODULES = ("vsgd.torch",)
WITHOUT_INFLUENCE = ("vsgd", "vsgd.disk", "vsgd.errors")
"""Modules that the optimizer imports but that cannot change a result."""

PRETRAINING = ADAMW_COSINE, Setting(1e-3, 0.01)
"""The method and setting that train the checkpoints."""


class Job(NamedTuple):
    """Identifies a run, which may be stored or has to be trained."""

    workload: Workload
    method: Method
    setting: Setting
    seed: int


@functools.cache
def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def source_digest() -> str:
    """Return a digest of the library's optimizer for PyTorch."""
    return modules_digest(OPTIMIZER_MODULES, WITHOUT_INFLUENCE)


@functools.cache
def training_digest() -> str:
    """Return a digest of the training loop, which all runs share."""
    return definitions_digest(train)


def pretraining_job(workload: Workload) -> Job:
    """Return the job that trains the initial weights of a workload."""
    assert workload.pretraining is not None
    return Job(workload.pretraining, *PRETRAINING, seed=0)


def identity(job: Job) -> dict[str, Any]:
    """Return the values that a stored run must have to be shown as this job."""
    workload = job.workload
    names = {"workload": workload.name, "method": job.method.name, **job.setting._asdict(), "seed": job.seed}
    return {**names, "batch": workload.batch, "epochs": workload.epochs}


def provenance(job: Job) -> dict[str, Any]:
    """Return digests and versions. If those of a stored run differ, the run is out of date and trained again.

    The runs of opponents depend on `vsgd_bench` and on the version of their package, but not on the library `vsgd`.
    """
    workload, method = job.workload, job.method
    found = {
        "training": training_digest(),
        "task": digest([describe(workload.build)]),
        "setup": digest(
            [describe(method.make), describe(method.evaluation_model), repr((method.averages, method.sparse))]
        ),
    }
    if workload.pretraining is not None:
        found["checkpoint"] = digest([json.dumps(wanted(pretraining_job(workload)))])
    if method.ours:
        return {**found, "source": source_digest()}
    return {**found, method.package: version_of(method.package)}


def wanted(job: Job) -> dict[str, Any]:
    return {**identity(job), "provenance": provenance(job)}


class Runs:
    """The stored runs of a suite, in `folder`/`suite`.jsonl.gz, and those of the `shared` suites."""

    def __init__(self, folder: Path, suite: str, shared: tuple[str, ...] = ()):
        if (folder / "runs").is_dir():
            message = f"{folder / 'runs'} holds runs in the format of version 0.2, which this version does not read."
            raise UserError(f"{message} Choose another folder, or remove it.")
        self.folder, self.suite = folder, suite
        self._own, *self._shared = (RunFile(folder / f"{name}.jsonl.gz", KEYS) for name in (suite, *shared))

    @property
    def checkpoints(self) -> Path:
        """Folder of the initial weights of workloads."""
        return self.folder / self.suite / "checkpoints"

    def __iter__(self) -> Iterator[Record]:
        """Yield the records of all runs."""
        return itertools.chain(self._own, *self._shared)

    def save(self, job: Job, run: Run) -> None:
        versions = {package: version_of(package) for package in ("torch", "vsgd")}
        self._own.save({**wanted(job), "versions": versions, **run._asdict()})

    def load(self, job: Job) -> Run | None:
        """Return the run, trained with any version of the source; None if there is none."""
        if (record := self._record(job)) is None:
            return None
        return Run(**{field: record[field] for field in Run._fields})

    def is_current(self, job: Job) -> bool:
        """Return whether the run was trained with the current source and packages."""
        record = self._record(job)
        return record is not None and record["provenance"] == provenance(job)

    def _record(self, job: Job) -> Record | None:
        """Return a current record if there is one, otherwise an outdated one; None if there is none."""
        same = identity(job)
        found = [file.get(*(same[key] for key in KEYS)) for file in (self._own, *self._shared)]
        records = [r for r in found if r is not None and all(r[key] == value for key, value in same.items())]
        if len(records) > 1:
            records.sort(key=lambda record: record["provenance"] != provenance(job))
        return records[0] if records else None
