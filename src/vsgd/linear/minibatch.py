"""The elements of one minibatch and the coordinates they touch, laid out for the kernel. Compiled with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vsgd.core import Moments, State
from vsgd.linear.model import CURV, CURV_SQ, FIELDS, GRAD, GRAD_SQ, MEMORY, SEEN, THETA
from vsgd.linear.rows import Rows

NOWHERE = np.uint32(2**32 - 1)
"""The slot of a column that is not in the minibatch."""


class Workspace(NamedTuple):
    """Room for one minibatch: a slot for each of its columns, an entry for each non-zero element.

    A coordinate is one output of a slot. What is known of coordinates stands here field by field, so that the rule
    takes several of them through the processor at a time.

    Attributes:
        slot_of: the slot of a column, or `NOWHERE`.
        column, count, largest: of a slot; in how many rows it is, and its largest |x|.
        place: where the table has the θ of a coordinate.
        state: fields × coordinates, as in the table.
        samples, delta: of a coordinate; `count` again, and δ.
        moments: 4 × coordinates; sums over the samples, and averages in the end.
        entry_slot, entry_value: row after row.
        row_end: where the entries of the rows end; before the first row, 0.
        margin, slope, shifted: rows × outputs; slopes at θ, and beside it.
        curvature, reach: rows × outputs; of the loss in the output, and Σ |x| δ.
    """

    slot_of: Any
    column: Any
    count: Any
    largest: Any
    place: Any
    state: Any
    samples: Any
    delta: Any
    moments: Any
    entry_slot: Any
    entry_value: Any
    row_end: Any
    margin: Any
    slope: Any
    shifted: Any
    curvature: Any
    reach: Any


def workspace(rows: Rows, columns: int, outputs: int, batch_size: int) -> Workspace:
    """Enough room for the longest rows to meet in one minibatch.

    Indices are unsigned, which spares the compiled loops the question whether one counts from the end.
    """
    batch_size = min(batch_size, len(rows.length))
    entries = int(np.sort(rows.length)[len(rows.length) - batch_size :].sum()) + batch_size
    slots = min(columns, entries)
    return Workspace(
        slot_of=np.full(columns, NOWHERE),
        column=np.empty(slots + 1, np.uint32),
        count=np.zeros(slots),
        largest=np.zeros(slots),
        place=np.empty(slots * outputs, np.uint64),
        state=np.empty((FIELDS, slots * outputs)),
        samples=np.empty(slots * outputs),
        delta=np.empty(slots * outputs),
        moments=np.empty((4, slots * outputs)),
        entry_slot=np.empty(entries, np.uint32),
        entry_value=np.empty(entries),
        row_end=np.zeros(batch_size + 1, np.uint64),
        margin=np.empty((batch_size, outputs)),
        slope=np.empty((batch_size, outputs)),
        shifted=np.empty((batch_size, outputs)),
        curvature=np.empty((batch_size, outputs)),
        reach=np.empty((batch_size, outputs)),
    )


def enter(column: Any, x: float, entry: Any, slots: Any, work: Workspace) -> Any:
    """Lay out one element; a column met for the first time gets the next slot. How many slots there are now.

    Whether it is the first time cannot be foreseen, so there is no branch: what is noted of the next slot in vain will
    be overwritten.
    """
    slot = work.slot_of[column]
    is_new = slot == NOWHERE
    slot = slots if is_new else slot
    work.slot_of[column] = slot
    work.column[slots] = column
    work.count[slot] += 1.0
    work.largest[slot] = max(work.largest[slot], abs(x))
    work.entry_slot[entry] = slot
    work.entry_value[entry] = x
    return np.uint32(slots + np.uint32(is_new))


def gather(rows: Rows, batch: Any, intercept: bool, work: Workspace) -> int:
    """Lay out the non-zero elements of a minibatch; an intercept is one more element, 1, of every row.

    How many slots they take.
    """
    slots = np.uint32(0)
    entry = np.uint64(0)
    for i in range(len(batch)):
        row = batch[i]
        length, data_start, index_start = rows.length[row], rows.data_start[row], rows.index_start[row]
        values = rows.data[data_start : data_start + length]
        columns = rows.indices[index_start : index_start + length]
        for t in range(length):
            if values[t] != 0:
                slots = enter(np.uint32(columns[t]), float(values[t]), entry, slots, work)
                entry += np.uint64(1)
        if intercept:
            slots = enter(np.uint32(len(work.slot_of) - 1), 1.0, entry, slots, work)
            entry += np.uint64(1)
        work.row_end[i + 1] = entry
    return int(slots)


def load(slots: int, table: Any, work: Workspace) -> None:
    """Copy what the table has of the coordinates of the minibatch, and free the slots for the next one.

    The loop for θ alone is a light one, so that many lines are on their way from memory at the same time.
    """
    outputs = table.shape[2]
    coordinates = slots * outputs
    state, place, samples = work.state, work.place, work.samples
    known = table.reshape(-1)
    for s in range(np.uint64(slots)):
        column = work.column[s]
        work.slot_of[column] = NOWHERE
        for k in range(np.uint64(outputs)):
            coordinate = s * np.uint64(outputs) + k
            place[coordinate] = column * np.uint64(FIELDS * outputs) + k
            samples[coordinate] = work.count[s]
    work.count[:slots] = 0.0
    for c in range(np.uint64(coordinates)):
        state[THETA, c] = known[place[c]]
    for c in range(np.uint64(coordinates)):
        at = place[c]
        for field in range(GRAD, FIELDS):
            state[field, c] = known[at + np.uint64(field * outputs)]
    for field in range(4):
        work.moments[field, :coordinates] = 0.0


def store(coordinates: int, table: Any, work: Workspace) -> None:
    """Copy the coordinates back to the table."""
    outputs = np.uint64(table.shape[2])
    known = table.reshape(-1)
    for c in range(np.uint64(coordinates)):
        for field in range(FIELDS):
            known[work.place[c] + field * outputs] = work.state[field, c]


def state_of(work: Workspace, c: Any) -> State:
    """The state of a coordinate."""
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
    """The moments of a coordinate over the minibatch."""
    moments = work.moments
    return Moments(grad=moments[0, c], grad_sq=moments[1, c], curv=moments[2, c], curv_sq=moments[3, c])


def add_sample(work: Workspace, c: Any, grad: float, curv: float) -> None:
    """Add the gradient and the curvature of one sample to the sums of a coordinate."""
    moments = work.moments
    moments[0, c] += grad
    moments[1, c] += grad * grad
    moments[2, c] += curv
    moments[3, c] += curv * curv
