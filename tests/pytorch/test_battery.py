"""What every algorithm of `VSGD` must pass, for every kind of sample and precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from closures import closure_of
from torch import nn

from vsgd import COLUMNS, NETWORKS, PAPER
from vsgd.torch import VSGD

ALGORITHMS = {"networks": NETWORKS, "element-wise": NETWORKS._replace(eigenbasis=False), "paper": PAPER}
SAMPLES = ["minibatch", "micro-batches", "rows"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]

every = [
    pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS),
    pytest.mark.parametrize("samples", SAMPLES),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]


def battery(test):
    for mark in every:
        test = mark(test)
    return test


class Trainee:
    """A small network, its optimizer, and minibatches that depend on the step alone."""

    def __init__(self, algorithm, samples, dtype):
        torch.manual_seed(0)
        self.samples, self.dtype = samples, dtype
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        rows = self.model if samples == "rows" else None
        self.opt = VSGD(self.model.parameters(), algorithm=algorithm, per_sample=rows)

    def closures(self, step, scale=1.0):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        parts = x.split(4) if self.samples == "micro-batches" else [x]

        def loss_of(part):
            return scale * F.cross_entropy(self.model(part.to(self.dtype)).float(), part[:, :3].argmax(1))

        return [closure_of(self.opt, lambda part=part: loss_of(part)) for part in parts]

    def train(self, steps, scale=1.0):
        return [float(self.opt.step(self.closures(step, scale))) for step in steps]

    def snapshot(self):
        return copy.deepcopy((self.model.state_dict(), self.opt.state_dict()["state"]))


@battery
def test_resumes_to_the_bit(algorithm, samples, dtype):
    first, second = (Trainee(algorithm, samples, dtype) for _ in range(2))
    first.train(range(14))
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    second.opt.load_state_dict(copy.deepcopy(first.opt.state_dict()))
    for trainee in (first, second):
        trainee.train(range(14, 26))
    torch.testing.assert_close(first.snapshot(), second.snapshot(), rtol=0, atol=0)


@battery
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(algorithm, samples, dtype, scale):
    trainee = Trainee(algorithm, samples, dtype)
    trainee.train(range(13))
    before = trainee.snapshot()
    trainee.train([13], scale)
    torch.testing.assert_close(trainee.snapshot(), before, rtol=0, atol=0)
    assert trainee.opt.param_groups[0]["skipped"] == 1


@battery
@pytest.mark.parametrize("scale", [1e-10, 1e10])
def test_extreme_scales_of_the_loss_leave_everything_finite(algorithm, samples, dtype, scale):
    trainee = Trainee(algorithm, samples, dtype)
    trainee.train(range(20), scale)
    assert all(torch.isfinite(p).all() for p in trainee.model.parameters())
    assert all(torch.isfinite(value).all() for state in trainee.opt.state.values() for value in state.values())


@battery
def test_an_algorithm_of_another_front_end_is_refused(algorithm, samples, dtype):
    trainee = Trainee(algorithm, samples, dtype)
    trainee.train(range(2))
    before = trainee.snapshot()
    trainee.opt.param_groups[0]["algorithm"] = COLUMNS
    with pytest.raises(TypeError, match=r"vsgd\.Networks or vsgd\.Paper"):
        trainee.train([2])
    trainee.opt.param_groups[0]["algorithm"] = algorithm
    torch.testing.assert_close(trainee.snapshot(), before, rtol=0, atol=0)
