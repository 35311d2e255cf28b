"""Class probabilities from the margins of a linear classifier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WITH_PROBABILITIES = ("log_loss", "modified_huber")
"""Losses whose margins determine probabilities."""


def logistic(margins: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(−margin)) without overflow."""
    tail = np.exp(-np.abs(margins))
    return np.where(margins >= 0, 1.0, tail) / (1.0 + tail)


def probabilities(margins: NDArray[np.float64], loss: str, softmax: bool) -> NDArray[np.float64]:
    """Return the probability of each class, samples × classes.

    Args:
        margins: samples × outputs. A single output is positive for the second class.
        loss: one of `WITH_PROBABILITIES`.
        softmax: whether the outputs are the logits of one softmax; otherwise each separates one class from the others.
    """
    if softmax:
        scaled = np.exp(margins - margins.max(axis=1, keepdims=True))
        softmax_probabilities: NDArray[np.float64] = scaled / scaled.sum(axis=1, keepdims=True)
        return softmax_probabilities
    each = logistic(margins) if loss == "log_loss" else (np.clip(margins, -1, 1) + 1) / 2
    if each.shape[1] == 1:
        return np.hstack([1 - each, each])
    total = each.sum(axis=1, keepdims=True)
    return np.where(total > 0, each / np.where(total > 0, total, 1), 1 / each.shape[1])
