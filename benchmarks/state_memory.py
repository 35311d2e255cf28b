"""Print the memory of VSGD's state in bytes per parameter, for layers of different shapes: a Markdown table.

python benchmarks/state_memory.py
"""

from __future__ import annotations

import torch
from torch import nn

from vsgd.torch import VSGD

ROWS = 512


class Adapter(nn.Module):
    """The trained part of a LoRA layer: x A B, where B is initially zero."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x))


MODELS = {
    "vector of 10,000": lambda: nn.Linear(10_000, 1, bias=False),
    "square layer, 1024 → 1024": lambda: nn.Linear(1024, 1024),
    "eight of these layers": lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))),
    "layer 784 → 256": lambda: nn.Linear(784, 256),
    "convolution 64 → 64, 3 × 3": lambda: nn.Sequential(nn.Unflatten(1, (64, 4, 4)), nn.Conv2d(64, 64, 3)),
    "long side: head 3136 → 10": lambda: nn.Linear(3136, 10),
    "LoRA, rank 8 in width 2048": lambda: Adapter(2048, 8),
    "LoRA, rank 8 in width 64": lambda: Adapter(64, 8),
}
WIDTHS = {"vector of 10,000": 10_000, "layer 784 → 256": 784, "long side: head 3136 → 10": 3136}
WIDTHS |= {"LoRA, rank 8 in width 2048": 2048, "LoRA, rank 8 in width 64": 64}


def main() -> None:
    torch.manual_seed(0)
    print("| | state | state, `compact=True` | buffers |\n|---|---|---|---|")
    for name, make in MODELS.items():
        found = []
        for compact in (False, True):
            model, x = make(), torch.randn(ROWS, WIDTHS.get(name, 1024))
            opt = VSGD(model.parameters(), compact=compact)
            opt.minimize(lambda model=model, x=x: (model(x) - 1).square().mean())
            found.append(opt.info())
        full, small = found
        numbers = (full.state_bytes, small.state_bytes, full.buffer_bytes)
        print(f"| {name} | " + " | ".join(f"{number / full.parameters:.1f}" for number in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
