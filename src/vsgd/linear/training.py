"""Passes over rows: in shuffled order, over threads, until the loss no longer improves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from vsgd.algorithms import columns, paper
from vsgd.algorithms.base import require
from vsgd.algorithms.columns import Columns
from vsgd.algorithms.paper import Paper
from vsgd.core import Moments
from vsgd.jit import cached_jit
from vsgd.linear import column_phases, paper_phases
from vsgd.linear.centering import most_centered
from vsgd.linear.kernel import pass_with
from vsgd.linear.losses import Task, slopes
from vsgd.linear.minibatch import workspace
from vsgd.linear.model import CENTER, CURV_SQ, GRAD, SEEN, THETA, Model
from vsgd.linear.rows import Rows
from vsgd.linear.validation import check_all

COLUMN_PASS = pass_with(column_phases.measure, columns.update)
PAPER_PASS = pass_with(paper_phases.measure, paper.update)


@dataclass(frozen=True)
class Training:
    """Settings of training: objective, constants of the algorithm, rows per minibatch, and number of threads."""

    task: Task
    options: Columns | Paper
    batch_size: int = 32
    threads: int = 1

    def __post_init__(self) -> None:
        require(self.options, Columns, Paper)


def split(model: Model, parts: int) -> list[Model]:
    """Return copies of a model, each with a part of the outputs."""
    tables = np.array_split(model.table, parts, axis=2)
    averages = np.array_split(model.average, parts, axis=1)
    sums = np.array_split(model.sums, parts, axis=1)
    penalties = np.array_split(model.penalty, parts, axis=1)
    return [
        Model(
            table=np.ascontiguousarray(table),
            average=np.ascontiguousarray(average),
            columns=model.columns.copy(),
            sums=np.ascontiguousarray(some),
            penalty=np.ascontiguousarray(penalty),
            residual=model.residual.copy(),
            progress=model.progress.copy(),
        )
        for table, average, some, penalty in zip(tables, averages, sums, penalties, strict=True)
    ]


def join(model: Model, parts: list[Model]) -> None:
    """Copy the parts back into the model."""
    np.concatenate([part.table for part in parts], axis=2, out=model.table)
    np.concatenate([part.average for part in parts], axis=1, out=model.average)
    np.concatenate([part.sums for part in parts], axis=1, out=model.sums)
    np.concatenate([part.penalty for part in parts], axis=1, out=model.penalty)
    model.columns[:] = parts[0].columns
    model.progress[:] = parts[0].progress


def train_on(
    model: Model, rows: Rows, order: Any, targets: Any, weights: Any, training: Training, is_checked: bool = False
) -> float:
    """Train for one pass over the rows in a given order. Return the mean loss of the rows before their updates.

    The result does not depend on the number of threads. `is_checked` is whether an earlier pass had the same arguments
    except for the order.
    """
    if not is_checked:
        check_all(model, rows, order, targets, weights, training)
    return share_outputs(model, rows, order, targets, weights, training) / float(weights[order].sum())


def run_pass(
    model: Model, rows: Rows, order: Any, targets: Any, weights: Any, training: Training, first_output: int = 0
) -> float:
    """Run the compiled pass in the current thread. Return the total loss."""
    by_columns = isinstance(training.options, Columns)
    run = cached_jit(COLUMN_PASS if by_columns else PAPER_PASS)
    task = training.task._replace(first_output=first_output, center=by_columns and training.task.intercept)
    centered = most_centered(model, rows) if task.center else 0
    space = workspace(rows, model.table.shape[0], model.table.shape[2], training.batch_size, centered)
    return float(run(model, rows, order, targets, weights, training.batch_size, task, training.options, space))


def share_outputs(model: Model, rows: Rows, order: Any, targets: Any, weights: Any, training: Training) -> float:
    """Run a pass, in several threads for one-vs-rest, whose outputs are independent. Return the total loss."""
    parts = min(training.threads, model.table.shape[2]) if training.task.one_vs_rest else 1
    if parts == 1:
        return run_pass(model, rows, order, targets, weights, training)
    models = split(model, parts)
    first = np.cumsum([0] + [part.table.shape[2] for part in models])

    def train_part(i: int) -> float:
        return run_pass(models[i], rows, order, targets, weights, training, int(first[i]))

    with ThreadPoolExecutor(parts) as pool:
        total = sum(pool.map(train_part, range(parts)))
    join(model, models)
    return total


def coefficients(model: Model, task: Task) -> Any:
    """Return θ, or its average over the updates, for the original columns without centers; columns × outputs."""
    theta = np.array(model.average if task.average else model.table[:, THETA])
    if task.intercept:
        theta[-1] -= model.columns[:, CENTER] @ theta
    return theta


def margins_of(X: Any, theta: Any) -> Any:
    """Return the margins of the rows of X, samples × outputs. An additional last row of `theta` is the intercept."""
    features = X.shape[1]
    return np.ascontiguousarray(X @ theta[:features]) + theta[features:].sum(axis=0)


def learning_rates(model: Model, options: Columns | Paper) -> Any:
    """Return η* of every coordinate for a minibatch of one sample; 0 during its bootstrap."""
    mean = Moments(*(model.table[:, field] for field in range(GRAD, CURV_SQ + 1)))
    if isinstance(options, Columns):
        return columns.rate(mean, 1, options)
    return (model.table[:, SEEN] >= options.bootstrap) * paper.rate(mean, 1, options)


def mostly_learns(model: Model, options: Columns | Paper) -> bool:
    """Return whether most non-zero elements so far belong to coordinates after their bootstrap."""
    seen = model.table[:, SEEN]
    bootstrap = 0.0 if isinstance(options, Columns) else options.bootstrap
    return bool(seen[seen >= bootstrap].sum() > seen.sum() / 2)


def total_loss(margins: Any, targets: Any, weights: Any, task: Task, slope: Any) -> float:
    """Return the loss of all rows at these margins, samples × outputs; slopes are written to `slope`. Compiled."""
    loss = 0.0
    for i in range(len(targets)):
        loss += slopes(task, margins, i, targets[i], weights[i], slope)
    return loss


def mean_loss(margins: Any, targets: Any, weights: Any, task: Task) -> float:
    """Return the mean loss at these margins, samples × outputs."""
    return float(cached_jit(total_loss)(margins, targets, weights, task, np.empty_like(margins)) / weights.sum())


class Patience:
    """Stops when the mean loss of the last `patience` passes has not improved for as many passes in a row.

    An improvement is at least `tol` times the lowest loss of the first `patience` passes. Means over passes are
    compared, since the noise of a single pass would hide slow progress.
    """

    def __init__(self, tol: float | None, patience: int):
        self.tol = tol
        self.patience = patience
        self.losses: list[float] = []
        self.best = float("inf")
        self.waited = 0

    def is_over(self, loss: float) -> bool:
        """Add the loss of a pass, and return whether to stop."""
        if self.tol is None:
            return False
        self.losses.append(loss)
        smoothed = float(np.mean(self.losses[-self.patience :]))
        unit = min(abs(first) for first in self.losses[: self.patience])
        if smoothed < self.best - self.tol * unit:
            self.best, self.waited = smoothed, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


def orders(rows: Any, rng: np.random.Generator, shuffle: bool) -> Iterator[Any]:
    """Yield orders of the rows without end, random ones if `shuffle`."""
    while True:
        yield rng.permutation(rows) if shuffle else rows
