"""Passes over rows: shuffled, spread over threads, stopped when nothing improves any more."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from vsgd.kernels import kept
from vsgd.linear import kernel, threads
from vsgd.linear.gate import check_all
from vsgd.linear.losses import Task, slopes
from vsgd.linear.minibatch import workspace
from vsgd.linear.model import CURV_SQ, GRAD, SEEN, THETA, Model
from vsgd.linear.rows import Rows
from vsgd.options import Options
from vsgd.rule import Moments, rate


class Training(NamedTuple):
    """How to go about it."""

    task: Task
    options: Options
    batch_size: int = 32
    threads: int = 1


def split(model: Model, parts: int) -> list[Model]:
    """The same model as several, a few outputs each."""
    tables = np.array_split(model.table, parts, axis=2)
    averages = np.array_split(model.average, parts, axis=1)
    curvatures = np.array_split(model.curvature, parts, axis=1)
    return [
        Model(
            table=np.ascontiguousarray(table),
            average=np.ascontiguousarray(average),
            curvature=np.ascontiguousarray(curvature),
            residual=model.residual.copy(),
            progress=model.progress.copy(),
        )
        for table, average, curvature in zip(tables, averages, curvatures, strict=True)
    ]


def join(model: Model, parts: list[Model]) -> None:
    """Put the parts back."""
    np.concatenate([part.table for part in parts], axis=2, out=model.table)
    np.concatenate([part.average for part in parts], axis=1, out=model.average)
    np.concatenate([part.curvature for part in parts], axis=1, out=model.curvature)
    model.progress[:] = parts[0].progress


def train_on(model: Model, rows: Rows, order: Any, targets: Any, weights: Any, training: Training) -> float:
    """One pass over the rows in this order; the mean loss of the rows, each before it was learnt from.

    Outputs that each tell one class from the rest share nothing, so threads take a few outputs each. Otherwise they
    share the rows of a minibatch, if there are enough. What comes out does not depend on how many threads there are.
    """
    check_all(model, rows, order, targets, weights, training)
    outputs = model.table.shape[2]
    parts = min(training.threads, outputs) if training.task.one_vs_rest else 1
    models = split(model, parts) if parts > 1 else [model]
    first = np.cumsum([0] + [part.table.shape[2] for part in models])
    run = kept(kernel.train, OPTIONS=training.options)
    if parts == 1 < training.threads and training.batch_size >= threads.WORTHWHILE:
        run = functools.partial(threads.train, training.threads, training.options)

    def work(i: int) -> float:
        table = models[i].table
        space = workspace(rows, table.shape[0], table.shape[2], training.batch_size)
        task = training.task._replace(first_output=int(first[i]))
        return float(run(models[i], rows, order, targets, weights, training.batch_size, task, space))

    if parts == 1:
        total = work(0)
    else:
        with ThreadPoolExecutor(parts) as pool:
            total = sum(pool.map(work, range(parts)))
        join(model, models)
    return total / float(weights[order].sum())


def coefficients(model: Model, task: Task) -> Any:
    """θ, or its average over the updates; columns × outputs."""
    return model.average if task.average else model.table[:, THETA]


def learning_rates(model: Model, options: Options) -> Any:
    """η* of every coordinate for one more sample; 0 for those that have seen too few to learn."""
    grad, grad_sq, curv, curv_sq = (model.table[:, field] for field in range(GRAD, CURV_SQ + 1))
    learning = model.table[:, SEEN] >= options.bootstrap
    return learning * rate(Moments(grad=grad, grad_sq=grad_sq, curv=curv, curv_sq=curv_sq), 1, options)


def mostly_learns(model: Model, options: Options) -> bool:
    """Do most non-zero elements seen so far belong to coordinates that have seen enough to learn?"""
    seen = model.table[:, SEEN]
    return bool(seen[seen >= options.bootstrap].sum() > seen.sum() / 2)


def mean_loss(margins: Any, targets: Any, weights: Any, task: Task) -> float:
    """The mean loss at these margins, samples × outputs."""
    out = np.empty_like(margins)
    loss_of = kept(slopes)
    total = sum(loss_of(task, margins, i, targets[i], weights[i], out) for i in range(len(targets)))
    return float(total / weights.sum())


class Patience:
    """Says when the best loss has not improved, by a share `tol` of the first one, for `patience` passes in a row."""

    def __init__(self, tol: float | None, patience: int):
        self.tol = tol
        self.patience = patience
        self.first: float | None = None
        self.best = float("inf")
        self.waited = 0

    def is_over(self, loss: float) -> bool:
        if self.tol is None:
            return False
        self.first = loss if self.first is None else self.first
        self.waited = 0 if loss < self.best - self.tol * abs(self.first) else self.waited + 1
        self.best = min(self.best, loss)
        return self.waited >= self.patience


def shuffles(rows: Any, rng: np.random.Generator) -> Iterator[Any]:
    """Random orders of these rows, without end."""
    while True:
        yield rng.permutation(rows)
