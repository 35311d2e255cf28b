"""Train a network on tables of two sizes: vSGD against AdamW.

python examples/tabular.py --seeds 5

The large table is synthetic (Friedman's first function, 4,000 training rows). The small one is the breast cancer data
of scikit-learn, with 400 training rows. Columns are standardized.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from against_adamw import Batch, Task, arguments, compare
from sklearn.datasets import load_breast_cancer, make_friedman1
from torch import Tensor, nn
from torch.nn import functional as F

EPOCHS, BATCH = 10, 32

Loss = Callable[[nn.Module, Batch], Tensor]


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1])


def log_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])


def task(x: Tensor, y: Tensor, rows: int, loss: Loss, seed: int) -> Task:
    """Return a task with the first `rows` rows for training and the others held out."""
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    x = (x - x[:rows].mean(dim=0)) / x[:rows].std(dim=0)
    model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    chosen = [each for _ in range(EPOCHS) for each in torch.randperm(rows).split(BATCH)]

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        return loss(model, (x[rows:], y[rows:])).item()

    return Task(model, [(x[each], y[each]) for each in chosen], loss, held_out, steps_per_epoch=rows / BATCH)


def friedman(seed: int) -> Task:
    x, y = make_friedman1(n_samples=6000, n_features=10, noise=1.0, random_state=seed)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    return task(x, (y - y.mean()) / y.std(), 4000, squared_error, seed)


def breast_cancer(seed: int) -> Task:
    x, y = (torch.tensor(each, dtype=torch.float32) for each in load_breast_cancer(return_X_y=True))
    return task(x, y, 400, log_loss, seed)


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    compare("Friedman's function, 4,000 rows, squared error", friedman, options.seeds)
    compare("Breast cancer, 400 rows, log loss", breast_cancer, options.seeds)
