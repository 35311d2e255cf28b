"""The networks of the small suite: common architectures with few parameters."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(normalize: bool) -> nn.Sequential:
    """Return two convolutions with pooling and a linear layer, for 28×28 images."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16)):
        norm = [nn.BatchNorm2d(outputs)] if normalize else []
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 7 * 7, 10))


class CharTransformer(nn.Module):
    """A transformer that predicts the next character from all characters before it."""

    def __init__(self, symbols: int, length: int, width: int = 64, heads: int = 4, depth: int = 2):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.read = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, symbols))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes) + self.place
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.read(x)
        return logits.transpose(1, 2)


class CharLSTM(nn.Module):
    """An LSTM that predicts the next character."""

    def __init__(self, symbols: int, width: int = 96):
        super().__init__()
        self.embed = nn.Embedding(symbols, 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.read = nn.Linear(width, symbols)

    def forward(self, codes: Tensor) -> Tensor:
        logits: Tensor = self.read(self.lstm(self.embed(codes))[0])
        return logits.transpose(1, 2)


class Factors(nn.Module):
    """A rating as the product of the factors of user and item, plus their biases."""

    def __init__(self, users: int, items: int, sparse: bool, width: int = 8):
        super().__init__()
        self.user = nn.Embedding(users, width + 1, sparse=sparse)
        self.item = nn.Embedding(items, width + 1, sparse=sparse)
        self.mean = nn.Parameter(torch.zeros(1))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = self.user(pairs[:, 0]), self.item(pairs[:, 1])
        rating: Tensor = (user[:, 1:] * item[:, 1:]).sum(1) + user[:, 0] + item[:, 0] + self.mean
        return rating


class WordBag(nn.Module):
    """The mean of word embeddings, followed by two linear layers."""

    def __init__(self, words: int, classes: int, sparse: bool, width: int = 32):
        super().__init__()
        self.embed = nn.EmbeddingBag(words + 1, width, padding_idx=words, sparse=sparse)
        self.read = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.read(self.embed(words))
        return logits


class Point(nn.Module):
    """A point, and its squared distance to others in the metric `hessian`."""

    def __init__(self, hessian: Tensor):
        super().__init__()
        self.theta = nn.Parameter(torch.ones(len(hessian)))
        self.hessian = hessian

    def forward(self, centres: Tensor) -> Tensor:
        offset = self.theta - centres
        return (offset * (offset @ self.hessian)).sum(-1) / 2
