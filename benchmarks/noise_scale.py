"""Compare the noise scale of `opt.info()` with tr Σ / |G|² over the whole training set.

    python benchmarks/noise_scale.py

Digits, MLP 64-32-10, with per-sample gradients. The true value is the mean of tr Σ divided by the mean of |G|² over the
iterates of the last 50 steps. The table shows where the optimizer reports that the noise scale is unknown.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from vsgd.torch import VSGD
from vsgd.torch.noise import HORIZON

BATCHES, MARKS = (8, 32, 128, 512), (20, 60, 150, 300)


def moments(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return tr Σ and |G|² over all rows."""

    def loss(parameters: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, row[None]), label[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    grads = vmap(grad(loss), (None, 0, 0))(parameters, x, y).values()
    signal = sum(float(g.mean(0).square().sum()) for g in grads)
    return sum(float(g.square().sum()) for g in grads) / len(x) - signal, signal


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def main() -> None:
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    print("| batch | step | true | opt.info() | ratio |\n|---|---|---|---|---|")
    for size in BATCHES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        opt = VSGD(model.parameters(), per_sample=model)
        loss = partial(loss_of, model)
        newest: deque[tuple[float, float]] = deque(maxlen=HORIZON)
        for step in range(1, MARKS[-1] + 1):
            rows = torch.randperm(len(x))[:size]
            opt.minimize(partial(loss, x[rows], y[rows]))
            if any(mark - HORIZON < step <= mark for mark in MARKS):
                with opt.iterates():
                    newest.append(moments(model, x, y))
            if step in MARKS:
                true = sum(noise for noise, _ in newest) / sum(signal for _, signal in newest)
                info = opt.info()
                known = math.isfinite(info.noise_scale)
                estimate = f"{info.noise_scale:.0f} | {info.noise_scale / true:.2f}" if known else "unknown | –"
                print(f"| {size} | {step} | {true:.0f} | {estimate} |", flush=True)


if __name__ == "__main__":
    main()
