"""Initial weights of some workloads. They are trained once and stored in the folder of the runs."""

from __future__ import annotations

from pathlib import Path

import torch

from vsgd_bench import store
from vsgd_bench.compare.checkpoints import save_weights
from vsgd_bench.compare.runs import Job, pretraining_job, wanted
from vsgd_bench.compare.train import Learner
from vsgd_bench.compare.workloads import Workload


def with_checkpoint(folder: Path, workload: Workload) -> Workload:
    """Return the workload with the path of its initial weights. They are trained if the folder does not have them."""
    if workload.pretraining is None:
        return workload
    job = pretraining_job(workload)
    path = folder / job.workload.name
    if store.load(path, wanted(job)) is None:
        print(f"training {job.workload.name}, from which {workload.name} starts", flush=True)
        pretrain(path, job)
    return workload._replace(checkpoint=path)


def pretrain(path: Path, job: Job) -> None:
    torch.set_num_threads(1)
    learner = Learner(*job)
    for rows in learner.batches:
        learner.update(rows)
    save_weights(path, learner.task.model, wanted(job))
