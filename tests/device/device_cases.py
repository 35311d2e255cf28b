"""Small networks for comparisons between devices: each with its batches and the options of its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vsgd.torch import VSGD

WORDS, CLASSES = 30, 3


class Attention(nn.Module):
    """Self-attention without a fused kernel, which the device does not have."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = parts.unbind(2)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.output((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2, layers: int = 2):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(6, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.positions(places)
        return self.head(self.norm(self.layers(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 5)
        self.rnn, self.head = nn.GRU(5, 7, batch_first=True), nn.Linear(7, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(words))[0][:, -1])


class WordBag(nn.Module):
    def __init__(self, words: int = WORDS, sparse: bool = True):
        super().__init__()
        self.table, self.head = nn.Embedding(words, 6, sparse=sparse), nn.Linear(6, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words).mean(1))


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, CLASSES))


def cnn(bias: bool = False) -> nn.Module:
    first = nn.Conv2d(1, 4, 3, bias=bias), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(5 * 4 * 4, CLASSES))


def vectors(dtype: torch.dtype) -> Tensor:
    return torch.randn(8, 6, dtype=dtype)


def images(dtype: torch.dtype) -> Tensor:
    return torch.randn(8, 1, 8, 8, dtype=dtype)


def words(dtype: torch.dtype) -> Tensor:
    return torch.randint(WORDS, (8, 6))


class Case(NamedTuple):
    """A network, its inputs, and how it is trained."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], Tensor] = vectors
    options: dict[str, Any] = {}  # noqa: RUF012
    per_sample: bool = False
    micro_batches: int = 1


CASES = {
    "mlp": Case(mlp),
    "CNN with BatchNorm": Case(cnn, images),
    "transformer": Case(Transformer, words),
    "GRU": Case(Recurrent, words),
    "sparse table": Case(WordBag, words),
    "per-sample": Case(mlp, per_sample=True),
    "per-sample table": Case(WordBag, words, per_sample=True),
    "micro-batches": Case(mlp, micro_batches=3),
    "weight decay": Case(mlp, options={"weight_decay": 0.1}),
    "dropout": Case(lambda: mlp(0.3)),
}


class Training:
    """One network on one device. Data and initial weights are the same on every device."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype = torch.float64, seed: int = 0):
        torch.manual_seed(seed)
        self.case, self.device, self.dtype = case, device, dtype
        self.model = case.build().to(dtype).to(device)
        recorded = {"per_sample": self.model} if case.per_sample else {}
        self.opt = VSGD(self.model.parameters(), **recorded, **case.options)
        self.steps = 0

    def closures(self) -> list[Callable[[], Tensor]]:
        """Return functions that compute the loss of each micro-batch of the next step."""
        torch.manual_seed(1000 + self.steps)
        losses = []
        for _ in range(self.case.micro_batches):
            x = self.case.inputs(self.dtype)
            y = x.flatten(1)[:, :CLASSES].argmax(1).to(self.device)
            x = x.to(self.device)
            losses.append(lambda x=x, y=y: F.cross_entropy(self.model(x), y))
        return losses

    def step(self) -> float:
        losses = self.closures()
        torch.manual_seed(self.steps)  # the generators of all devices
        self.steps += 1
        return float(self.opt.minimize(losses))

    def run(self, steps: int) -> list[float]:
        """Return the losses of the next steps."""
        return [self.step() for _ in range(steps)]

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu() for name, value in self.model.state_dict().items()}
