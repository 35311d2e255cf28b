"""`algorithms.paper` on the rows of a minibatch, with a second gradient at θ + δ, δ = ḡ.

Plain Python, compiled into the training pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vsgd.algorithms import paper
from vsgd.core import curvature
from vsgd.linear.kernel import evaluate, update_column_max
from vsgd.linear.losses import Task
from vsgd.linear.minibatch import Workspace, add_sample, outputs_of, state_of
from vsgd.linear.model import THETA, Model


def choose_probes(batch: Any, coordinates: int, config: paper.Paper, work: Workspace) -> None:
    """Compute the probe δ of each coordinate from its state and the mean gradient of the minibatch."""
    outputs = outputs_of(work)
    work.delta[:coordinates] = 0.0
    for i in range(len(batch)):
        for e in range(work.row_end[i], work.row_end[i + 1]):
            for k in range(outputs):
                work.delta[work.entry_slot[e] * outputs + k] += work.slope[i, k] * work.entry_value[e]
    for c in range(np.uint64(coordinates)):
        samples = work.samples[c]
        work.delta[c] = paper.probe(state_of(work, c), work.delta[c] / samples, samples, config)


def sum_moments(batch: Any, work: Workspace) -> None:
    """Sum the moments over the samples."""
    outputs = outputs_of(work)
    for i in range(len(batch)):
        for e in range(work.row_end[i], work.row_end[i + 1]):
            x = work.entry_value[e]
            for k in range(outputs):
                c = work.entry_slot[e] * outputs + k
                grad = work.slope[i, k] * x
                add_sample(work, c, grad, curvature(grad, work.probed_slope[i, k] * x, work.delta[c]))


def measure(
    batch: Any,
    slots: int,
    model: Model,
    targets: Any,
    weights: Any,
    task: Task,
    config: paper.Paper,
    work: Workspace,
) -> float:
    """Sum gradients and curvatures over the samples, from slopes at θ and at θ + δ, and return the total loss."""
    update_column_max(slots, work)
    work.margin[:] = 0.0
    loss = evaluate(work.state[THETA], batch, targets, weights, task, work, work.slope)
    choose_probes(batch, slots * len(work.outputs), config, work)
    evaluate(work.delta, batch, targets, weights, task, work, work.probed_slope)
    sum_moments(batch, work)
    return loss
