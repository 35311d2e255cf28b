"""The optimizer on a small network equals the paper as scalar loops, for every kind of sample."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import nn

from vsgd import PAPER
from vsgd.torch import VSGD

ROWS, INPUTS = 12, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def batches(steps: int):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64)
        yield x, (x[:, :2].abs() + torch.randn(ROWS, 2, generator=generator, dtype=torch.float64))


def loss_of(model: nn.Module, x, y):
    return (model(x) - y).abs().mean()  # kinks in the loss, and in the network


def gradient(model: nn.Module, x, y) -> list[float]:
    grads = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads]).tolist()


def set_parameters(model: nn.Module, values: list[float]) -> None:
    nn.utils.vector_to_parameters(torch.tensor(values, dtype=torch.float64), model.parameters())


def reference_track(samples, steps: int) -> list[list[float]]:
    """Algorithm 1 for every coordinate of the network. `samples` splits a minibatch into its samples."""
    model = network()
    start = nn.utils.parameters_to_vector(model.parameters()).tolist()
    coordinates = [reference.Coordinate(value) for value in start]
    track = []
    for x, y in batches(steps):
        parts = samples(x, y)
        theta = [c.theta for c in coordinates]
        set_parameters(model, theta)
        here = list(zip(*(gradient(model, *part) for part in parts), strict=True))
        delta = [c.delta(list(grads)) for c, grads in zip(coordinates, here, strict=True)]
        set_parameters(model, [t + d for t, d in zip(theta, delta, strict=True)])
        there = list(zip(*(gradient(model, *part) for part in parts), strict=True))
        for c, d, before, after in zip(coordinates, delta, here, there, strict=True):
            c.observe(list(before), [abs((a - b) / d) for a, b in zip(before, after, strict=True)])
        track.append([c.theta for c in coordinates])
    return track


def whole(x, y):
    return [(x, y)]


def in_four(x, y):
    return list(zip(x.split(3), y.split(3), strict=True))


def one_by_one(x, y):
    return list(zip(x.split(1), y.split(1), strict=True))


@pytest.mark.parametrize("samples", [whole, in_four, one_by_one])
def test_steps_equal_the_reference(samples):
    steps = 200
    expected = torch.tensor(reference_track(samples, steps), dtype=torch.float64)
    model = network()
    opt = VSGD(model.parameters(), per_sample=model if samples is one_by_one else None, algorithm=PAPER)
    track = []
    for x, y in batches(steps):

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        if samples is in_four:
            opt.step([lambda part=part, closure=closure: closure(*part) for part in in_four(x, y)])
        else:
            opt.step(closure)
        track.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    got = torch.stack(track)
    moved = (got[:-1] != got[1:]).any(dim=1).nonzero()
    assert len(moved) > 150, "the comparison must see the parameters move"
    first = int(moved[0]) + 1
    torch.testing.assert_close(got[first], expected[first], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[-1], expected[-1], rtol=1e-7, atol=1e-9)
