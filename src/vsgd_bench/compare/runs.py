"""Runs on disk, a small file each, together with what produced them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import vsgd
from vsgd.disk import read_checked, write_checked
from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.opponents import ADAMW_COSINE
from vsgd_bench.compare.train import Run
from vsgd_bench.compare.workloads import Workload

ELSEWHERE = (
    *("bench", "files", "integrations", "linear", "optax", "sklearn"),
    *("__main__.py", "arguments.py", "cli.py", "disk.py", "river.py"),
)
"""What of the package our optimizer for PyTorch does not use."""

PRETRAINING_RATE = 1e-3
"""Of AdamW with warm-up and cosine decay, which trains the checkpoints."""


class Job(NamedTuple):
    """A run that may be asked for."""

    workload: Workload
    method: Method
    setting: float | None
    seed: int


def setting_name(setting: float | None) -> str:
    return "default" if setting is None else f"{setting:.2g}"


version_of = functools.cache(version)


@functools.cache
def fingerprint() -> str:
    """Changes with the code of our optimizer, so that no run of it outlives it."""
    folder = Path(vsgd.__file__).parent
    files = sorted(file for file in folder.rglob("*.py") if file.relative_to(folder).parts[0] not in ELSEWHERE)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _text(function: Callable[..., Any]) -> str:
    """What a function is, and with which arguments it will be called."""
    if isinstance(function, functools.partial):
        return f"{_text(function.func)}{function.args}{function.keywords or ''}"
    return inspect.getsource(function)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pretraining_job(workload: Workload) -> Job:
    """What produces the weights that a workload starts from."""
    assert workload.pretraining is not None
    return Job(workload.pretraining, ADAMW_COSINE, PRETRAINING_RATE, seed=0)


def wanted(job: Job) -> dict[str, Any]:
    """What has to be true of a stored run to be used again."""
    workload, method = job.workload, job.method
    return {
        "workload": workload.name,
        "method": method.name,
        "setting": job.setting,
        "seed": job.seed,
        "batch": workload.batch,
        "epochs": workload.epochs,
        "task": _hash(_text(workload.build)),
        method.package: version_of(method.package),
        **(
            {} if workload.pretraining is None else {"checkpoint": _hash(json.dumps(wanted(pretraining_job(workload))))}
        ),
        **({"source": fingerprint()} if method.ours else {"setup": _hash(_text(method.make))}),
    }


def path_of(out: Path, job: Job) -> Path:
    name = f"{setting_name(job.setting)}-seed{job.seed}.json"
    return out / "runs" / job.workload.name / job.method.name / name


def save(out: Path, job: Job, run: Run) -> None:
    record = {**wanted(job), "torch": version_of("torch"), **run._asdict()}
    write_checked(path_of(out, job), record)


def load(out: Path, job: Job) -> Run | None:
    """The run, or None if there is none yet for exactly this, or if it is damaged."""
    record = read_checked(path_of(out, job))
    if record is None or any(record.get(key) != value for key, value in wanted(job).items()):
        return None
    return Run(**{field: record[field] for field in Run._fields})
