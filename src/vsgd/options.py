"""The few constants of the method, and the two published presets."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """What the rule may be told. Every value has a default; none is meant to be tuned per problem.

    Attributes:
        epsilon: added to denominators so that none vanishes (ε = 1e-5 in the paper).
        bootstrap: how many samples make the first averages before anything moves (10 in the paper).
        memory: τ at the end of the bootstrap.
        outlier_sigmas: a minibatch this many standard deviations off is an outlier (2 in the paper).
        resolution: a variance below this share of the mean square is rounding (float32 cannot tell it from none).
        detect_outliers: whether an outlier lengthens the memory before it is averaged in.
        normalize_curvature: whether noisy curvature counts for more, h̄ = v̄^fd / h̄^fd, or h̄ is taken as it is.
    """

    epsilon: float = 1e-5
    bootstrap: float = 10.0
    memory: float = 2.0
    outlier_sigmas: float = 2.0
    resolution: float = 1e-6
    detect_outliers: bool = True
    normalize_curvature: bool = True


PAPER = Options()
"""vSGD-fd: Algorithm 1 of Schaul & LeCun (2013), to the letter."""

VSGD_2012 = Options(detect_outliers=False, normalize_curvature=False)
"""vSGD, the predecessor: trusts the curvature it is given and every sample it sees."""
