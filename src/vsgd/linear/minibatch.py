"""The elements of one minibatch and the coordinates they touch, in contiguous arrays. Compiled into the pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vsgd.core import Moments, State
from vsgd.linear.model import CURV, CURV_SQ, FIELDS, GRAD, GRAD_SQ, MEMORY, SEEN, THETA
from vsgd.linear.rows import Rows

NO_SLOT = np.uint32(2**32 - 1)
"""The slot of a column that is not in the minibatch."""

ROUNDING = 1e-10
"""A distance to the center below this fraction of it is rounding: the column is constant."""


class Workspace(NamedTuple):
    """Buffers for one minibatch: a slot for each of its columns, an entry for each non-zero element.

    Columns with a center have the first slots, in every minibatch. Their elements, zero or not, are a dense block.

    A coordinate is one output of a slot. State is stored field by field, so that the processor updates several
    coordinates at a time. Moments are stored coordinate by coordinate, so that a sample touches one cache line.

    Attributes:
        outputs: as long as there are outputs. A tuple has a length that the compiler knows.
        slot_of: the slot of each column, or `NO_SLOT`.
        column, count, column_max: per slot: its column, in how many rows it occurs, its largest |x| in the minibatch.
        center, scale_sq: per slot with a center: the constant that is subtracted from the column, and the mean square
            of the differences.
        centered: the number of columns with a center.
        block: rows × (centered + 1), flattened: the centered values of the columns with a center. The last number of
            a row is not used.
        theta_at: per coordinate: the index of its θ in the flattened table.
        state: fields × coordinates, as in the table.
        samples, delta, l1, l2: per coordinate: the number of its samples, its probe offset δ, its weights of |θ| and
            ½θ².
        moments: coordinates × 4, flattened: sums over the samples.
        entry_slot, entry_value: per non-zero element of the other columns, row after row.
        row_end: index after the last entry of each row, preceded by 0.
        margin, slope, probed_slope: rows × outputs: the output, and the slope of the loss at θ and at the probe.
        deviation: rows × outputs: the output minus the mean output.
        curvature, row_probe_norm: rows × outputs: curvature of the loss in the output, and Σ |x| δ over the row.
    """

    outputs: Any
    slot_of: Any
    column: Any
    count: Any
    column_max: Any
    center: Any
    scale_sq: Any
    centered: Any
    block: Any
    theta_at: Any
    state: Any
    samples: Any
    delta: Any
    l1: Any
    l2: Any
    moments: Any
    entry_slot: Any
    entry_value: Any
    row_end: Any
    margin: Any
    slope: Any
    probed_slope: Any
    deviation: Any
    curvature: Any
    row_probe_norm: Any


def workspace(rows: Rows, columns: int, outputs: int, batch_size: int, centered: int = 0) -> Workspace:
    """Return buffers for a minibatch of the longest rows, with at most `centered` columns that have a center.

    Indices are unsigned, so that compiled loops need not handle negative ones.
    """
    batch_size = min(batch_size, len(rows.length))
    entries = int(np.sort(rows.length)[len(rows.length) - batch_size :].sum()) + batch_size
    slots = min(columns, entries + centered)
    return Workspace(
        outputs=(0,) if outputs == 1 else np.zeros(outputs),
        slot_of=np.full(columns, NO_SLOT),
        column=np.empty(slots + 1, np.uint32),
        count=np.zeros(slots),
        column_max=np.zeros(slots),
        center=np.zeros(slots + 1),
        scale_sq=np.empty(slots),
        centered=np.zeros(1, np.uint32),
        block=np.empty(batch_size * (centered + 1)),
        theta_at=np.empty(slots * outputs, np.uint64),
        state=np.empty((FIELDS, slots * outputs)),
        samples=np.empty(slots * outputs),
        delta=np.empty(slots * outputs),
        l1=np.zeros(slots * outputs),
        l2=np.zeros(slots * outputs),
        moments=np.empty(4 * slots * outputs),
        entry_slot=np.empty(entries + 1, np.uint32),
        entry_value=np.empty(entries + 1),
        row_end=np.zeros(batch_size + 1, np.uint64),
        margin=np.empty((batch_size, outputs)),
        slope=np.empty((batch_size, outputs)),
        probed_slope=np.empty((batch_size, outputs)),
        deviation=np.zeros((batch_size, outputs)),
        curvature=np.empty((batch_size, outputs)),
        row_probe_norm=np.empty((batch_size, outputs)),
    )


def distance(x: float, center: float) -> float:
    """Return x − center, or 0 if that is rounding."""
    difference = x - center
    return 0.0 if abs(difference) <= ROUNDING * abs(center) else difference


def outputs_of(work: Workspace) -> Any:
    """Return the number of outputs."""
    return np.uint64(len(work.outputs))


def split_row(values: Any, columns: Any, first: Any, entry: Any, work: Workspace) -> Any:
    """Write the elements of columns with a center to the block, from `first` on, and the others to entries.

    Until slots are assigned, the entries contain columns. Returns the index after the last entry. There is no branch,
    since the processor could not predict it: what is written in vain will be overwritten.
    """
    centered = work.centered[0]
    for s in range(np.uint64(centered)):
        work.block[first + s] = -work.center[s]
    for t in range(len(values)):
        column, x = np.uint32(columns[t]), float(values[t])
        slot = min(work.slot_of[column], centered)
        work.block[first + np.uint64(slot)] = distance(x, work.center[slot])
        work.entry_slot[entry] = column
        work.entry_value[entry] = x
        entry += np.uint64((slot == centered) & (x != 0))
    return entry


def assign_slots(first: Any, last: Any, slots: Any, work: Workspace) -> Any:
    """Replace the columns of entries by slots; a column without a slot gets the next one.

    Returns the number of slots used. There is no branch, as in `split_row`.
    """
    for e in range(first, last):
        column, size = work.entry_slot[e], abs(work.entry_value[e])
        slot = work.slot_of[column]
        is_new = slot == NO_SLOT
        slot = slots if is_new else slot
        work.slot_of[column] = slot
        work.column[slots] = column
        work.count[slot] += 1.0
        work.column_max[slot] = max(work.column_max[slot], size)
        work.entry_slot[e] = slot
        slots = np.uint32(slots + np.uint32(is_new))
    return slots


def fetch(rows: Rows, batch: Any, work: Workspace) -> None:
    """Read one number per cache line of the rows. Several lines are fetched at the same time."""
    for i in range(len(batch)):
        row = batch[i]
        length, data_start, index_start = rows.length[row], rows.data_start[row], rows.index_start[row]
        values = rows.data[data_start : data_start + length]
        columns = rows.indices[index_start : index_start + length]
        total = 0.0
        for t in range(0, length, 8):
            total += values[t]
        for t in range(0, length, 16):
            total += columns[t]
        work.margin[i, 0] = total


def gather(rows: Rows, batch: Any, intercept: bool, work: Workspace) -> int:
    """Collect the non-zero elements of a minibatch; an intercept is one more element, 1, of every row.

    Returns the number of slots used.
    """
    fetch(rows, batch, work)
    slots = work.centered[0]
    centered = np.uint64(slots)
    entry = np.uint64(0)
    for i in range(len(batch)):
        row = batch[i]
        length, data_start, index_start = rows.length[row], rows.data_start[row], rows.index_start[row]
        values = rows.data[data_start : data_start + length]
        columns = rows.indices[index_start : index_start + length]
        first_entry, first = entry, np.uint64(i) * (centered + np.uint64(1))
        entry = split_row(values, columns, first, entry, work)
        if intercept:
            work.entry_slot[entry] = len(work.slot_of) - 1
            work.entry_value[entry] = 1.0
            entry += np.uint64(1)
        slots = assign_slots(first_entry, entry, slots, work)
        for s in range(centered):
            work.column_max[s] = max(work.column_max[s], abs(work.block[first + s]))
        work.row_end[i + 1] = entry
    work.count[:centered] = len(batch)
    return int(slots)


def load(slots: int, table: Any, work: Workspace) -> None:
    """Copy the coordinates of the minibatch from the table, and free the slots for the next one.

    The loop for θ alone does little else, so that many cache lines are fetched at the same time.
    """
    outputs = outputs_of(work)
    coordinates = np.uint64(slots) * outputs
    state, theta_at, samples = work.state, work.theta_at, work.samples
    flat = table.reshape(-1)
    for s in range(np.uint64(work.centered[0]), np.uint64(slots)):
        work.slot_of[work.column[s]] = NO_SLOT
    for k in range(outputs):
        for s in range(np.uint64(slots)):
            coordinate = s * outputs + k
            theta_at[coordinate] = work.column[s] * (np.uint64(FIELDS) * outputs) + k
            samples[coordinate] = work.count[s]
    work.count[:slots] = 0.0
    for c in range(coordinates):
        state[THETA, c] = flat[theta_at[c]]
    for c in range(coordinates):
        first = theta_at[c]
        for field in range(GRAD, FIELDS):
            state[field, c] = flat[first + np.uint64(field) * outputs]
    work.moments[: np.uint64(4) * coordinates] = 0.0


def store(coordinates: int, table: Any, work: Workspace) -> None:
    """Copy the coordinates back to the table."""
    outputs = outputs_of(work)
    flat = table.reshape(-1)
    for c in range(np.uint64(coordinates)):
        first = work.theta_at[c]
        for field in range(FIELDS):
            flat[first + np.uint64(field) * outputs] = work.state[field, c]


def state_of(work: Workspace, c: Any) -> State:
    """Return the state of a coordinate."""
    state = work.state
    return State(
        mean=Moments(grad=state[GRAD, c], grad_sq=state[GRAD_SQ, c], curv=state[CURV, c], curv_sq=state[CURV_SQ, c]),
        memory=state[MEMORY, c],
        seen=state[SEEN, c],
    )


def set_state(work: Workspace, c: Any, theta: float, new: State) -> None:
    """Write what an update returned for a coordinate."""
    state = work.state
    state[THETA, c] = theta
    state[GRAD, c] = new.mean.grad
    state[GRAD_SQ, c] = new.mean.grad_sq
    state[CURV, c] = new.mean.curv
    state[CURV_SQ, c] = new.mean.curv_sq
    state[MEMORY, c] = new.memory
    state[SEEN, c] = new.seen


def moments_of(work: Workspace, c: Any) -> Moments:
    """Return the sums over the samples of a coordinate."""
    moments, first = work.moments, np.uint64(4) * c
    return Moments(
        grad=moments[first],
        grad_sq=moments[first + np.uint64(1)],
        curv=moments[first + np.uint64(2)],
        curv_sq=moments[first + np.uint64(3)],
    )


def add_sample(work: Workspace, c: Any, grad: float, curv: float) -> None:
    """Add the gradient and the curvature of one sample to the sums of a coordinate."""
    moments, first = work.moments, np.uint64(4) * c
    moments[first] += grad
    moments[first + np.uint64(1)] += grad * grad
    moments[first + np.uint64(2)] += curv
    moments[first + np.uint64(3)] += curv * curv
