"""One pass of minibatches over sparse rows, with the rule as the scalar body of the loop.

Plain Python, compiled by `vsgd.kernels.compiled`. A column that no row of a minibatch touches is neither read
nor written. What is known of a coordinate stands together: eight float64, one cache line if there is one output.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from vsgd.linear.losses import Task, slopes
from vsgd.linear.penalty import penalized, stop_at_zero
from vsgd.linear.rows import Rows, scramble
from vsgd.options import Options
from vsgd.probe import cautious, column_curvature, column_shift, curvature, shift
from vsgd.rule import Moments, State, step

FIELDS = range(8)
THETA, GRAD, GRAD_SQ, CURV, CURV_SQ, MEMORY, SEEN, LARGEST = FIELDS
"""What the table has of a coordinate: θ, the four averages, τ, how many samples, and their largest |x|."""

ODD = np.uint64(0x9E3779B97F4A7C15)
"""Spreads consecutive columns over all 64-bit numbers before their bits are mixed."""


class Model(NamedTuple):
    """All that a linear model remembers, changed in place by `train`.

    Attributes:
        table: columns × 8 × outputs.
        average: columns × outputs, the averaged θ; empty if there is no averaging.
        residual: a typical |margin − target|, for losses that do not say what a margin of 1 means.
        progress: a seed, minibatches and rows so far.
    """

    table: Any
    average: Any
    residual: Any
    progress: Any


def new_model(columns: int, outputs: int, task: Task, options: Options, seed: int) -> Model:
    table = np.zeros((columns, len(FIELDS), outputs))
    table[:, MEMORY] = options.memory
    return Model(
        table=table,
        average=np.zeros((columns if task.average else 0, outputs)),
        residual=np.zeros(1),
        progress=np.array([seed, 0, 0], np.int64),
    )


class Workspace(NamedTuple):
    """Room for one minibatch. A column has a slot in it, an entry is one non-zero element."""

    slot_of: Any
    column: Any
    count: Any
    largest: Any
    moments: Any
    delta: Any
    entry_slot: Any
    entry_value: Any
    row_end: Any
    margin: Any
    slope: Any
    shifted: Any


def workspace(rows: Rows, columns: int, outputs: int, batch_size: int) -> Workspace:
    """Enough room for the longest rows to meet in one minibatch.

    Indices are unsigned, which spares the compiled loops the question whether one counts from the end.
    """
    batch_size = min(batch_size, len(rows.length))
    entries = int(np.sort(rows.length)[len(rows.length) - batch_size :].sum()) + batch_size
    slots = min(columns, entries)
    return Workspace(
        slot_of=np.full(columns, -1, np.int64),
        column=np.empty(slots, np.uint32),
        count=np.empty(slots),
        largest=np.empty(slots),
        moments=np.empty((slots, 4, outputs)),
        delta=np.empty((slots, outputs)),
        entry_slot=np.empty(entries, np.uint32),
        entry_value=np.empty(entries),
        row_end=np.zeros(batch_size + 1, np.int64),
        margin=np.empty((batch_size, outputs)),
        slope=np.empty((batch_size, outputs)),
        shifted=np.empty((batch_size, outputs)),
    )


def gather(rows: Rows, batch: Any, intercept: bool, work: Workspace) -> int:
    """Lay out the non-zero elements of a minibatch; an intercept is one more element, 1, of every row.

    A column met for the first time gets a slot. How many slots there are.
    """
    slot_of, column_of, count, largest, moments = work.slot_of, work.column, work.count, work.largest, work.moments
    entry_slot, entry_value = work.entry_slot, work.entry_value
    slots = 0
    entry = 0
    for i in range(len(batch)):
        row = batch[i]
        length, data_start, index_start = rows.length[row], rows.data_start[row], rows.index_start[row]
        for t in range(length + intercept):
            x: Any = 1.0
            column: Any = len(slot_of) - 1
            if t < length:
                x, column = float(rows.data[data_start + t]), rows.indices[index_start + t]
                if x == 0:
                    continue
            slot = slot_of[column]
            if slot < 0:
                slot = slots
                slots += 1
                slot_of[column] = slot
                column_of[slot] = column
                count[slot] = 0.0
                largest[slot] = 0.0
                for k in range(moments.shape[2]):
                    for field in range(4):
                        moments[slot, field, k] = 0.0
            count[slot] += 1.0
            largest[slot] = max(largest[slot], abs(x))
            entry_slot[entry] = slot
            entry_value[entry] = x
            entry += 1
        work.row_end[i + 1] = entry
    return slots


def state_of(table: Any, column: int, k: int) -> State:
    return State(
        mean=Moments(
            grad=table[column, GRAD, k],
            grad_sq=table[column, GRAD_SQ, k],
            curv=table[column, CURV, k],
            curv_sq=table[column, CURV_SQ, k],
        ),
        memory=table[column, MEMORY, k],
        seen=table[column, SEEN, k],
    )


def evaluate(model: Model, batch: Any, targets: Any, weights: Any, task: Task, work: Workspace) -> float:
    """Margins and slopes at θ, and the sums of the gradients and of their squares. The loss of the minibatch."""
    table, column, moments = model.table, work.column, work.moments
    entry_slot, entry_value = work.entry_slot, work.entry_value
    outputs = work.margin.shape[1]
    loss = 0.0
    for i in range(len(batch)):
        for k in range(outputs):
            margin = 0.0
            for e in range(work.row_end[i], work.row_end[i + 1]):
                margin += entry_value[e] * table[column[entry_slot[e]], THETA, k]
            work.margin[i, k] = margin
        loss += slopes(task, work.margin, i, targets[batch[i]], weights[batch[i]], work.slope)
        for e in range(work.row_end[i], work.row_end[i + 1]):
            slot, x = entry_slot[e], entry_value[e]
            for k in range(outputs):
                grad = work.slope[i, k] * x
                moments[slot, 0, k] += grad
                moments[slot, 1, k] += grad * grad
    return loss


def notice_largest(model: Model, slots: int, options: Options, work: Workspace) -> None:
    """Keep the largest |x| of every column. θ shrinks when it grows, so that it adds no more to an output than before.

    A column may be rounding noise for a long time, and then a number: its θ was learnt in another unit.
    """
    for s in range(slots):
        column = work.column[s]
        for k in range(work.delta.shape[1]):
            before = model.table[column, LARGEST, k]
            if work.largest[s] > before:
                model.table[column, LARGEST, k] = work.largest[s]
                if options.column_probe:
                    model.table[column, THETA, k] *= before / work.largest[s]
        work.largest[s] = model.table[column, LARGEST, 0]


def choose_shifts(model: Model, slots: int, options: Options, work: Workspace) -> None:
    """δ for every coordinate of the minibatch."""
    for s in range(slots):
        for k in range(work.delta.shape[1]):
            state = state_of(model.table, work.column[s], k)
            if options.column_probe:
                work.delta[s, k] = column_shift(state, work.count[s], work.largest[s], options)
            else:
                grad = work.moments[s, 0, k] / work.count[s]
                work.delta[s, k] = shift(state, grad, work.count[s], options)


def probe(batch: Any, targets: Any, weights: Any, task: Task, options: Options, work: Workspace) -> None:
    """Slopes at θ + δ, and the sums of the curvatures and of their squares."""
    entry_slot, entry_value, deltas, moments = work.entry_slot, work.entry_value, work.delta, work.moments
    outputs = work.margin.shape[1]
    for i in range(len(batch)):
        for k in range(outputs):
            margin = work.margin[i, k]
            for e in range(work.row_end[i], work.row_end[i + 1]):
                margin += entry_value[e] * deltas[entry_slot[e], k]
            work.margin[i, k] = margin
        slopes(task, work.margin, i, targets[batch[i]], weights[batch[i]], work.shifted)
        for e in range(work.row_end[i], work.row_end[i + 1]):
            slot, x = entry_slot[e], entry_value[e]
            for k in range(outputs):
                # curvature per unit of shift; `update` divides by the shift, once for all samples
                grad = work.slope[i, k] * x
                h = cautious(curvature(grad, work.shifted[i, k] * x, 1.0), grad, 1.0, options)
                moments[slot, 2, k] += h
                moments[slot, 3, k] += h * h


def probe_rows(
    model: Model, unit: float, batch: Any, targets: Any, weights: Any, task: Task, options: Options, work: Workspace
) -> None:
    """Slopes where every output of a row has moved by a unit, and the sums of the curvatures and of their squares.

    In regression the unit is a typical residual, or that of the row if it is larger. Random signs depend on the place
    in the minibatch, the minibatch, the output and the seed alone.
    """
    entry_slot, entry_value, deltas, moments = work.entry_slot, work.entry_value, work.delta, work.moments
    outputs = work.margin.shape[1]
    moment = np.uint64(model.progress[0]) + scramble(np.uint64(model.progress[1]))
    for i in range(len(batch)):
        size = unit
        if not task.natural_unit:
            size = max(unit, abs(work.margin[i, 0] - targets[batch[i]]))
        for k in range(outputs):
            coin = scramble(moment + np.uint64(i) * ODD + np.uint64(k + task.first_output))
            work.margin[i, k] += size if coin & np.uint64(1) else -size
        slopes(task, work.margin, i, targets[batch[i]], weights[batch[i]], work.shifted)
        for k in range(outputs):
            reach = 0.0
            for e in range(work.row_end[i], work.row_end[i + 1]):
                reach += abs(entry_value[e]) * deltas[entry_slot[e], k]
            slope = work.slope[i, k]
            of_row = cautious(curvature(slope, work.shifted[i, k], size), slope, size, options)
            for e in range(work.row_end[i], work.row_end[i + 1]):
                slot, x = entry_slot[e], entry_value[e]
                others = max(0.0, reach - abs(x) * deltas[slot, k])
                h = column_curvature(of_row, x, work.largest[slot], others)
                moments[slot, 2, k] += h
                moments[slot, 3, k] += h * h


def update(model: Model, slots: int, task: Task, options: Options, work: Workspace) -> None:
    """The rule, for every coordinate of the minibatch."""
    table = model.table
    for s in range(slots):
        column, count = work.column[s], work.count[s]
        work.slot_of[column] = -1
        share = 1.0 / count
        penalize = column < len(work.slot_of) - 1 or not task.intercept
        for k in range(work.delta.shape[1]):
            state = state_of(table, column, k)
            old = table[column, THETA, k]
            per_shift = 1.0 if options.column_probe else 1.0 / abs(work.delta[s, k])
            batch = Moments(
                grad=work.moments[s, 0, k] * share,
                grad_sq=work.moments[s, 1, k] * share,
                curv=work.moments[s, 2, k] * share * per_shift,
                curv_sq=work.moments[s, 3, k] * share * per_shift * per_shift,
            )
            if penalize and task.l1 + task.l2 > 0:
                rarity = model.progress[2] / (state.seen + count)
                batch = penalized(batch, old, task.l1 * rarity, task.l2 * rarity)
            theta, state, _ = step(old, state, batch, count, options)
            if penalize and task.l1 > 0:
                theta = stop_at_zero(old, theta)
            if task.average:
                model.average[column, k] += (theta - model.average[column, k]) / math.sqrt(state.seen)
            table[column, THETA, k] = theta
            table[column, GRAD, k] = state.mean.grad
            table[column, GRAD_SQ, k] = state.mean.grad_sq
            table[column, CURV, k] = state.mean.curv
            table[column, CURV_SQ, k] = state.mean.curv_sq
            table[column, MEMORY, k] = state.memory
            table[column, SEEN, k] = state.seen


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
    options: Options,
    work: Workspace,
) -> float:
    """Learn from the rows named by `order`. The total loss of each minibatch, before it was learnt from."""
    loss = 0.0
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        model.progress[1] += 1
        model.progress[2] += len(batch)
        slots = gather(rows, batch, task.intercept, work)
        notice_largest(model, slots, options, work)
        loss += evaluate(model, batch, targets, weights, task, work)
        choose_shifts(model, slots, options, work)
        if options.column_probe:
            unit = 1.0 if task.natural_unit else typical_residual(model, batch, targets, work)
            probe_rows(model, unit, batch, targets, weights, task, options, work)
        else:
            probe(batch, targets, weights, task, options, work)
        update(model, slots, task, options, work)
    return loss
