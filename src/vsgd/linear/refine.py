"""Coordinate descent at the end of a fit with an L1 penalty, so that coefficients are zero as in the optimum.

Stochastic steps reach a low loss long before the last small coefficients of correlated columns are zero. Proximal
Newton steps (Friedman et al. 2010) follow. Each step replaces the loss of each row by a parabola in its output, and
minimizes parabolas and penalty by cyclic coordinate descent. A step is halved until the objective decreases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vsgd.jit import cached_jit
from vsgd.linear.losses import Task, slopes
from vsgd.linear.model import CENTER, THETA, Model
from vsgd.linear.training import coefficients, margins_of, total_loss

MAX_STEPS = 100
"""Upper limit on the number of Newton steps."""

MAX_SWEEPS = 20
"""Upper limit on the number of sweeps over the columns in one step."""

MAX_HALVINGS = 10
"""Upper limit on how often a step is halved until the objective falls."""

IMPROVEMENT = 1e-7
"""Steps end when the objective falls by less than this fraction of it."""


class SparseColumns(NamedTuple):
    """A matrix in CSC format: column j has the values data[indptr[j] : indptr[j + 1]] in the rows of `indices`."""

    data: Any
    indices: Any
    indptr: Any


class Parabolas(NamedTuple):
    """Slope and curvature of the loss of each row in one output, one entry per row."""

    slope: Any
    curvature: Any


def fit_parabolas(
    task: Task, margins: Any, targets: Any, weights: Any, k: int, unit: float, slope: Any, rows: Parabolas
) -> None:
    """Measure the slopes of the rows in output k, and curvatures between output ± unit. `slope` is a buffer."""
    for i in range(len(targets)):
        at = margins[i, k]
        slopes(task, margins, i, targets[i], weights[i], slope)
        rows.slope[i] = slope[i, k]
        margins[i, k] = at + unit
        slopes(task, margins, i, targets[i], weights[i], slope)
        above = slope[i, k]
        margins[i, k] = at - unit
        slopes(task, margins, i, targets[i], weights[i], slope)
        rows.curvature[i] = (above - slope[i, k]) / (2 * unit)
        margins[i, k] = at


def descend(
    table: SparseColumns,
    rows: Parabolas,
    theta: Any,
    moved: Any,
    l1: float,
    l2: float,
    intercept: bool,
    tolerance: float,
) -> None:
    """Minimize the parabolas plus l1 Σ|θ| + ½ l2 Σθ² by cyclic coordinate descent.

    The intercept, the last entry of `theta`, is optimal after every change of another coordinate. The change of the
    outputs is written to `moved`. Sweeps end when no change of a coefficient lowers the objective by `tolerance`.
    """
    features = len(table.indptr) - 1
    total = rows.curvature.sum()
    if total <= 0:
        return
    offset = -rows.slope.sum() / total if intercept else 0.0
    for _ in range(MAX_SWEEPS):
        largest = 0.0
        for j in range(features):
            first, last = table.indptr[j], table.indptr[j + 1]
            grad, curv, mean = 0.0, 0.0, 0.0
            for t in range(first, last):
                i, x = table.indices[t], table.data[t]
                grad += x * (rows.slope[i] + rows.curvature[i] * (moved[i] + offset))
                curv += rows.curvature[i] * x * x
                mean += rows.curvature[i] * x
            mean = mean / total if intercept else 0.0
            square = curv
            curv -= mean * mean * total
            if curv <= 1e-10 * square:
                continue  # a constant column: the intercept has its effect
            curv += l2
            target = curv * theta[j] - grad - l2 * theta[j]
            size = max(abs(target) - l1, 0.0) / curv
            change = (size if target > 0 else -size) - theta[j]
            if change != 0:
                theta[j] += change
                offset -= change * mean
                for t in range(first, last):
                    moved[table.indices[t]] += change * table.data[t]
                largest = max(largest, curv * change * change)
        if largest <= 2 * tolerance:
            break
    if intercept:
        theta[features] += offset
        moved += offset


def refine(model: Model, X: Any, targets: Any, weights: Any, task: Task) -> None:
    """Move the coefficients of a model to the optimum for these rows.

    Args:
        model: the model, changed in place. Averaged coefficients are set to the same values.
        X: the rows, a matrix in CSC format.
        targets: target of each row.
        weights: weight of each row.
        task: the objective, with an L1 or L2 penalty, or both.
    """
    table = SparseColumns(X.data.astype(np.float64), X.indices, X.indptr)
    l1, l2 = task.l1 * len(targets), task.l2 * len(targets)
    features = X.shape[1]
    unit = 1.0 if task.natural_unit else float(model.residual[0]) or 1.0
    theta = coefficients(model, task)
    margins = margins_of(X, theta)
    slope = np.empty_like(margins)
    rows = Parabolas(np.empty(len(targets)), np.empty(len(targets)))

    def objective(theta: Any, margins: Any) -> float:
        size = l1 * np.abs(theta[:features]).sum() + l2 / 2 * np.square(theta[:features]).sum()
        return float(cached_jit(total_loss)(margins, targets, weights, task, slope) + size)

    best = objective(theta, margins)
    for _ in range(MAX_STEPS):
        before = best
        for k in range(margins.shape[1]):
            cached_jit(fit_parabolas)(task, margins, targets, weights, k, unit, slope, rows)
            end, moved = theta[:, k].copy(), np.zeros(len(targets))
            cached_jit(descend)(table, rows, end, moved, l1, l2, task.intercept, 0.01 * IMPROVEMENT * best)
            change = end - theta[:, k]
            for halvings in range(MAX_HALVINGS):
                new, at = theta.copy(), margins.copy()
                new[:, k] = end if halvings == 0 else theta[:, k] + change / 2**halvings
                at[:, k] += moved / 2**halvings
                value = objective(new, at)
                if value < best:
                    theta, margins, best = new, at, value
                    break
        if before - best <= IMPROVEMENT * abs(before):
            break
    if task.intercept:
        theta[-1] += model.columns[:, CENTER] @ theta
    model.table[:, THETA] = theta
    if task.average:
        model.average[:] = theta
