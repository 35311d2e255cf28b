"""`algorithms.columns` on the rows of a minibatch: curvature is measured in the output, then spread over the columns.

Plain Python, compiled into the pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vsgd.algorithms import columns
from vsgd.core import curvature
from vsgd.linear.evidence import deviations, sum_over_rows
from vsgd.linear.kernel import update_column_max
from vsgd.linear.losses import Task, slopes
from vsgd.linear.minibatch import Workspace, add_sample, outputs_of, state_of
from vsgd.linear.model import BATCHES, COLUMN_MAX, CURVATURE, SEED, THETA, WEIGHT, Model
from vsgd.linear.rows import scramble

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""The increment of splitmix64: spreads consecutive numbers over 64 bits before their bits are mixed."""


def rescale_grown_columns(slots: int, work: Workspace) -> None:
    """Shrink θ where the largest |x| of its column grows, so that the column adds no more to an output than before.

    A column may contain rounding noise for a long time, and then real values: its θ was learned in another unit.
    """
    state = work.state
    outputs = outputs_of(work)
    for k in range(outputs):
        for s in range(np.uint64(slots)):
            c = s * outputs + k
            if work.column_max[s] > state[COLUMN_MAX, c]:
                state[THETA, c] *= state[COLUMN_MAX, c] / work.column_max[s]


def update_residual(model: Model, batch: Any, targets: Any, work: Workspace) -> Any:
    """EMA of |margin − target| over about the last hundred minibatches; 1 if it is 0."""
    total = 0.0
    for i in range(len(batch)):
        total += abs(work.margin[i, 0] - targets[batch[i]])
    model.residual[0] += (total / len(batch) - model.residual[0]) / min(model.progress[BATCHES], 100)
    return model.residual[0] + (model.residual[0] == 0)


def choose_probes(coordinates: int, config: columns.Columns, work: Workspace) -> None:
    """Write the probe offset δ of each coordinate to the workspace."""
    for c in range(np.uint64(coordinates)):
        work.delta[c] = columns.probe(state_of(work, c), work.samples[c], work.state[COLUMN_MAX, c], config)


def sum_over_block(i: int, k: Any, theta: Any, delta: Any, work: Workspace) -> tuple[float, float]:
    """Return the sums of x θ and of |x| δ over the columns with a center, for output k of row i."""
    outputs, centered = outputs_of(work), np.uint64(work.centered[0])
    first = np.uint64(i) * (centered + np.uint64(1))
    margin, norm = 0.0, 0.0
    for s in range(centered):
        x, c = work.block[first + s], s * outputs + k
        margin += x * theta[c]
        norm += abs(x) * delta[c]
    return margin, norm


def evaluate_rows(batch: Any, targets: Any, weights: Any, task: Task, work: Workspace) -> float:
    """Outputs of the rows, slopes of their losses, and Σ |x| δ over each row. Returns the total loss."""
    entry_slot, entry_value, theta, delta = work.entry_slot, work.entry_value, work.state[THETA], work.delta
    outputs = outputs_of(work)
    loss = 0.0
    for i in range(len(batch)):
        for k in range(outputs):
            margin, norm = sum_over_block(i, k, theta, delta, work)
            for e in range(work.row_end[i], work.row_end[i + 1]):
                c = entry_slot[e] * outputs + k
                margin += entry_value[e] * theta[c]
                norm += abs(entry_value[e]) * delta[c]
            work.margin[i, k] = margin
            work.row_probe_norm[i, k] = norm
        loss += slopes(task, work.margin, i, targets[batch[i]], weights[batch[i]], work.slope)
    return loss


def probe_rows(
    model: Model,
    unit: float,
    batch: Any,
    targets: Any,
    weights: Any,
    task: Task,
    config: columns.Columns,
    work: Workspace,
) -> None:
    """Curvature of each row's loss in its output, probed at ± one unit of the output.

    In regression the unit is the mean residual, or that of the row if it is larger. Random signs depend on the seed,
    the minibatch, the row's position in it and the output alone.
    """
    outputs = outputs_of(work)
    stream = np.uint64(model.progress[SEED]) + scramble(np.uint64(model.progress[BATCHES]))
    for i in range(len(batch)):
        size = unit
        if not task.natural_unit:
            size = max(unit, abs(work.margin[i, 0] - targets[batch[i]]))
        for k in range(outputs):
            bits = scramble(stream + np.uint64(i) * GOLDEN_GAMMA + k + np.uint64(task.first_output))
            work.margin[i, k] += size if bits & np.uint64(1) else -size
        slopes(task, work.margin, i, targets[batch[i]], weights[batch[i]], work.probed_slope)
        for k in range(outputs):
            slope = work.slope[i, k]
            work.curvature[i, k] = columns.damped(curvature(slope, work.probed_slope[i, k], size), slope, size, config)


def floor_row_curvature(batch: Any, model: Model, weights: Any, config: columns.Columns, work: Workspace) -> None:
    """Bound the curvature of each row from below by a fraction of the mean over all rows so far.

    A row that is classified with confidence has almost no curvature, so that Newton's step would move its output by a
    unit at every visit, although its gradient is almost zero.
    """
    for i in range(len(batch)):
        for k in range(outputs_of(work)):
            mean = weights[batch[i]] * model.sums[CURVATURE, k] / model.sums[WEIGHT, k]
            work.curvature[i, k] = max(work.curvature[i, k], config.row_curvature_floor * mean)


def add_element(x: float, c: Any, slope: float, row_curvature: float, norm: float, work: Workspace) -> None:
    """Add one element of a row to the sums of its coordinate; `norm` is Σ |x| δ over the row."""
    others = max(0.0, norm - abs(x) * work.delta[c])
    add_sample(work, c, slope * x, columns.column_curvature(row_curvature, x, work.state[COLUMN_MAX, c], others))


def sum_moments(batch: Any, work: Workspace) -> None:
    """Sum the moments over the samples."""
    outputs, centered = outputs_of(work), np.uint64(work.centered[0])
    for i in range(len(batch)):
        first = np.uint64(i) * (centered + np.uint64(1))
        for k in range(outputs):
            slope, row_curvature, norm = work.slope[i, k], work.curvature[i, k], work.row_probe_norm[i, k]
            for s in range(centered):
                add_element(work.block[first + s], s * outputs + k, slope, row_curvature, norm, work)
            for e in range(work.row_end[i], work.row_end[i + 1]):
                add_element(work.entry_value[e], work.entry_slot[e] * outputs + k, slope, row_curvature, norm, work)


def measure(
    batch: Any,
    slots: int,
    model: Model,
    targets: Any,
    weights: Any,
    task: Task,
    config: columns.Columns,
    work: Workspace,
) -> float:
    """Sum gradients and curvatures over the samples; curvature is probed in the outputs. Returns the total loss."""
    rescale_grown_columns(slots, work)
    update_column_max(slots, work)
    choose_probes(slots * len(work.outputs), config, work)
    loss = evaluate_rows(batch, targets, weights, task, work)
    if task.evidence and task.fresh:
        deviations(batch, weights, model, work)
    unit = 1.0 if task.natural_unit else update_residual(model, batch, targets, work)
    probe_rows(model, unit, batch, targets, weights, task, config, work)
    sum_over_rows(batch, weights, model, task, work)
    floor_row_curvature(batch, model, weights, config, work)
    sum_moments(batch, work)
    return loss
