"""Linear models on sparse rows, used by `vsgd.sklearn` and `vsgd fit`. Needs NumPy and numba only."""

from vsgd.linear.losses import CLASSIFICATION, REGRESSION, Task
from vsgd.linear.model import Model, new_model
from vsgd.linear.rows import Rows, as_rows, distinct
from vsgd.linear.training import Training, learning_rates, train_on

__all__ = [
    "CLASSIFICATION",
    "REGRESSION",
    "Model",
    "Rows",
    "Task",
    "Training",
    "as_rows",
    "distinct",
    "learning_rates",
    "new_model",
    "train_on",
]
