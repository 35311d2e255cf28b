"""L1 and L2 penalties for sparse columns. Plain arithmetic, as described in `vsgd.core`.

The penalty on a column is applied only in minibatches that contain the column, and multiplied by its inverse frequency.
The expectation is unchanged, and columns that a minibatch does not contain need no work.
"""

from __future__ import annotations

from vsgd.core import Moments, PerCoordinate


def shifted(mean: Moments, slope: PerCoordinate) -> Moments:
    """Return the moments after a constant is added to the gradient of every sample."""
    return Moments(
        grad=mean.grad + slope,
        grad_sq=mean.grad_sq + slope * (mean.grad + mean.grad + slope),
        curv=mean.curv,
        curv_sq=mean.curv_sq,
    )


def with_l2(batch: Moments, theta: PerCoordinate, l2: PerCoordinate) -> Moments:
    """Return the moments of a minibatch after ½ l2 θ² is added to the loss of every sample."""
    moved = shifted(batch, l2 * theta)
    curv_sq = batch.curv_sq + l2 * (batch.curv + batch.curv + l2)
    return Moments(grad=moved.grad, grad_sq=moved.grad_sq, curv=batch.curv + l2, curv_sq=curv_sq)


def side_of_kink(theta: PerCoordinate, mean_grad: PerCoordinate, l1: PerCoordinate) -> PerCoordinate:
    """Return the sign of θ. At θ = 0, return the sign of its next value: 0 while the mean gradient is within ± l1.

    The moving average of the gradient is used, since the gradient of a noisy minibatch often exceeds ± l1.
    """
    leaving = (theta == 0) * ((mean_grad < -l1) * 1.0 - (mean_grad > l1) * 1.0)
    return (theta > 0) * 1.0 - (theta < 0) * 1.0 + leaving


def stop_at_zero(theta: PerCoordinate, side: PerCoordinate) -> PerCoordinate:
    """Return θ, or 0 if its sign is not `side`."""
    return theta * (theta * side > 0)
