"""Train a model on a workload, and evaluate it during training."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from vsgd_bench.compare.checkpoints import load_weights
from vsgd_bench.compare.methods import Budget, Method, Setting
from vsgd_bench.compare.workloads import Task, Workload

EVALUATION_POINTS, EVALUATION_POINTS_ONLINE = 12, 50
"""Number of evaluations of a run after the initial one."""

WARM_UP = 5
"""Number of updates of a discarded model before time is measured. They compile the kernels."""

STATISTICS = 20
"""Number of minibatches from which BatchNorm statistics are recomputed at averaged weights."""

EVALUATION_ROWS = 500
"""Batch size of evaluation."""

TRAINING_ROWS = 2000
"""Number of training rows for the final training loss."""


class Run(NamedTuple):
    """The result of a run. Lists have one entry per evaluation point.

    Attributes:
        evaluations: number of gradient evaluations on a minibatch.
        seconds: processor time of one thread, without evaluation.
        held_out: loss on held-out rows. Online, it is the loss on the next rows before they are learned.
        training: mean loss of the minibatches since the last evaluation point; NaN at the start.
        final: final held-out loss, or the mean of `held_out` if online. `final`, `best` and `final_training` are
            infinite if the run did not finish.
        best: lowest held-out loss at any evaluation point; `final` if online.
        final_training: final loss on training rows, at the weights of `final`; `final` if online, since no row is
            repeated.
        outcome: "finished", "diverged" or "failed"; `message` is the reason.
    """

    updates: list[int]
    evaluations: list[int]
    seconds: list[float]
    held_out: list[float]
    training: list[float]
    final: float = math.inf
    best: float = math.inf
    final_training: float = math.inf
    outcome: str = "finished"
    message: str = ""


def failed(message: str) -> Run:
    return Run([], [], [], [], [], outcome="failed", message=message)


def minibatches(rows: int, workload: Workload, seed: int) -> list[Tensor]:
    """Return the rows of each minibatch, without incomplete ones. They are the same for all optimizers."""
    if workload.online:
        return list(torch.arange(rows).split(workload.batch))[: rows // workload.batch]
    rng = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(rows, generator=rng).split(workload.batch) for _ in range(workload.epochs)]
    return [batch for epoch in epochs for batch in epoch[: rows // workload.batch]]


def minibatch(task: Task, rows: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = task.split.x[rows], task.split.y[rows]
    return (x, y) if task.transform is None else task.transform(x, y, rng)


class Learner:
    """A model and its optimizer, with a count of gradient evaluations."""

    def __init__(self, workload: Workload, method: Method, setting: Setting, seed: int):
        torch.manual_seed(seed)  # the same initial weights for all optimizers
        self.task = workload.build(seed, method.sparse)
        if workload.checkpoint is not None:
            load_weights(workload.checkpoint, self.task.model)
        self.task.model.train()
        self.method = method
        self.batch = workload.batch
        self.batches = minibatches(len(self.task.split.x), workload, seed)
        budget = Budget(len(self.batches), len(self.task.split.x), 1 if workload.online else workload.epochs)
        self.optimizer = method.make(self.task.model, setting, budget)
        self.evaluations = 0
        self.rng = torch.Generator().manual_seed(seed)

    def update(self, rows: Tensor) -> Tensor:
        """Make one update with a minibatch, and return its loss before the update."""
        x, y = minibatch(self.task, rows, self.rng)

        def closure() -> Tensor:
            self.evaluations += 1
            self.task.model.zero_grad()
            loss = self.task.loss(self.task.model(x), y)
            loss.backward()
            return loss

        loss: Tensor = self.optimizer.step(closure)
        return loss.detach()

    def judge(self, x: Tensor, y: Tensor) -> float:
        with torch.no_grad(), judged(self.method, self.optimizer, self.task, self.batch) as model:
            parts = zip(x.split(EVALUATION_ROWS), y.split(EVALUATION_ROWS), strict=True)
            return sum(float(self.task.loss(model(a), b)) * len(a) for a, b in parts) / len(x)

    def training_loss(self) -> float:
        rows = torch.arange(min(TRAINING_ROWS, len(self.task.split.x)))
        return self.judge(*minibatch(self.task, rows, torch.Generator().manual_seed(0)))


@contextmanager
def judged(method: Method, optimizer: Any, task: Task, batch: int) -> Iterator[nn.Module]:
    """Yield the model for evaluation. On exit, all weights and buffers are restored."""
    with method.evaluation_model(optimizer, task.model) as model:
        kept = [buffer.clone() for buffer in model.buffers()]
        if method.averages:
            rng = torch.Generator().manual_seed(0)
            rows = torch.arange(len(task.split.x))[: STATISTICS * batch].split(batch)
            update_bn((minibatch(task, some, rng)[0] for some in rows), model)
        model.eval()
        yield model
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
    task.model.train()


def warm_up(learner: Learner) -> None:
    with suppress(FloatingPointError):
        for rows in learner.batches[:WARM_UP]:
            learner.update(rows)


def train(workload: Workload, method: Method, setting: Setting, seed: int) -> Run:
    """Train a model and return the run. A loss that is not finite ends it."""
    torch.set_num_threads(1)
    learner = Learner(workload, method, setting, seed)
    split = learner.task.split
    batches = learner.batches
    warm_up(Learner(workload, method, setting, seed))
    torch.manual_seed(seed)

    points = min(EVALUATION_POINTS_ONLINE if workload.online else EVALUATION_POINTS, len(batches))
    marks = [round(len(batches) * k / points) for k in range(points + 1)]
    seconds, run, message = 0.0, Run([], [], [], [], []), ""
    losses: list[Tensor] = []

    def note(updates: int, held_out: float, training: float) -> None:
        run.updates.append(updates)
        run.evaluations.append(learner.evaluations)
        run.seconds.append(round(seconds, 4))
        run.held_out.append(_or_infinite(held_out))
        run.training.append(training)

    if not workload.online:
        note(0, learner.judge(split.x_test, split.y_test), math.nan)
    for start, end in itertools.pairwise(marks):
        ahead = torch.cat(batches[start:end])
        held_out = learner.judge(split.x[ahead], split.y[ahead]) if workload.online else math.nan
        began = time.process_time()
        try:
            losses += [learner.update(rows) for rows in batches[start:end]]
        except FloatingPointError as error:
            message = str(error)
        seconds += time.process_time() - began
        if not workload.online:
            held_out = learner.judge(split.x_test, split.y_test)
        note(end, math.inf if message else held_out, _mean(losses[start:]))
        if not math.isfinite(run.held_out[-1]):
            return run._replace(outcome="diverged", message=message or "the held-out loss is not finite")
    final = sum(run.held_out) / len(run.held_out) if workload.online else run.held_out[-1]
    return run._replace(
        final=final,
        best=final if workload.online else min(run.held_out),
        final_training=final if workload.online else _or_infinite(learner.training_loss()),
    )


def _mean(losses: list[Tensor]) -> float:
    return float(torch.stack(losses).mean()) if losses else math.nan


def _or_infinite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
