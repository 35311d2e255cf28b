"""One pass of minibatches over sparse rows, with the rule as the body of a loop over coordinates.

Plain Python, compiled by `vsgd.kernels.compiled_with`. A column that no row of a minibatch touches is neither read nor
written.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vsgd.linear.losses import Task, slopes
from vsgd.linear.minibatch import Workspace, gather, load, moments_of, state_of, store
from vsgd.linear.model import CURV, CURV_SQ, GRAD, GRAD_SQ, LARGEST, MEMORY, SEEN, THETA, Model
from vsgd.linear.penalty import penalized, stop_at_zero
from vsgd.linear.rows import Rows, scramble
from vsgd.options import COLUMNS
from vsgd.probe import cautious, column_curvature, column_shift, curvature, shift
from vsgd.rule import step

OPTIONS = COLUMNS
"""What the loops below are compiled with: as constants, so that whatever is switched off costs nothing."""

ODD = np.uint64(0x9E3779B97F4A7C15)
"""Spreads consecutive columns over all 64-bit numbers before their bits are mixed."""


def evaluate(
    first: int,
    last: int,
    direction: Any,
    batch: Any,
    targets: Any,
    weights: Any,
    task: Task,
    work: Workspace,
    slope: Any,
) -> None:
    """Add what `direction` does to the margins of some rows; slopes and losses there."""
    entry_slot, entry_value = work.entry_slot, work.entry_value
    outputs = np.uint64(work.margin.shape[1])
    for i in range(first, last):
        for k in range(outputs):
            margin = 0.0
            for e in range(work.row_end[i], work.row_end[i + 1]):
                margin += entry_value[e] * direction[entry_slot[e] * outputs + k]
            work.margin[i, k] += margin
        work.loss[i] = slopes(task, work.margin, i, targets[batch[i]], weights[batch[i]], slope)


def notice_largest(first: int, last: int, work: Workspace) -> None:
    """Keep the largest |x| of some slots. θ shrinks when it grows, so that it adds no more to an output than before.

    A column may be rounding noise for a long time, and then a number: its θ was learnt in another unit.
    """
    state = work.state
    outputs = np.uint64(work.margin.shape[1])
    for s in range(np.uint64(first), np.uint64(last)):
        for c in range(s * outputs, (s + np.uint64(1)) * outputs):
            before = state[LARGEST, c]
            if work.largest[s] > before:
                state[LARGEST, c] = work.largest[s]
                if OPTIONS.column_probe:
                    state[THETA, c] *= before / work.largest[s]
        work.largest[s] = 0.0


def sum_gradients(batch: Any, slots: int, work: Workspace) -> None:
    """Sums of the gradients, in place of δ, for those options that make δ of them."""
    outputs = np.uint64(work.margin.shape[1])
    work.delta[: slots * work.margin.shape[1]] = 0.0
    for i in range(len(batch)):
        for e in range(work.row_end[i], work.row_end[i + 1]):
            for k in range(outputs):
                work.delta[work.entry_slot[e] * outputs + k] += work.slope[i, k] * work.entry_value[e]


def choose_shifts(first: int, last: int, work: Workspace) -> None:
    """δ for some coordinates."""
    state, samples, delta = work.state, work.samples, work.delta
    for c in range(np.uint64(first), np.uint64(last)):
        if OPTIONS.column_probe:
            delta[c] = column_shift(state_of(state, c), samples[c], state[LARGEST, c], OPTIONS)
        else:
            delta[c] = shift(state_of(state, c), delta[c] / samples[c], samples[c], OPTIONS)


def probe_rows(
    first: int,
    last: int,
    model: Model,
    unit: float,
    batch: Any,
    targets: Any,
    weights: Any,
    task: Task,
    work: Workspace,
) -> None:
    """Curvatures of some rows, from slopes where every output has moved by a unit; and how far their δ reach.

    In regression the unit is a typical residual, or that of the row if it is larger. Random signs depend on the place
    in the minibatch, the minibatch, the output and the seed alone.
    """
    entry_slot, entry_value = work.entry_slot, work.entry_value
    outputs = np.uint64(work.margin.shape[1])
    moment = np.uint64(model.progress[0]) + scramble(np.uint64(model.progress[1]))
    for i in range(first, last):
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
            work.curvature[i, k] = cautious(curvature(slope, work.shifted[i, k], size), slope, size, OPTIONS)


def level(batch: Any, model: Model, weights: Any, work: Workspace) -> None:
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
            work.curvature[i, k] = max(work.curvature[i, k], OPTIONS.flattest * mean)


def sum_up(batch: Any, work: Workspace) -> None:
    """Sums of gradients, of curvatures and of their squares. At δ = ḡ, curvature is per unit of shift here."""
    moments, delta = work.moments, work.delta
    outputs = np.uint64(work.margin.shape[1])
    for i in range(len(batch)):
        for e in range(work.row_end[i], work.row_end[i + 1]):
            x = work.entry_value[e]
            for k in range(outputs):
                c = work.entry_slot[e] * outputs + k
                grad = work.slope[i, k] * x
                if OPTIONS.column_probe:
                    others = max(0.0, work.reach[i, k] - abs(x) * delta[c])
                    h = column_curvature(work.curvature[i, k], x, work.state[LARGEST, c], others)
                else:
                    h = cautious(curvature(grad, work.shifted[i, k] * x, 1.0), grad, 1.0, OPTIONS)
                moments[0, c] += grad
                moments[1, c] += grad * grad
                moments[2, c] += h
                moments[3, c] += h * h


def average(first: int, last: int, work: Workspace) -> None:
    """Sums to averages over the samples, curvature divided by the shift if it is not yet."""
    moments = work.moments
    for c in range(np.uint64(first), np.uint64(last)):
        share = 1.0 / work.samples[c]
        per_shift = 1.0 if OPTIONS.column_probe else 1.0 / abs(work.delta[c])
        moments[0, c] *= share
        moments[1, c] *= share
        moments[2, c] *= share * per_shift
        moments[3, c] *= share * per_shift * per_shift


def penalize(first: int, last: int, model: Model, task: Task, work: Workspace) -> None:
    """Add the penalty to the averages; the intercept has none."""
    outputs = work.margin.shape[1]
    for s in range(first, last):
        if work.column[s] == len(work.slot_of) - 1 and task.intercept:
            continue
        for c in range(s * outputs, (s + 1) * outputs):
            rarity = model.progress[2] / (work.state[SEEN, c] + work.samples[c])
            batch = penalized(moments_of(work, c), work.state[THETA, c], task.l1 * rarity, task.l2 * rarity)
            for field in range(4):
                work.moments[field, c] = batch[field]


def update(first: int, last: int, work: Workspace) -> None:
    """The rule, for some coordinates."""
    state, samples = work.state, work.samples
    for c in range(np.uint64(first), np.uint64(last)):
        theta, new, _ = step(state[THETA, c], state_of(state, c), moments_of(work, c), samples[c], OPTIONS)
        state[THETA, c] = theta
        state[GRAD, c] = new.mean.grad
        state[GRAD_SQ, c] = new.mean.grad_sq
        state[CURV, c] = new.mean.curv
        state[CURV_SQ, c] = new.mean.curv_sq
        state[MEMORY, c] = new.memory
        state[SEEN, c] = new.seen


def smooth(first: int, last: int, model: Model, task: Task, work: Workspace) -> None:
    """Stop at the kink of an L1 penalty, and average the iterates, if wanted."""
    known = model.table.reshape(-1)
    outputs = work.margin.shape[1]
    for s in range(first, last):
        column = work.column[s]
        has_penalty = column < len(work.slot_of) - 1 or not task.intercept
        for k in range(outputs):
            c = s * outputs + k
            if task.l1 > 0 and has_penalty:
                work.state[THETA, c] = stop_at_zero(known[work.place[c]], work.state[THETA, c])
            if task.average:
                off = work.state[THETA, c] - model.average[column, k]
                model.average[column, k] += off / math.sqrt(work.state[SEEN, c])


def total_loss(batch: Any, work: Workspace) -> float:
    """Added up row by row, whether or not the caller is compiled; NumPy would take another order."""
    total = 0.0
    for i in range(len(batch)):
        total += work.loss[i]
    return total


def typical_residual(model: Model, batch: Any, targets: Any, work: Workspace) -> Any:
    """The mean |margin − target| of about the last hundred minibatches."""
    total = 0.0
    for i in range(len(batch)):
        total += abs(work.margin[i, 0] - targets[batch[i]])
    model.residual[0] += (total / len(batch) - model.residual[0]) / min(model.progress[1], 100)
    return model.residual[0] + (model.residual[0] == 0)


def train(
    model: Model,
    rows: Rows,
    order: Any,
    targets: Any,
    weights: Any,
    batch_size: int,
    task: Task,
    work: Workspace,
) -> float:
    """Learn from the rows named by `order`. The total loss of each minibatch, before it was learnt from.

    What begins with 0 treats rows, slots or coordinates each by itself, and `vsgd.linear.threads` spreads it.
    """
    loss = 0.0
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        model.progress[1] += 1
        model.progress[2] += len(batch)
        slots = gather(rows, batch, task.intercept, work)
        coordinates = slots * model.table.shape[2]
        load(0, slots, model.table, work)
        notice_largest(0, slots, work)
        work.margin[:] = 0.0
        evaluate(0, len(batch), work.state[THETA], batch, targets, weights, task, work, work.slope)
        loss += total_loss(batch, work)
        if OPTIONS.column_probe:
            unit = 1.0 if task.natural_unit else typical_residual(model, batch, targets, work)
            choose_shifts(0, coordinates, work)
            probe_rows(0, len(batch), model, unit, batch, targets, weights, task, work)
            if OPTIONS.flattest > 0:
                level(batch, model, weights, work)
        else:
            sum_gradients(batch, slots, work)
            choose_shifts(0, coordinates, work)
            evaluate(0, len(batch), work.delta, batch, targets, weights, task, work, work.shifted)
        sum_up(batch, work)
        average(0, coordinates, work)
        if task.l1 + task.l2 > 0:
            penalize(0, slots, model, task, work)
        update(0, coordinates, work)
        if task.l1 > 0 or task.average:
            smooth(0, slots, model, task, work)
        store(0, coordinates, model.table, work)
    return loss
