"""Opacus, which writes the gradients of samples out, arrives at the same sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vsgd.torch.per_sample import Recorder

opacus = pytest.importorskip("opacus")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)

    def forward(self, x):
        return self.out(self.table(x).tanh())


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), (5, 4)),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)), (5, 3, 4)),
    "images": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4)), (5, 2, 6, 6)),
    "series": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), (5, 2, 9)),
    "words": (Words, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_sums_equal_those_of_opacus(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().double()
    x = torch.randint(7, (5, 3)) if shape is None else torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        y = torch.randn_like(model(x))
    recorder = Recorder(model)
    with recorder.record() as here:
        F.mse_loss(model(x), y).backward()
    sums = recorder.sums(here)
    expanded = opacus.GradSampleModule(model, loss_reduction="mean")
    F.mse_loss(expanded(x), y).backward()
    for param in model.parameters():
        torch.testing.assert_close(sums[param].grad_sq, param.grad_sample.square().sum(0))
