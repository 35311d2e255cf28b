"""Measure the held-out loss by weight decay, for VSGD and AdamW with the same value, and for VSGD with an estimate.

python benchmarks/weight_decay.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from vsgd.torch import VSGD

TRAIN, STEPS, BATCH, SEEDS = 1400, 400, 32, (0, 1, 2)
DECAYS = (0.0, 1e-3, 1e-2, 0.1, 0.3, 1.0)

Make = Callable[[nn.Module, float], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "VSGD": lambda model, decay: VSGD(model.parameters(), weight_decay=decay),
    "AdamW 1e-3": lambda model, decay: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay),
    "AdamW 1e-2": lambda model, decay: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay),
}


def estimating(model: nn.Module, decay: float) -> VSGD:
    """Return a `VSGD` that estimates weight decay."""
    return VSGD(model.parameters(), weight_decay=decay, steps_per_epoch=TRAIN / BATCH)


def held_out_loss(make: Make, decay: float, seed: int, x: Tensor, y: Tensor) -> float:
    """Train a small network on digits, and return the cross-entropy on held-out digits."""
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    train, test = order[:TRAIN], order[TRAIN:]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    opt = make(model, decay)
    for _ in range(STEPS):
        rows = train[torch.randint(TRAIN, (BATCH,))]

        def closure(rows: Tensor = rows) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            return loss

        opt.step(closure)
    with torch.no_grad():
        return F.cross_entropy(model(x[test]), y[test]).item()


def main() -> None:
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    print(f"Digits, MLP 64-32-10, {STEPS} minibatches of {BATCH}: held-out loss, mean of seeds {SEEDS}.\n")
    print(f"| weight_decay | {' | '.join(OPTIMIZERS)} |")
    print("|---" * (len(OPTIMIZERS) + 1) + "|")
    for decay in DECAYS:
        losses = [[held_out_loss(make, decay, seed, x, y) for seed in SEEDS] for make in OPTIMIZERS.values()]
        print(f"| {decay:g} | {' | '.join(f'{sum(each) / len(each):.3f}' for each in losses)} |")
    losses = [held_out_loss(estimating, 0.0, seed, x, y) for seed in SEEDS]
    print(f"| estimated | {sum(losses) / len(losses):.3f} |{'  |' * (len(OPTIMIZERS) - 1)}")


if __name__ == "__main__":
    main()
