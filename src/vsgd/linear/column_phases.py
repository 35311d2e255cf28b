"""`algorithms.columns` on the rows of a minibatch: curvature is measured in the output, then spread over the columns.

Plain Python, compiled into the pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vsgd.algorithms import columns
from vsgd.core import curvature
from vsgd.linear.kernel import evaluate, notice_largest
from vsgd.linear.losses import Task, slopes
from vsgd.linear.minibatch import Workspace, add_sample, moments_of, set_state, state_of
from vsgd.linear.model import LARGEST, THETA, Model
from vsgd.linear.rows import scramble

ODD = np.uint64(0x9E3779B97F4A7C15)
"""Spreads consecutive columns over all 64-bit numbers before their bits are mixed."""


def shrink_grown(slots: int, work: Workspace) -> None:
    """Shrink θ where the largest |x| of its column grows, so that it adds no more to an output than before.

    A column may be rounding noise for a long time, and then a number: its θ was learnt in another unit.
    """
    state = work.state
    outputs = np.uint64(work.margin.shape[1])
    for s in range(np.uint64(slots)):
        for c in range(s * outputs, (s + np.uint64(1)) * outputs):
            if work.largest[s] > state[LARGEST, c]:
                state[THETA, c] *= state[LARGEST, c] / work.largest[s]


def typical_residual(model: Model, batch: Any, targets: Any, work: Workspace) -> Any:
    """The mean |margin − target| of about the last hundred minibatches."""
    total = 0.0
    for i in range(len(batch)):
        total += abs(work.margin[i, 0] - targets[batch[i]])
    model.residual[0] += (total / len(batch) - model.residual[0]) / min(model.progress[1], 100)
    return model.residual[0] + (model.residual[0] == 0)


def choose_probes(coordinates: int, config: columns.Columns, work: Workspace) -> None:
    """δ of each coordinate."""
    for c in range(np.uint64(coordinates)):
        work.delta[c] = columns.probe(state_of(work, c), work.samples[c], work.state[LARGEST, c], config)


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
    """Curvatures of the rows, from slopes where every output has moved by a unit; and how far their δ reach.

    In regression the unit is a typical residual, or that of the row if it is larger. Random signs depend on the place
    in the minibatch, the minibatch, the output and the seed alone.
    """
    entry_slot, entry_value = work.entry_slot, work.entry_value
    outputs = np.uint64(work.margin.shape[1])
    moment = np.uint64(model.progress[0]) + scramble(np.uint64(model.progress[1]))
    for i in range(len(batch)):
        size = unit
        if not task.natural_unit:
            size = max(unit, abs(work.margin[i, 0] - targets[batch[i]]))
        for k in range(outputs):
            coin = scramble(moment + np.uint64(i) * ODD + k + np.uint64(task.first_output))
            work.margin[i, k] += size if coin & np.uint64(1) else -size
        slopes(task, work.margin, i, targets[batch[i]], weights[batch[i]], work.shifted)
        for k in range(outputs):
            reach = 0.0
            for e in range(work.row_end[i], work.row_end[i + 1]):
                reach += abs(entry_value[e]) * work.delta[entry_slot[e] * outputs + k]
            slope = work.slope[i, k]
            work.reach[i, k] = reach
            work.curvature[i, k] = columns.damped(curvature(slope, work.shifted[i, k], size), slope, size, config)


def level(batch: Any, model: Model, weights: Any, config: columns.Columns, work: Workspace) -> None:
    """Take no row to be much flatter than rows have been on average.

    A row that is classified surely has nearly no curvature, so that Newton's step would move its output by a unit at
    every visit, though there is next to nothing left to learn from it.
    """
    for i in range(len(batch)):
        for k in range(work.margin.shape[1]):
            model.curvature[0, k] += work.curvature[i, k]
            model.curvature[1, k] += weights[batch[i]]
    for i in range(len(batch)):
        for k in range(work.margin.shape[1]):
            mean = weights[batch[i]] * model.curvature[0, k] / model.curvature[1, k]
            work.curvature[i, k] = max(work.curvature[i, k], config.row_curvature_floor * mean)


def sum_up(batch: Any, work: Workspace) -> None:
    """Sum the moments of the samples."""
    outputs = np.uint64(work.margin.shape[1])
    for i in range(len(batch)):
        for e in range(work.row_end[i], work.row_end[i + 1]):
            x = work.entry_value[e]
            for k in range(outputs):
                c = work.entry_slot[e] * outputs + k
                others = max(0.0, work.reach[i, k] - abs(x) * work.delta[c])
                curv = columns.column_curvature(work.curvature[i, k], x, work.state[LARGEST, c], others)
                add_sample(work, c, work.slope[i, k] * x, curv)


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
    """Gradients, and curvatures of the rows at a random unit step of their outputs. The loss of the minibatch."""
    shrink_grown(slots, work)
    notice_largest(slots, work)
    work.margin[:] = 0.0
    loss = evaluate(work.state[THETA], batch, targets, weights, task, work, work.slope)
    unit = 1.0 if task.natural_unit else typical_residual(model, batch, targets, work)
    choose_probes(slots * work.margin.shape[1], config, work)
    probe_rows(model, unit, batch, targets, weights, task, config, work)
    level(batch, model, weights, config, work)
    sum_up(batch, work)
    return loss


def update(coordinates: int, config: columns.Columns, work: Workspace) -> None:
    """`columns.update` of each coordinate."""
    for c in range(np.uint64(coordinates)):
        theta = work.state[THETA, c]
        theta, new, _ = columns.update(theta, state_of(work, c), moments_of(work, c), work.samples[c], config)
        set_state(work, c, theta, new)
