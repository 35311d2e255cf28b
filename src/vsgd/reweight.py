"""Weights for nearly orthogonal sample gradients (section 4.1), for NumPy, torch and JAX arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

from vsgd.core import Scalar

Gram: TypeAlias = Any
"""An array of shape (samples, samples)."""

PerSample: TypeAlias = Any
"""An array of shape (samples,)."""


def sample_weights(gram: Gram) -> PerSample:
    """Return the weight w_i of each sample (eq. 5): one over the number of samples whose gradients interfere with it.

    That number is a sum of absolute cosines. A sample whose gradient is zero has weight 0.

    Args:
        gram: inner products of the sample gradients, samples × samples. It is often cheaper than the gradients.

    Returns:
        The weights, one per sample.

    >>> import numpy as np
    >>> gradients = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])  # two aligned, one orthogonal to them
    >>> sample_weights(gradients @ gradients.T)
    array([0.5, 0.5, 1. ])
    """
    norms = gram.diagonal() ** 0.5
    products = norms[:, None] * norms[None, :]
    interference = (abs(gram) / (products + (products == 0))).sum(-1)
    return (interference > 0) / (interference + (interference == 0))


def effective_count(weights: PerSample) -> Scalar:
    """Return the `count` of the learning rate for Σ w_i ∇⁽ⁱ⁾: n if all gradients are aligned, 1 if all are orthogonal.

    >>> import numpy as np
    >>> effective_count(np.array([0.5, 0.5, 1.0]))
    np.float64(1.5)
    """
    total = weights.sum()
    return (weights > 0).sum() / (total + (total == 0))
