"""Estimate the L2 penalty during training. Plain Python, compiled into the training pass.

The prior of each coefficient, in the unit of its column, is normal with precision λ. Maximizing the evidence (MacKay
1992) gives λ = φ γ / Σ θ². Here γ is the effective number of coefficients, and φ is the variance of slopes divided by
their curvature, which is 1 for a well-specified likelihood.

On text, this λ is too large if words predict unseen rows well, since coefficients of words are not normal. Columns
without a center are therefore penalized only if the model overfits. Predictions for rows at their first visit measure
that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vsgd.linear.losses import Task
from vsgd.linear.minibatch import Workspace, outputs_of
from vsgd.linear.model import (
    CALIBRATION,
    CURVATURE,
    FRESH_CURVATURE,
    FRESH_MARGIN,
    FRESH_ROWS,
    FRESH_SLOPE,
    FRESH_SLOPE_SQ,
    FRESH_WEIGHT,
    RECENT_CURVATURE,
    RECENT_SLOPE_SQ,
    ROWS,
    SCALE_SQ,
    SEEN,
    STRENGTH,
    THETA,
    WEIGHT,
    Model,
)

SIGNIFICANT = 3.0
"""The calibration c is this many standard errors above its estimate."""

DISTRUST = 5.0
"""Rare columns have no penalty if c = 1, and the full penalty if c ≤ 1 − 1 / DISTRUST."""

MIN_CALIBRATION = 0.1
"""Lower limit on the calibration c: λ is divided by c²."""

MAX_SHRINKAGE = 100.0
"""Upper limit on the penalty, in units of the curvature. Coefficients never become zero, so they can grow again if the
signal in a stream increases."""

FIXED_POINT_STEPS = 3


def deviations(batch: Any, weights: Any, model: Model, work: Workspace) -> None:
    """Compute margins minus the mean margin of first visits, including this minibatch, in `work.deviation`."""
    sums = model.sums
    for k in range(outputs_of(work)):
        for i in range(len(batch)):
            sums[FRESH_WEIGHT, k] += weights[batch[i]]
            sums[FRESH_MARGIN, k] += weights[batch[i]] * work.margin[i, k]
        mean = sums[FRESH_MARGIN, k] / sums[FRESH_WEIGHT, k]
        for i in range(len(batch)):
            work.deviation[i, k] = work.margin[i, k] - mean


def sum_over_rows(batch: Any, weights: Any, model: Model, task: Task, work: Workspace) -> None:
    """Add the rows of a minibatch to the sums of each output."""
    sums = model.sums
    for i in range(len(batch)):
        weight = weights[batch[i]]
        for k in range(outputs_of(work)):
            slope, curvature = work.slope[i, k], work.curvature[i, k]
            sums[CURVATURE, k] += curvature
            sums[WEIGHT, k] += weight
            if task.evidence:
                sums[RECENT_CURVATURE, k] += curvature
                sums[RECENT_SLOPE_SQ, k] += slope * slope / weight
                if task.fresh:
                    deviation = work.deviation[i, k]
                    sums[FRESH_SLOPE, k] += slope * deviation
                    sums[FRESH_SLOPE_SQ, k] += (slope * deviation) ** 2
                    sums[FRESH_CURVATURE, k] += curvature * deviation * deviation


def distinct_rows(model: Model, task: Task) -> float:
    """Return the number of training rows: `task.data_rows` if it is known, otherwise the number visited so far."""
    return float(task.data_rows if task.data_rows > 0 else model.progress[FRESH_ROWS])


def effective_number(own: Any, strength: float) -> float:
    """Return Σ o / (o + λ) over the information o of each coefficient.

    With four partial sums, the processor divides four numbers at a time. Their order is the same on all processors.
    """
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    rest = len(own) % 4
    for j in range(rest):
        a += own[j] / (own[j] + strength)
    for j in range(rest, len(own), 4):
        a += own[j] / (own[j] + strength)
        b += own[j + 1] / (own[j + 1] + strength)
        c += own[j + 2] / (own[j + 2] + strength)
        d += own[j + 3] / (own[j + 3] + strength)
    return (a + b) + (c + d)


def estimate_penalty(model: Model, task: Task) -> None:
    """Update λ and the calibration of each output.

    The calibration c multiplies the deviation q of a margin. This adds slope·q (c − 1) + ½ curvature·q² (c − 1)² to
    the loss of a row. Over rows at their first visit, the sum has its minimum near c = 1 if the model generalizes, and
    near c = 0 if it has learned noise. If the number of rows is known, c is the minimum since the middle of the first
    pass: every model overfits at the beginning, and later the penalty itself increases c.
    """
    sums, table = model.sums, model.table
    rows = float(model.progress[ROWS])
    share = distinct_rows(model, task) / rows
    own = np.empty(table.shape[0])
    for k in range(table.shape[2]):
        if not (sums[CURVATURE, k] > 0 and sums[RECENT_SLOPE_SQ, k] > 0):
            continue
        information = share * sums[CURVATURE, k] / sums[WEIGHT, k]
        dispersion = sums[RECENT_SLOPE_SQ, k] / sums[RECENT_CURVATURE, k]
        sums[RECENT_SLOPE_SQ, k] *= 0.5  # the first steps may have slopes far larger than all later ones
        sums[RECENT_CURVATURE, k] *= 0.5
        size, varying = 0.0, 0
        for j in range(table.shape[0] - task.intercept):
            size += table[j, THETA, k] * table[j, THETA, k] * model.columns[j, SCALE_SQ]
            own[varying] = information * table[j, SEEN, k]
            varying += table[j, SEEN, k] > 0 and model.columns[j, SCALE_SQ] > 0
        if size == 0:
            continue
        strength = model.penalty[STRENGTH, k]
        for _ in range(FIXED_POINT_STEPS):
            strength = dispersion * effective_number(own[:varying], strength) / size
        model.penalty[STRENGTH, k] = strength
        if sums[FRESH_CURVATURE, k] > 0:
            error = SIGNIFICANT * sums[FRESH_SLOPE_SQ, k] ** 0.5
            calibration = 1.0 - (sums[FRESH_SLOPE, k] - error) / sums[FRESH_CURVATURE, k]
            calibration = min(max(calibration, MIN_CALIBRATION), 1.0)
            if task.data_rows == 0:
                model.penalty[CALIBRATION, k] = calibration
            elif 2 * model.progress[FRESH_ROWS] >= task.data_rows:
                model.penalty[CALIBRATION, k] = min(calibration, model.penalty[CALIBRATION, k])


class Estimated(NamedTuple):
    """The estimated penalty of one output in a minibatch.

    Attributes:
        strength: λ for a column that occurs in one of the rows visited so far.
        limit: upper limit on the penalty in the unit of the column.
        rare: the factor for columns without a center: 0 if the output does not overfit.
        weight: the mean weight of a row.
    """

    strength: float
    limit: float
    rare: float
    weight: float


def estimated_penalty(model: Model, task: Task, k: Any) -> Estimated:
    """Return the penalty of output k, from the last estimates."""
    rows = float(model.progress[ROWS])
    calibration = model.penalty[CALIBRATION, k]
    return Estimated(
        strength=model.penalty[STRENGTH, k] * rows / distinct_rows(model, task),
        limit=MAX_SHRINKAGE * model.sums[CURVATURE, k] / model.sums[WEIGHT, k],
        rare=min(DISTRUST * (1.0 - calibration), 1.0) / (calibration * calibration),
        weight=model.sums[WEIGHT, k] / rows,
    )


def evidence_l2(estimated: Estimated, factor: float, samples: float, scale_sq: float) -> float:
    """Return the weight of ½θ² per sample that contains the column.

    Args:
        estimated: the penalty of the output.
        factor: 1 for a column with a center, otherwise `estimated.rare`.
        samples: the number of samples of the column so far.
        scale_sq: the mean square of the column.
    """
    return estimated.weight * scale_sq * min(factor * estimated.strength / samples, estimated.limit)
