"""Weighted steps: inner products and sums without writing gradients out, and the step they give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vsgd
from vsgd.reweight import effective_count, sample_weights
from vsgd.torch import VSGD, Rows
from vsgd.torch.per_sample import Recorder

ROWS = 6


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, x):
        return self.table(x).mean(1) @ self.table.weight.T


class Own(nn.Module):
    """A layer without a handler, which is replayed sample by sample."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return (x * self.scale.exp()).cumsum(1)


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def integers(*shape):
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(1))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), floats(ROWS, 5)),
    "sequence": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)), floats(ROWS, 3, 5)),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten()), floats(ROWS, 2, 5, 5)),
    "embedding": (lambda: nn.Embedding(7, 4), integers(ROWS, 3)),
    "tied": (Tied, integers(ROWS, 3)),
    "own": (Own, floats(ROWS, 5)),
    "own between known layers": (lambda: nn.Sequential(nn.Linear(5, 5), Own(), nn.Linear(5, 2)), floats(ROWS, 5)),
}


def loss_of(outputs):
    return (outputs.flatten(1) ** 2 + outputs.flatten(1)).sum(1).mean()


@pytest.mark.parametrize("name", MODELS)
def test_inner_products_and_weighted_sums_equal_those_of_written_out_gradients(name):
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    recorder = Recorder(model)
    with recorder.record() as recording:
        loss_of(model(x)).backward()
    grads = {p: torch.stack([g[i] for g in per_sample(model, x)]) / ROWS for i, p in enumerate(model.parameters())}
    expected = sum(grad.flatten(1) @ grad.flatten(1).T for grad in grads.values())
    torch.testing.assert_close(recorder.gram(recording), expected)
    weights = torch.linspace(0.1, 1, ROWS, dtype=torch.float64)
    found = recorder.weighted(recording, weights, set(grads))
    for param, grad in grads.items():
        torch.testing.assert_close(found[param], torch.tensordot(weights, grad, 1))


def per_sample(model, x):
    return [torch.autograd.grad(loss_of(model(x[j : j + 1])), list(model.parameters())) for j in range(len(x))]


def test_steps_equal_the_rule_along_the_weighted_gradient():
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    opt = VSGD(model.parameters(), per_sample=Rows(model, reweight=True), algorithm=vsgd.PAPER)
    theta = model.weight.detach().clone()
    state = vsgd.init(theta)

    def gradients(theta, x, y):
        theta = theta.clone().requires_grad_()
        losses = F.cross_entropy(x @ theta.T, y, reduction="none")
        return torch.stack([torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in losses])

    for step in range(40):
        x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        y = x[:, :3].argmax(1)

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)

        here = gradients(theta, x, y)
        weights = sample_weights(here.flatten(1) @ here.flatten(1).T)
        count = effective_count(weights)
        delta = vsgd.probe(state, here.mean(0), count)
        delta = (theta + delta) - theta
        curvs = vsgd.curvature(here, gradients(theta + delta, x, y), delta)
        batch = vsgd.Moments(here.mean(0), (here**2).mean(0), curvs.mean(0), (curvs**2).mean(0))
        _, state, info = vsgd.step(theta, state, batch, count)
        theta = theta - info.rate * torch.tensordot(weights, here, 1)
    torch.testing.assert_close(model.weight.detach(), theta, rtol=1e-9, atol=1e-10)


def test_rows_are_needed():
    message = r"per_sample=vsgd.torch.Rows\(model"
    with pytest.warns(DeprecationWarning, match=message), pytest.raises(ValueError, match=message):
        VSGD(nn.Linear(2, 2).parameters(), reweight=True)
