"""vSGD: stochastic gradient descent without a learning rate to tune (Schaul & LeCun 2013).

`vsgd.algorithms` has one module per algorithm. `vsgd.init` and `vsgd.step` are those of the paper. The front ends are
`vsgd.torch`, `vsgd.optax`, `vsgd.sklearn`, `vsgd.river` and the command `vsgd`. The package `vsgd_bench`, in the
repository only, reproduces the paper and compares optimizers.
"""

from vsgd.algorithms.columns import COLUMNS, Columns
from vsgd.algorithms.networks import NETWORKS, Networks
from vsgd.algorithms.paper import PAPER, VSGD_2012, Paper, init, probe, rate
from vsgd.algorithms.paper import update as step
from vsgd.core import Info, Moments, State, curvature

__version__ = "0.3.0"

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
