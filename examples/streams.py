"""Learn from a stream whose labels drift: vSGD against AdamW at constant learning rates.

python examples/streams.py --seeds 5

The label depends on a direction in the input space. It jumps every 500 batches, turns slowly, or stays fixed.
Each batch is predicted before it is used for training.
"""

from __future__ import annotations

import torch
from against_adamw import Batch, Task, arguments, compare
from torch import Tensor, nn
from torch.nn import functional as F

BATCHES, BATCH, INPUTS = 2000, 16, 20
NOISE = 0.1  # fraction of labels that are flipped


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def directions(kind: str, rng: torch.Generator) -> Tensor:
    """Return the direction that decides the labels, for every batch."""
    corners = torch.randn(BATCHES // 500 + 1, INPUTS, generator=rng)
    time = torch.arange(BATCHES) / 500
    if kind == "fixed":
        return corners[:1].expand(BATCHES, INPUTS)
    if kind == "jumps":
        return corners[time.long()]
    after = (time - time.floor())[:, None]
    return corners[time.long()] * (1 - after) + corners[time.long() + 1] * after


def make(kind: str, seed: int) -> Task:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, 2))
    rng = torch.Generator().manual_seed(seed)
    batches = []
    for direction in directions(kind, rng):
        x = torch.randn(BATCH, INPUTS, generator=rng)
        flipped = torch.rand(BATCH, generator=rng) < NOISE
        batches.append((x, ((x @ direction > 0) ^ flipped).long()))
    return Task(model, batches, loss)


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    for kind in ("jumps", "slow", "fixed"):
        compare(f"Stream, {kind}", lambda seed, kind=kind: make(kind, seed), options.seeds, decay=False)
