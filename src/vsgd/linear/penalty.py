"""L1 and L2 penalties for sparse columns. Plain arithmetic, as `vsgd.core` explains.

The penalty on a column is applied only in minibatches that contain it, scaled by the inverse of its frequency p, so its
expectation is unchanged, and nothing has to be done to a column that a minibatch does not contain.
"""

from __future__ import annotations

from vsgd.core import Array, Moments


def penalized(batch: Moments, theta: Array, l1: Array, l2: Array) -> Moments:
    """The moments of a minibatch when l1 |θ| + ½ l2 θ² is added to the loss of every sample.

    At θ = 0 the subgradient of |θ| is the one that leaves the smallest gradient.
    """
    at_zero = theta == 0
    remaining = (batch.grad > l1) * (batch.grad - l1) + (batch.grad < -l1) * (batch.grad + l1)
    slope = l2 * theta + l1 * ((theta > 0) * 1.0 - (theta < 0) * 1.0) + at_zero * (remaining - batch.grad)
    return Moments(
        grad=batch.grad + slope,
        grad_sq=batch.grad_sq + slope * (batch.grad + batch.grad + slope),
        curv=batch.curv + l2,
        curv_sq=batch.curv_sq + l2 * (batch.curv + batch.curv + l2),
    )


def stop_at_zero(before: Array, after: Array) -> Array:
    """A step across the kink of |θ| at 0 ends there."""
    return after * (before * after >= 0)
