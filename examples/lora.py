"""Fine-tune a frozen transformer with low-rank adapters: vSGD against AdamW.

python examples/lora.py --seeds 5

The transformer reads the rows of 8 x 8 digits. It is trained on the digits 0 to 4 with AdamW and then frozen.
Adapters of rank 4 and a new head learn the digits 5 to 9.
"""

from __future__ import annotations

import copy
from functools import cache

import torch
from against_adamw import Batch, Task, arguments, compare
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

WIDTH, RANK, EPOCHS = 48, 4, 6


class LowRank(nn.Module):
    """Add the product of two thin matrices to a frozen weight. The product is zero at first."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(RANK, columns) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class Transformer(nn.Module):
    """Two encoder layers over the rows of an image, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(images) + self.position).mean(dim=1))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def digits(first: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images and labels of five digits in random order."""
    images, labels = load_digits(return_X_y=True)
    chosen = (labels >= first) & (labels < first + 5)
    x = torch.tensor(images[chosen], dtype=torch.float32).reshape(-1, 8, 8) / 16
    y = torch.tensor(labels[chosen]) - first
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order], y[order]


@cache
def pretrained() -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    x, y = digits(0, seed=0)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(10):
        for rows in torch.randperm(len(x)).split(16):
            opt.zero_grad()
            loss(model, (x[rows], y[rows])).backward()
            opt.step()
    return model.requires_grad_(False)


def make(seed: int) -> Task:
    model = copy.deepcopy(pretrained())
    torch.manual_seed(seed)
    for layer in model.encoder.layers:
        for module, name in ((layer.self_attn, "in_proj_weight"), (layer.linear1, "weight"), (layer.linear2, "weight")):
            parametrize.register_parametrization(module, name, LowRank(getattr(module, name)))
    model.head = nn.Linear(WIDTH, 5)
    x, y = digits(5, seed)
    train, test = slice(0, 600), slice(600, None)
    rows = [rows for _ in range(EPOCHS) for rows in torch.randperm(600).split(16)]
    batches = [(x[train][r], y[train][r]) for r in rows]

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        return loss(model, (x[test], y[test])).item()

    return Task(model, batches, loss, held_out)


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    compare("Digits 5 to 9 with adapters of rank 4", make, options.seeds)
