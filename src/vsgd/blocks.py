"""Statistics shared within blocks of coordinates, as in the predecessor's vSGD-b, and by all, as in vSGD-g."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vsgd.rule import Moments


def shared(labels: Any) -> Callable[[Moments], Moments]:
    """Let the coordinates (the last axis) that carry the same label share one rate. Pass to `step` as `shared`.

    η_b = Σ ḡ_i² / (h⁺ Σ v̄_i): the strength of the whole gradient of a block against its noise, and the upper
    bound h⁺ = max h̄_i of its curvatures. One label for all coordinates makes the rate global.
    """
    labels = np.asarray(labels)
    members = np.unique(labels)[:, None] == labels
    spread = members / members.sum(axis=1, keepdims=True)

    def mean_square(values: Any) -> Any:
        return values @ spread.T @ members

    def largest(values: Any) -> Any:
        return np.where(members, values[..., None, :], -np.inf).max(axis=-1) @ members

    def share(mean: Moments) -> Moments:
        return Moments(
            grad=mean_square(mean.grad**2) ** 0.5,
            grad_sq=mean_square(mean.grad_sq),
            curv=largest(mean.curv),
            curv_sq=largest(mean.curv_sq),
        )

    return share
