"""Penalties of linear models by name, for estimators and the command line."""

from __future__ import annotations

PENALTIES: dict[str | None, tuple[float | None, float | None]] = {
    "auto": (0.0, 0.0),
    None: (0.0, 0.0),
    "l2": (0.0, 1.0),
    "l1": (1.0, 0.0),
    "elasticnet": (None, None),
}
"""Fractions of L1 and L2 in each penalty. "auto" estimates its weight. The elastic net uses `l1_ratio`."""

DEFAULT_PENALTY: str | None = "auto"
DEFAULT_ALPHA = 1e-4
DEFAULT_L1_RATIO = 0.15


def penalty_weights(penalty: str | None, alpha: float, l1_ratio: float) -> tuple[float, float]:
    """Return the weights of Σ|θ| and of ½Σθ² in the loss of a sample."""
    l1, l2 = PENALTIES[penalty]
    if l1 is None or l2 is None:
        l1, l2 = l1_ratio, 1 - l1_ratio
    return float(alpha * l1), float(alpha * l2)
