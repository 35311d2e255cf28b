"""L1 and L2 penalties for coordinates that are seen only now and then. Plain arithmetic, like the rule.

A coordinate that a share p of the samples touches is told of the penalty only then, 1/p times as strong. Where the
method settles is therefore where the whole penalized loss settles, and nothing is done to a coordinate between.
"""

from __future__ import annotations

from vsgd.core import Array, Moments


def penalized(batch: Moments, theta: Array, l1: Array, l2: Array) -> Moments:
    """The moments of a minibatch whose samples each carry l1 |θ| + ½ l2 θ² in their loss.

    At θ = 0 the slope of |θ| is whatever between −1 and 1 leaves the least gradient.
    """
    at_zero = theta == 0
    kept = (batch.grad > l1) * (batch.grad - l1) + (batch.grad < -l1) * (batch.grad + l1)
    slope = l2 * theta + l1 * ((theta > 0) * 1.0 - (theta < 0) * 1.0) + at_zero * (kept - batch.grad)
    return Moments(
        grad=batch.grad + slope,
        grad_sq=batch.grad_sq + slope * (batch.grad + batch.grad + slope),
        curv=batch.curv + l2,
        curv_sq=batch.curv_sq + l2 * (batch.curv + batch.curv + l2),
    )


def stop_at_zero(before: Array, after: Array) -> Array:
    """A step across the kink of |θ| ends on it."""
    return after * (before * after >= 0)
