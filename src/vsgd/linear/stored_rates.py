"""Steps between measured minibatches of `algorithms.columns`, with the learning rates of stored statistics.

Each row takes a step of its own, as in SGD. Only θ changes. During a pass, θ and the rate of each coordinate are side
by side in `Workspace.steps`, so that an element of a row touches one cache line. Plain Python, compiled into the pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vsgd.algorithms import columns
from vsgd.core import Moments, descend
from vsgd.linear.column_phases import GOLDEN_GAMMA, probe_row, row_curvature, stream_of
from vsgd.linear.evidence import estimated_penalty, evidence_l2
from vsgd.linear.losses import POISSON, Task, slopes
from vsgd.linear.minibatch import Workspace, outputs_of, read_row, state_of
from vsgd.linear.model import (
    BATCHES,
    CALIBRATION,
    CENTER,
    COUNT,
    CURV,
    CURV_SQ,
    FIELDS,
    GRAD,
    GRAD_SQ,
    MEMORY,
    SEEN,
    THETA,
    Model,
)
from vsgd.linear.rows import Rows, scramble

NUMBERS = 2
"""Numbers of a coordinate in `Workspace.steps`: θ, then the rate. Outputs are innermost, as in the table."""


def rows_between(model: Model, batch_size: int, task: Task, config: columns.Columns) -> int:
    """Return how many rows follow a measured minibatch before the next one. Not compiled.

    It is 0 at the first visit of rows, with L1, fixed L2 or averaging, for exponential links, and for softmax, whose
    outputs step together. It is 0 if the model overfits, so that columns without a center are penalized. It is 0 as
    well if most elements belong to columns with a center: their gradients need the mean over a minibatch, and a dense
    block is fast to measure.
    """
    is_plain = task.l1 + task.l2 == 0 and not (task.average or task.softmax or task.fresh) and task.loss < POISSON
    counts = model.columns[:, COUNT]
    is_sparse = 2 * counts[model.columns[:, CENTER] != 0].sum() < counts.sum()
    overfits = (model.penalty[CALIBRATION] < 1).any()
    return batch_size * (config.measure_every - 1) if is_plain and is_sparse and not overfits else 0


def first_measured(model: Model, batch_size: int, task: Task) -> int:
    """Return where the first measured minibatch of a pass begins, at random, so that passes measure different rows."""
    choices = np.uint64(task.between // batch_size + 1)
    return int(scramble(np.uint64(model.progress[BATCHES])) % choices) * batch_size


def load_steps(model: Model, config: columns.Columns, work: Workspace) -> None:
    """Copy θ from the table, and compute the rates, of all coordinates."""
    outputs, table, steps = outputs_of(work), model.table.reshape(-1), work.steps
    for j in range(np.uint64(model.table.shape[0])):
        for k in range(outputs):
            at, to = j * (np.uint64(FIELDS) * outputs) + k, j * (np.uint64(NUMBERS) * outputs) + k
            mean = Moments(
                grad=table[at + np.uint64(GRAD) * outputs],
                grad_sq=table[at + np.uint64(GRAD_SQ) * outputs],
                curv=table[at + np.uint64(CURV) * outputs],
                curv_sq=table[at + np.uint64(CURV_SQ) * outputs],
            )
            steps[to] = table[at]
            steps[to + outputs] = columns.stored_rate(mean, table[at + np.uint64(MEMORY) * outputs], config)


def store_theta(model: Model, work: Workspace) -> None:
    """Copy θ of all coordinates back to the table."""
    outputs, table, steps = outputs_of(work), model.table.reshape(-1), work.steps
    for j in range(np.uint64(model.table.shape[0])):
        for k in range(outputs):
            table[j * (np.uint64(FIELDS) * outputs) + k] = steps[j * (np.uint64(NUMBERS) * outputs) + k]


def load_theta(slots: int, work: Workspace) -> None:
    """Copy θ of the coordinates of a minibatch that will be measured."""
    outputs, steps = outputs_of(work), work.steps
    for s in range(np.uint64(slots)):
        for k in range(outputs):
            work.state[THETA, s * outputs + k] = steps[work.column[s] * (np.uint64(NUMBERS) * outputs) + k]


def store_steps(slots: int, config: columns.Columns, work: Workspace) -> None:
    """Copy θ and the new rates of the coordinates of a minibatch that was measured."""
    outputs, steps = outputs_of(work), work.steps
    for c in range(np.uint64(slots) * outputs):
        state = state_of(work, c)
        work.rate[c] = columns.stored_rate(state.mean, state.memory, config)
    for s in range(np.uint64(slots)):
        for k in range(outputs):
            c, to = s * outputs + k, work.column[s] * (np.uint64(NUMBERS) * outputs) + k
            steps[to] = work.state[THETA, c]
            steps[to + outputs] = work.rate[c]


def load_centered(model: Model, task: Task, work: Workspace) -> None:
    """Copy θ and the rates of the columns with a center, and compute their penalties."""
    outputs, steps = outputs_of(work), work.steps
    for k in range(outputs):
        estimated = estimated_penalty(model, task, k)
        for s in range(np.uint64(work.centered[0])):
            c, at = s * outputs + k, work.column[s] * (np.uint64(NUMBERS) * outputs) + k
            work.state[THETA, c] = steps[at]
            work.rate[c] = steps[at + outputs]
            samples = model.table[work.column[s], SEEN, k]
            work.l2[c] = evidence_l2(estimated, 1.0, samples, work.scale_sq[s]) if task.evidence else 0.0


def store_centered(work: Workspace) -> None:
    """Copy θ of the columns with a center back."""
    outputs = outputs_of(work)
    for s in range(np.uint64(work.centered[0])):
        for k in range(outputs):
            work.steps[work.column[s] * (np.uint64(NUMBERS) * outputs) + k] = work.state[THETA, s * outputs + k]


def evaluate_row(entries: Any, k: Any, work: Workspace) -> None:
    """Compute output k of a row, and its reach Σ η x²: how far the step of a row with slope 1 moves the output."""
    outputs, steps = outputs_of(work), work.steps
    margin, reach = 0.0, 0.0
    for s in range(np.uint64(work.centered[0])):
        x, c = work.block[s], s * outputs + k
        margin += x * work.state[THETA, c]
        reach += x * x * work.rate[c]
    for e in range(entries):
        x, at = work.entry_value[e], work.entry_slot[e] * (np.uint64(NUMBERS) * outputs) + k
        margin += x * steps[at]
        reach += x * x * steps[at + outputs]
    work.margin[0, k] = margin
    work.reach[k] = reach


def step_row(entries: Any, k: Any, slope: float, work: Workspace) -> None:
    """Update output k of the coordinates of a row; `slope` is that of the loss in the output.

    The penalty of columns with a center may have grown after their rate was measured, so it has the implicit form.
    """
    outputs, steps = outputs_of(work), work.steps
    for s in range(np.uint64(work.centered[0])):
        c = s * outputs + k
        rate, theta = work.rate[c], work.state[THETA, c]
        work.state[THETA, c] = descend(theta, rate * slope * work.block[s], rate * work.l2[c])
    for e in range(entries):
        at = work.entry_slot[e] * (np.uint64(NUMBERS) * outputs) + k
        steps[at] -= steps[at + outputs] * slope * work.entry_value[e]


def step(
    rows: Rows,
    batch: Any,
    model: Model,
    targets: Any,
    weights: Any,
    task: Task,
    config: columns.Columns,
    work: Workspace,
) -> float:
    """Take a step for each row, one after the other, and return the total loss.

    A step never moves an output beyond the minimum of the parabola of its row, so that rare large values are safe.
    """
    unit = 1.0 if task.natural_unit else model.residual[0] + (model.residual[0] == 0)
    model.progress[BATCHES] += 1
    load_centered(model, task, work)
    loss = 0.0
    for i in range(len(batch)):
        target, weight = targets[batch[i]], weights[batch[i]]
        entries = read_row(rows, batch[i], np.uint64(0), np.uint64(0), task.intercept, work)
        for k in range(outputs_of(work)):
            evaluate_row(entries, k, work)
        loss += slopes(task, work.margin, 0, target, weight, work.slope)
        probe_row(0, stream_of(model) + np.uint64(i) * GOLDEN_GAMMA, unit, target, weight, task, config, work)
        for k in range(outputs_of(work)):
            overshoot = max(1.0, row_curvature(0, k, weight, model, config, work) * work.reach[k])
            step_row(entries, k, work.slope[0, k] / overshoot, work)
    store_centered(work)
    return loss
