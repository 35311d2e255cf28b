"""One pass of minibatches over sparse rows.

Plain Python, compiled by `vsgd.jit`. A column that no row of a minibatch touches is neither read nor written. What an
algorithm does in its own way is in `column_phases` and `paper_phases`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from vsgd.linear.losses import Task, slopes
from vsgd.linear.minibatch import Workspace, gather, load, moments_of, store
from vsgd.linear.model import LARGEST, SEEN, THETA, Model
from vsgd.linear.penalty import penalized, stop_at_zero
from vsgd.linear.rows import Rows


def evaluate(direction: Any, batch: Any, targets: Any, weights: Any, task: Task, work: Workspace, slope: Any) -> float:
    """Add what `direction` does to the margins of the rows; slopes there, and the total loss."""
    entry_slot, entry_value = work.entry_slot, work.entry_value
    outputs = np.uint64(work.margin.shape[1])
    loss = 0.0
    for i in range(len(batch)):
        for k in range(outputs):
            margin = 0.0
            for e in range(work.row_end[i], work.row_end[i + 1]):
                margin += entry_value[e] * direction[entry_slot[e] * outputs + k]
            work.margin[i, k] += margin
        loss += slopes(task, work.margin, i, targets[batch[i]], weights[batch[i]], slope)
    return loss


def notice_largest(slots: int, work: Workspace) -> None:
    """Keep the largest |x| of each column."""
    state = work.state
    outputs = np.uint64(work.margin.shape[1])
    for s in range(np.uint64(slots)):
        for c in range(s * outputs, (s + np.uint64(1)) * outputs):
            state[LARGEST, c] = max(state[LARGEST, c], work.largest[s])
        work.largest[s] = 0.0


def average(coordinates: int, work: Workspace) -> None:
    """Sums to means over the samples."""
    moments = work.moments
    for c in range(np.uint64(coordinates)):
        share = 1.0 / work.samples[c]
        for field in range(4):
            moments[field, c] *= share


def penalize(slots: int, model: Model, task: Task, work: Workspace) -> None:
    """Add the penalty to the means; the intercept has none."""
    outputs = work.margin.shape[1]
    for s in range(slots):
        if work.column[s] == len(work.slot_of) - 1 and task.intercept:
            continue
        for c in range(s * outputs, (s + 1) * outputs):
            rarity = model.progress[2] / (work.state[SEEN, c] + work.samples[c])
            batch = penalized(moments_of(work, c), work.state[THETA, c], task.l1 * rarity, task.l2 * rarity)
            for field in range(4):
                work.moments[field, c] = batch[field]


def smooth(slots: int, model: Model, task: Task, work: Workspace) -> None:
    """Stop at the kink of an L1 penalty, and average the iterates, if wanted."""
    known = model.table.reshape(-1)
    outputs = work.margin.shape[1]
    for s in range(slots):
        column = work.column[s]
        has_penalty = column < len(work.slot_of) - 1 or not task.intercept
        for k in range(outputs):
            c = s * outputs + k
            if task.l1 > 0 and has_penalty:
                work.state[THETA, c] = stop_at_zero(known[work.place[c]], work.state[THETA, c])
            if task.average:
                off = work.state[THETA, c] - model.average[column, k]
                model.average[column, k] += off / math.sqrt(work.state[SEEN, c])


def pass_with(measure: Callable[..., float], update: Callable[..., None]) -> Callable[..., float]:
    """The pass of an algorithm, from the two phases that are its own.

    Args:
        measure: (batch, slots, model, targets, weights, task, config, work) → the loss; sums moments over the samples.
        update: (coordinates, config, work); the algorithm's update of each coordinate.
    """

    def train(
        model: Model,
        rows: Rows,
        order: Any,
        targets: Any,
        weights: Any,
        batch_size: int,
        task: Task,
        config: Any,
        work: Workspace,
    ) -> float:
        """Learn from the rows named by `order`. The total loss of all minibatches, each before it was learnt from."""
        loss = 0.0
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            model.progress[1] += 1
            model.progress[2] += len(batch)
            slots = gather(rows, batch, task.intercept, work)
            coordinates = slots * model.table.shape[2]
            load(slots, model.table, work)
            loss += measure(batch, slots, model, targets, weights, task, config, work)
            average(coordinates, work)
            if task.l1 + task.l2 > 0:
                penalize(slots, model, task, work)
            update(coordinates, config, work)
            if task.l1 > 0 or task.average:
                smooth(slots, model, task, work)
            store(coordinates, model.table, work)
        return loss

    return train
