"""Losses of a linear model, and their derivatives in the margin. Scalar functions, compiled into the training pass.

A loss is selected by its number, so that one compiled pass works for all of them. Binary targets are −1 and 1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

LOG, HINGE, SQUARED_HINGE, MODIFIED_HUBER, SQUARED, ABSOLUTE, HUBER, EPSILON_INSENSITIVE, QUANTILE = range(9)
POISSON, GAMMA = range(9, 11)

CLASSIFICATION = {"log_loss": LOG, "hinge": HINGE, "squared_hinge": SQUARED_HINGE, "modified_huber": MODIFIED_HUBER}
REGRESSION = {
    "squared_error": SQUARED,
    "absolute_error": ABSOLUTE,
    "huber": HUBER,
    "epsilon_insensitive": EPSILON_INSENSITIVE,
    "quantile": QUANTILE,
    "poisson": POISSON,
    "gamma": GAMMA,
}
EXPONENTIAL_LINK = ("poisson", "gamma")
"""Losses whose margin is the logarithm of the mean."""

LARGEST_LOG_MEAN = 100.0
"""The logarithm of a mean is clipped at ± this number, since larger squares would overflow."""


class Task(NamedTuple):
    """The objective of a linear model.

    Attributes:
        loss: one of the numbers above.
        parameter: the threshold of the Huber loss, the width of the epsilon-insensitive loss, or the quantile.
        softmax: whether the outputs are the logits of one softmax (`LOG` only).
        one_vs_rest: whether each output separates one class from the others.
        natural_unit: whether the unit of a margin is 1, as in classification; otherwise it is the mean |residual|.
        first_output: number of the first output, when outputs are distributed over threads.
        l1: weight of Σ|θ|, per sample.
        l2: weight of ½Σθ², per sample.
        evidence: whether to estimate the weight of ½Σθ² during training, in units of each column (`evidence`).
        fresh: whether the rows are visited for the first time.
        data_rows: number of distinct rows, if it is known before all of them are visited; otherwise 0.
        intercept: whether the last column is a constant 1.
        center: whether to subtract the means of columns; needs an intercept.
        average: whether to average the iterates.
    """

    loss: int
    parameter: float = 0.0
    softmax: bool = False
    one_vs_rest: bool = False
    natural_unit: bool = True
    first_output: int = 0
    l1: float = 0.0
    l2: float = 0.0
    evidence: bool = False
    fresh: bool = True
    data_rows: int = 0
    intercept: bool = True
    center: bool = False
    average: bool = False


def log_slope(margin: float, target: float) -> float:
    """Return the derivative of the log loss in the margin, without overflow."""
    z = margin * target
    if z > 0:
        tail = math.exp(-z)
        return -target * tail / (1.0 + tail)
    return -target / (1.0 + math.exp(z))


def slope(loss: int, parameter: float, margin: float, target: float) -> float:
    """Return the derivative of the loss of one sample in its margin."""
    if loss == LOG:
        return log_slope(margin, target)
    if loss == SQUARED:
        return margin - target
    if loss == POISSON:
        return math.exp(min(margin, LARGEST_LOG_MEAN)) - target
    if loss == GAMMA:
        return 1.0 - target * math.exp(min(-margin, LARGEST_LOG_MEAN))
    z = margin * target
    if loss == HINGE:
        return -target if z < 1 else 0.0
    if loss == SQUARED_HINGE:
        return -2 * target * max(0.0, 1 - z)
    if loss == MODIFIED_HUBER:
        return -2 * target * max(0.0, 1 - z) if z > -1 else -4 * target
    residual = margin - target
    sign = 1.0 * (residual > 0) - 1.0 * (residual < 0)
    if loss == ABSOLUTE:
        return sign
    if loss == HUBER:
        return residual if abs(residual) <= parameter else parameter * sign
    if loss == EPSILON_INSENSITIVE:
        return sign if abs(residual) > parameter else 0.0
    return 1 - parameter if residual > 0 else -parameter * (residual < 0)


def least_poisson(target: float) -> float:
    """Return the minimum of exp(margin) − target · margin. The loss minus it is half the deviance."""
    return target - target * math.log(target) if target > 0 else 0.0


def least_gamma(target: float) -> float:
    """Return the minimum of target · exp(−margin) + margin."""
    return 1.0 + math.log(target) if target > 0 else 0.0


def value(loss: int, parameter: float, margin: float, target: float) -> float:
    """Return the loss of one sample."""
    z = margin * target
    if loss == LOG:
        return math.log1p(math.exp(-abs(z))) + max(0.0, -z)
    if loss == POISSON:
        return math.exp(min(margin, LARGEST_LOG_MEAN)) - z - least_poisson(target)
    if loss == GAMMA:
        return target * math.exp(min(-margin, LARGEST_LOG_MEAN)) + margin - least_gamma(target)
    if loss == HINGE:
        return max(0.0, 1 - z)
    if loss == SQUARED_HINGE:
        return max(0.0, 1 - z) ** 2
    if loss == MODIFIED_HUBER:
        return max(0.0, 1 - z) ** 2 if z > -1 else -4 * z
    residual = margin - target
    size = abs(residual)
    if loss == SQUARED:
        return residual * residual / 2
    if loss == ABSOLUTE:
        return size
    if loss == HUBER:
        return residual * residual / 2 if size <= parameter else parameter * (size - parameter / 2)
    if loss == EPSILON_INSENSITIVE:
        return max(0.0, size - parameter)
    return (1 - parameter) * residual if residual > 0 else -parameter * residual


def softmax_slopes(margin: Any, row: int, target: float, weight: float, out: Any) -> float:
    """Write the derivatives of the softmax log loss of a row to that row of `out`, and return the loss."""
    outputs = margin.shape[1]
    largest = margin[row, 0]
    for k in range(1, outputs):
        largest = max(largest, margin[row, k])
    total = 0.0
    for k in range(outputs):
        out[row, k] = math.exp(margin[row, k] - largest)
        total += out[row, k]
    label = int(target)
    for k in range(outputs):
        out[row, k] = weight * (out[row, k] / total - (k == label))
    loss: float = weight * (math.log(total) + largest - margin[row, label])
    return loss


def slopes(task: Task, margin: Any, row: int, target: float, weight: float, out: Any) -> float:
    """Write the derivatives of the loss in all margins of a row to that row of `out`, and return the loss.

    With several outputs, the target is the number of a class, and output k separates class k from the others.
    """
    if task.softmax:
        return softmax_slopes(margin, row, target, weight, out)
    loss = 0.0
    for k in range(margin.shape[1]):
        label = target
        if task.one_vs_rest:
            label = 1.0 if k + task.first_output == target else -1.0
        out[row, k] = weight * slope(task.loss, task.parameter, margin[row, k], label)
        loss += weight * value(task.loss, task.parameter, margin[row, k], label)
    return loss
