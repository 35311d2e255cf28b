"""Stochastic gradient descent with nothing to tune (Schaul & LeCun 2013).

The functions exported here are Algorithm 1 of the paper by hand, for any array library; `vsgd.algorithms` has the
others. `vsgd.torch`, `vsgd.sklearn` and `vsgd.river` are front ends, and the `vsgd` command trains on files and
reproduces the paper.
"""

import vsgd.probe as _module  # noqa: F401 - imported later, it would take the place of the function of its name
from vsgd.algorithms.columns import COLUMNS, Columns
from vsgd.algorithms.networks import NETWORKS, Networks
from vsgd.algorithms.paper import PAPER, VSGD_2012, Paper, init, probe, rate
from vsgd.algorithms.paper import update as step
from vsgd.core import Info, Moments, State, curvature

__version__ = "0.1.0"

__all__ = [
    "COLUMNS",
    "NETWORKS",
    "PAPER",
    "VSGD_2012",
    "Columns",
    "Info",
    "Moments",
    "Networks",
    "Paper",
    "State",
    "curvature",
    "init",
    "probe",
    "rate",
    "step",
]
