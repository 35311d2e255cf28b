"""Reweighting of (nearly) orthogonal gradients (section 4.1), for NumPy, torch and JAX arrays alike."""

from __future__ import annotations

from vsgd.core import Array


def sample_weights(gram: Array) -> Array:
    """w_i of eq. 5: one over the number of samples, smoothed, whose gradients interfere with that of sample i.

    Takes the Gram matrix of inner products, which is often cheaper than the gradients. A sample whose gradient
    is zero gets no weight.

    >>> import numpy as np
    >>> gradients = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])  # two aligned, one orthogonal to them
    >>> sample_weights(gradients @ gradients.T)
    array([0.5, 0.5, 1. ])
    """
    norms = gram.diagonal() ** 0.5
    products = norms[:, None] * norms[None, :]
    interference = (abs(gram) / (products + (products == 0))).sum(-1)
    return (interference > 0) / (interference + (interference == 0))


def effective_count(weights: Array) -> Array:
    """The `count` whose rate belongs to Σ w_i ∇⁽ⁱ⁾: n if all gradients are aligned, 1 if all are orthogonal.

    >>> import numpy as np
    >>> effective_count(np.array([0.5, 0.5, 1.0]))
    np.float64(1.5)
    """
    total = weights.sum()
    return (weights > 0).sum() / (total + (total == 0))
