"""One pass of minibatches over sparse rows.

Plain Python, compiled by `vsgd.jit`. A column that no row of a minibatch touches is neither read nor written. How
algorithms measure a minibatch is in `column_phases` and `paper_phases`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from vsgd.core import Moments, State
from vsgd.linear.centering import is_refresh_due, list_centered, move_centers, observe
from vsgd.linear.evidence import estimate_penalty, estimated_penalty, evidence_l2
from vsgd.linear.losses import POISSON, Task, slopes
from vsgd.linear.minibatch import (
    Workspace,
    gather,
    load,
    moments_of,
    outputs_of,
    set_state,
    state_of,
    store,
)
from vsgd.linear.model import BATCHES, COLUMN_MAX, ROWS, SCALE_SQ, SEEN, THETA, Model
from vsgd.linear.penalty import shifted, side_of_kink, stop_at_zero, with_l2
from vsgd.linear.rows import Rows

MAX_LOG_STEP = 0.25
"""Upper limit on the change of the logarithm of a mean in one minibatch."""


def evaluate(direction: Any, batch: Any, targets: Any, weights: Any, task: Task, work: Workspace, slope: Any) -> float:
    """Add X · direction to the margins; slopes of the losses there, in `slope`. Returns the total loss."""
    entry_slot, entry_value = work.entry_slot, work.entry_value
    outputs = outputs_of(work)
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
    outputs = outputs_of(work)
    for k in range(outputs):
        for s in range(np.uint64(slots)):
            c = s * outputs + k
            state[COLUMN_MAX, c] = max(state[COLUMN_MAX, c], work.column_max[s])
    work.column_max[:slots] = 0.0


def mean_moments(work: Workspace, c: Any) -> Moments:
    """Return the means over the samples of a coordinate, with its L2 penalty."""
    weight = 1.0 / work.samples[c]
    total = moments_of(work, c)
    mean = Moments(total.grad * weight, total.grad_sq * weight, total.curv * weight, total.curv_sq * weight)
    return with_l2(mean, work.state[THETA, c], work.l2[c])


def penalize(slots: int, model: Model, task: Task, work: Workspace) -> None:
    """Set the weights of fixed L1 and L2 penalties; the intercept has none."""
    outputs = outputs_of(work)
    for s in range(np.uint64(slots)):
        has_penalty = work.column[s] < len(work.slot_of) - 1 or not task.intercept
        for k in range(outputs):
            c = s * outputs + k
            inverse_frequency = model.progress[ROWS] / (work.state[SEEN, c] + work.samples[c]) * has_penalty
            work.l1[c] = task.l1 * inverse_frequency
            work.l2[c] = task.l2 * inverse_frequency


def penalize_by_evidence(slots: int, model: Model, task: Task, work: Workspace) -> None:
    """Set the weights of estimated L2 penalties. That of the intercept is 0, since its mean square is."""
    outputs, centered = outputs_of(work), np.uint64(work.centered[0])
    for k in range(outputs):
        estimated = estimated_penalty(model, task, k)
        for s in range(centered):
            c = s * outputs + k
            work.l2[c] = evidence_l2(estimated, 1.0, work.state[SEEN, c] + work.samples[c], work.scale_sq[s])
        for s in range(centered, np.uint64(slots)):
            work.l2[s * outputs + k] = 0.0
        if estimated.rare > 0:
            for s in range(centered, np.uint64(slots)):
                c = s * outputs + k
                samples, scale_sq = work.state[SEEN, c] + work.samples[c], model.columns[work.column[s], SCALE_SQ]
                work.l2[c] = evidence_l2(estimated, estimated.rare, samples, scale_sq)


def limit_steps(batch: Any, coordinates: int, model: Model, work: Workspace) -> None:
    """Shorten the steps of a minibatch so that no output moves by more than `MAX_LOG_STEP`.

    Behind an exponential link, a large move changes the curvature itself many times over.
    """
    flat = model.table.reshape(-1)
    centered = np.uint64(work.centered[0])
    largest = 0.0
    for i in range(len(batch)):
        moved, first = 0.0, np.uint64(i) * (centered + np.uint64(1))
        for s in range(centered):
            moved += work.block[first + s] * (work.state[THETA, s] - flat[work.theta_at[s]])
        for e in range(work.row_end[i], work.row_end[i + 1]):
            c = work.entry_slot[e]
            moved += work.entry_value[e] * (work.state[THETA, c] - flat[work.theta_at[c]])
        largest = max(largest, abs(moved))
    if largest > MAX_LOG_STEP:
        for c in range(coordinates):
            before = flat[work.theta_at[c]]
            work.state[THETA, c] = before + (work.state[THETA, c] - before) * (MAX_LOG_STEP / largest)


def start_at_mean(batch: Any, targets: Any, weights: Any, model: Model) -> None:
    """Set the intercept of a model that has seen nothing to the logarithm of the mean target."""
    intercept = model.table.shape[0] - 1
    total, weight = 0.0, 0.0
    for i in range(len(batch)):
        total += weights[batch[i]] * targets[batch[i]]
        weight += weights[batch[i]]
    if model.table[intercept, SEEN, 0] == 0 and total > 0:
        model.table[intercept, THETA, 0] = math.log(total / weight)


def average_iterates(slots: int, model: Model, work: Workspace) -> None:
    """Update the average of the iterates."""
    outputs = outputs_of(work)
    for s in range(np.uint64(slots)):
        column = work.column[s]
        for k in range(outputs):
            c = s * outputs + k
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
        list_centered(model, task, work)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            model.progress[BATCHES] += 1
            model.progress[ROWS] += len(batch)
            if task.center or task.evidence:
                if task.fresh:
                    observe(model, rows, batch)
                is_first_of_pass = start == 0 and not task.fresh
                if is_first_of_pass or is_refresh_due(model.progress[ROWS] - len(batch), model.progress[ROWS]):
                    if is_first_of_pass or task.fresh:
                        move_centers(model, task)
                        list_centered(model, task, work)
                    if task.evidence:
                        estimate_penalty(model, task)
            if task.center and task.loss >= POISSON:
                start_at_mean(batch, targets, weights, model)
            slots = gather(rows, batch, task.intercept, work)
            coordinates = slots * len(work.outputs)
            load(slots, model.table, work)
            loss += measure(batch, slots, model, targets, weights, task, config, work)
            if task.evidence:
                penalize_by_evidence(slots, model, task, work)
            elif task.l1 + task.l2 > 0:
                penalize(slots, model, task, work)
            if task.l1 > 0:
                for c in range(np.uint64(coordinates)):
                    theta, state, batch_mean = work.state[THETA, c], state_of(work, c), mean_moments(work, c)
                    side = side_of_kink(theta, state.mean.grad, work.l1[c])
                    slope = work.l1[c] * side
                    state = State(shifted(state.mean, slope), state.memory, state.seen)
                    theta, state, _ = update(theta, state, shifted(batch_mean, slope), work.samples[c], config)
                    state = State(shifted(state.mean, -slope), state.memory, state.seen)
                    if work.l1[c] > 0:
                        theta = stop_at_zero(theta, side)
                    set_state(work, c, theta, state)
            else:
                for c in range(np.uint64(coordinates)):
                    theta = work.state[THETA, c]
                    theta, state, _ = update(theta, state_of(work, c), mean_moments(work, c), work.samples[c], config)
                    set_state(work, c, theta, state)
            if task.center and task.loss >= POISSON:
                limit_steps(batch, coordinates, model, work)
            if task.average:
                average_iterates(slots, model, work)
            store(coordinates, model.table, work)
        return loss

    return train
