"""Compare vSGD without tuning with SGD at seven learning rates, on handwritten digits.

    python examples/torch_mnist_like.py [plot.png]

Trains a small network on the digits that come with scikit-learn, prints a table, and saves a plot of the rates found.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from vsgd.torch import VSGD, plot

EPOCHS, BATCH, TRAIN = 10, 16, 1500

SGD_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def train(make_optimizer):
    """Return loss and error on held-out digits, and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = make_optimizer(model)
    for _ in range(EPOCHS):
        for rows in torch.randperm(TRAIN).split(BATCH):

            def closure(rows=rows):
                opt.zero_grad()
                loss = F.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                return loss

            opt.step(closure)
    with torch.no_grad():
        scores = model(x[TRAIN:])
        error = (scores.argmax(dim=1) != y[TRAIN:]).float().mean()
        return F.cross_entropy(scores, y[TRAIN:]).item(), error.item(), opt


def main() -> None:
    torch.set_num_threads(1)  # more threads do not help such a small network
    print(f"digits, {EPOCHS} epochs, minibatches of {BATCH}; held-out loss and error")
    runs = {f"SGD, lr {lr:g}": lambda m, lr=lr: torch.optim.SGD(m.parameters(), lr=lr) for lr in SGD_RATES}
    runs["VSGD, a row is a sample"] = lambda m: VSGD(m.named_parameters(), per_sample=m)
    runs["VSGD"] = lambda m: VSGD(m.named_parameters())
    for name, make in runs.items():
        started = time.perf_counter()
        loss, error, opt = train(make)
        print(f"{name:<32}{loss:>8.3f}{error:>8.1%}{time.perf_counter() - started:>8.1f} s")
    print()
    print(opt.info())
    path = sys.argv[1] if len(sys.argv) > 1 else "rates.png"
    plot(opt.info()).savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
