"""The few constants of the method, the two published presets, and what is used by default."""

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
        slow_start: v̄ and v̄^fd are multiplied by this at the end of the bootstrap (1 in the paper).
        memory_limit: τ grows no further than the larger of this and √seen; 0, as in the paper, is no limit.
        column_probe: whether curvature is taken row by row, as `vsgd.probe` says, or at δ = ḡ as in the paper.
        caution: share of |∇/δ| added to a curvature, since a kink may lie just beyond the shift (0 in the paper).
        tensor_probe: size of the shift δ as a share of the root mean square of its tensor, with a random sign for each
            coordinate; 0, as in the paper, is δ = ḡ.
        neighbours: weight with which the mean curvature of a tensor is mixed into that of each of its coordinates
            (0 in the paper).
        curvature_every: in every so many steps a second gradient is taken (1 in the paper).
        average_iterates: whether the weights to use are a moving average of those the steps went through.
        flattest: with `column_probe`, no row is taken to have less than this share of the mean curvature of all so far
            (0: whatever it has).
    """

    epsilon: float = 1e-5
    bootstrap: float = 10.0
    memory: float = 2.0
    outlier_sigmas: float = 2.0
    resolution: float = 1e-6
    detect_outliers: bool = True
    normalize_curvature: bool = True
    slow_start: float = 1.0
    memory_limit: float = 0.0
    column_probe: bool = False
    caution: float = 0.0
    tensor_probe: float = 0.0
    neighbours: float = 0.0
    curvature_every: float = 1.0
    average_iterates: bool = False
    flattest: float = 0.0


PAPER = Options()
"""vSGD-fd: Algorithm 1 of Schaul & LeCun (2013), to the letter."""

VSGD_2012 = Options(detect_outliers=False, normalize_curvature=False)
"""vSGD, the predecessor: trusts the curvature it is given and every sample it sees."""

COLUMNS = Options(
    epsilon=1e-100,
    bootstrap=0.0,
    memory=1.0,
    normalize_curvature=False,
    memory_limit=100.0,
    column_probe=True,
    caution=0.1,
    flattest=0.25,
)
"""For linear models: no constant in it has the unit of a feature or of the loss, so neither matters."""

NETWORKS = Options(
    epsilon=1e-36,
    bootstrap=3.0,
    slow_start=10.0,
    memory_limit=10.0,
    tensor_probe=0.03,
    neighbours=1e-3,
    curvature_every=4.0,
    average_iterates=True,
)
"""For networks: no constant in it has the unit of the loss, and coordinates of a tensor are looked at together."""
