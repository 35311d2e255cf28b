"""Stochastic gradient descent with nothing to tune (Schaul & LeCun 2013).

`vsgd.rule` is the method; `vsgd.bench` reproduces the paper and is behind the `vsgd` command.
"""

from vsgd.options import COLUMNS, NETWORKS, PAPER, VSGD_2012, Options
from vsgd.rule import Info, Moments, State, average, init, is_outlier, rate, remember, step

__version__ = "0.1.0"

__all__ = [
    "COLUMNS",
    "NETWORKS",
    "PAPER",
    "VSGD_2012",
    "Info",
    "Moments",
    "Options",
    "State",
    "average",
    "init",
    "is_outlier",
    "rate",
    "remember",
    "step",
]
