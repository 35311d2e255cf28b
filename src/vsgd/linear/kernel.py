"""One pass of minibatches over sparse rows.

Plain Python, compiled by `vsgd.jit`. A column that no row of a minibatch touches is neither read nor written. How
algorithms measure a minibatch is in `column_phases` and `paper_phases`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from vsgd.linear.losses import Task, slopes
from vsgd.linear.minibatch import Workspace, gather, load, moments_of, set_state, state_of, store
from vsgd.linear.model import BATCHES, COLUMN_MAX, ROWS, SEEN, THETA, Model
from vsgd.linear.penalty import penalized, stop_at_zero
from vsgd.linear.rows import Rows


def evaluate(direction: Any, batch: Any, targets: Any, weights: Any, task: Task, work: Workspace, slope: Any) -> float:
    """Add X · direction to the margins; slopes of the losses there, in `slope`. Returns the total loss."""
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


def update_column_max(slots: int, work: Workspace) -> None:
    """Update the largest |x| of each column."""
    state = work.state
    outputs = np.uint64(work.margin.shape[1])
    for s in range(np.uint64(slots)):
        for c in range(s * outputs, (s + np.uint64(1)) * outputs):
            state[COLUMN_MAX, c] = max(state[COLUMN_MAX, c], work.column_max[s])
        work.column_max[s] = 0.0


def average_moments(coordinates: int, work: Workspace) -> None:
    """Turn sums over the samples into means."""
    moments = work.moments
    for c in range(np.uint64(coordinates)):
        weight = 1.0 / work.samples[c]
        for field in range(4):
            moments[field, c] *= weight


def penalize(slots: int, model: Model, task: Task, work: Workspace) -> None:
    """Add the penalty to the moments; the intercept has none."""
    outputs = work.margin.shape[1]
    for s in range(slots):
        if work.column[s] == len(work.slot_of) - 1 and task.intercept:
            continue
        for c in range(s * outputs, (s + 1) * outputs):
            inverse_frequency = model.progress[ROWS] / (work.state[SEEN, c] + work.samples[c])
            l1, l2 = task.l1 * inverse_frequency, task.l2 * inverse_frequency
            batch = penalized(moments_of(work, c), work.state[THETA, c], l1, l2)
            for field in range(4):
                work.moments[field, c] = batch[field]


def clip_at_zero_and_average(slots: int, model: Model, task: Task, work: Workspace) -> None:
    """Stop at the kink of an L1 penalty, and average the iterates, as the task says."""
    flat = model.table.reshape(-1)
    outputs = work.margin.shape[1]
    for s in range(slots):
        column = work.column[s]
        has_penalty = column < len(work.slot_of) - 1 or not task.intercept
        for k in range(outputs):
            c = s * outputs + k
            if task.l1 > 0 and has_penalty:
                work.state[THETA, c] = stop_at_zero(flat[work.theta_at[c]], work.state[THETA, c])
            if task.average:
                distance = work.state[THETA, c] - model.average[column, k]
                model.average[column, k] += distance / math.sqrt(work.state[SEEN, c])


def pass_with(measure: Callable[..., float], update: Callable[..., Any]) -> Callable[..., float]:
    """Make the pass of an algorithm from how it measures a minibatch, and from its update.

    Args:
        measure: (batch, slots, model, targets, weights, task, config, work) → the loss; sums moments over the samples.
        update: (theta, state, batch, count, config) → theta, state, info; that of the algorithm, for one coordinate.
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
        """Train on the rows named by `order`. Returns the total loss of all minibatches, each before the update."""
        loss = 0.0
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            model.progress[BATCHES] += 1
            model.progress[ROWS] += len(batch)
            slots = gather(rows, batch, task.intercept, work)
            coordinates = slots * model.table.shape[2]
            load(slots, model.table, work)
            loss += measure(batch, slots, model, targets, weights, task, config, work)
            average_moments(coordinates, work)
            if task.l1 + task.l2 > 0:
                penalize(slots, model, task, work)
            for c in range(np.uint64(coordinates)):
                theta = work.state[THETA, c]
                theta, state, _ = update(theta, state_of(work, c), moments_of(work, c), work.samples[c], config)
                set_state(work, c, theta, state)
            if task.l1 > 0 or task.average:
                clip_at_zero_and_average(slots, model, task, work)
            store(coordinates, model.table, work)
        return loss

    return train
