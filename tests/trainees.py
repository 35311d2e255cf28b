"""Trained models to damage, and damaged values, for tests with many random cases."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from closures import closure_of
from torch import nn

from vsgd import NETWORKS, PAPER
from vsgd.torch import VSGD

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
WORDS = torch.randint(0, 9, (12,), generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


class Tagger(nn.Module):
    """A sparse embedding table and a dense layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 5, sparse=True)
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x + self.table(WORDS))


class Trainee:
    """A model after a few steps."""

    def __init__(self, kind):
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.model = Tagger() if kind == "table" else dense.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
        self.opt = VSGD(self.model.parameters(), algorithm=PAPER if kind == "paper" else NETWORKS)
        self.train(14)

    def train(self, steps):
        dtype = next(self.model.parameters()).dtype
        for _ in range(steps):
            self.opt.step(closure_of(self.opt, lambda: F.cross_entropy(self.model(X.to(dtype)).float(), Y)))

    def numbers(self):
        states = [value for state in self.opt.state.values() for value in state.values()]
        return [value.detach().double() for value in (*self.model.parameters(), *states)]

    def bits(self):
        """Return the complete state, for comparison."""
        keys = [(key, value.dtype) for state in self.opt.state.values() for key, value in state.items()]
        return repr(self.opt.param_groups), keys, [value.numpy().tobytes() for value in self.numbers()]


KINDS = ["networks", "paper", "bfloat16", "table"]
SCALARS = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-30, 1e18, 1e30, 3e38, -3e38, 1e300]
ODDITIES = [None, "text", -1, 0, 3, True, math.nan, math.inf, [], {}, [1.0, math.nan, 0.0], torch.zeros(2), b""]
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn]


def oddly_shaped(value, rng):
    return rng.choice(
        [
            lambda: value.reshape(-1)[: rng.randrange(value.numel())],
            lambda: value[None],
            lambda: value.reshape(-1).repeat(2),
            lambda: torch.zeros(tuple(rng.choices(range(9), k=rng.randrange(4)))),
            lambda: value.to_sparse(),
            lambda: value.to("meta"),
        ]
    )()


def with_numbers(value, rng):
    """Replace one number, or all."""
    value = value.clone().double()
    value.view(-1)[slice(None) if rng.random() < 0.3 else rng.randrange(value.numel())] = rng.choice(SCALARS)
    return value
