"""What the optimizer tells about itself."""

from __future__ import annotations

import math

import pytest
import torch
from closures import closure_of
from torch import nn

from vsgd.torch import VSGD, TensorBoard, is_probing, plot

SIGMA, DISTANCE = 3.0, 0.5


class Constant(nn.Module):
    """A model whose gradients have a known mean and noise: θ·x, with x ~ N(distance, σ²)."""

    def __init__(self, width: int = 400):
        super().__init__()
        self.layer = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        return self.layer(x)


def trained(make, rows: int = 8, steps: int = 400):
    torch.manual_seed(0)
    model = Constant()
    opt = make(model)
    for step in range(steps):
        x = DISTANCE + SIGMA * torch.randn(rows, 400, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            opt.zero_grad()
            loss = model(x).mean()
            loss.backward()
            return loss

        opt.step(closure)
    return opt


@pytest.mark.parametrize(
    ("make", "per_sample"),
    [(lambda m: VSGD(m.parameters()), 8), (lambda m: VSGD(m.parameters(), per_sample=m), 1)],
    ids=["minibatch", "samples"],
)
def test_the_noise_scale_is_that_of_the_data(make, per_sample):
    """σ²/distance² samples; a minibatch of 8 as one sample has an eighth of the noise."""
    diagnosis = trained(make).info()
    assert diagnosis.noise_scale == pytest.approx(SIGMA**2 / DISTANCE**2 / per_sample, rel=0.25)
    assert diagnosis.samples_per_step == 8 / per_sample
    assert diagnosis.batch_worth_using == pytest.approx(SIGMA**2 / DISTANCE**2 / 8, rel=0.25)


def test_no_advice_on_the_batch_where_the_signal_is_lost_in_noise():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    opt = VSGD(model.parameters(), per_sample=model)
    for _ in range(100):
        x, y = torch.randn(2, 8, 1)
        opt.step(closure_of(opt, lambda x=x, y=y: (model(x) - y).square().mean()))
    assert math.isinf(opt.info().noise_scale)
    assert "by an unknown factor" in str(opt.info())


def test_there_is_a_diagnosis_after_every_step():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    opt = VSGD(model.parameters())
    for _ in range(6):
        opt.step(closure_of(opt, lambda: model(torch.ones(2, 4)).square().mean()))
        assert len(opt.info().tensors) == 4


def test_a_tensor_that_only_the_second_evaluation_leaves_out_does_not_hide_the_samples_of_others():
    matrix, vector = nn.Linear(4, 4, bias=False), nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt, x = VSGD([matrix.weight, vector]), torch.randn(8, 4)

    def loss():
        left_out = is_probing() and opt.param_groups[0]["steps"] > 5
        return matrix(x).square().mean() + (0 if left_out else (vector - 2).square().sum())

    for _ in range(21):
        opt.minimize(loss)
    assert opt.param_groups[0]["samples"] == 1
    assert "0 steps skipped" in str(opt.info())


def test_a_line_for_every_tensor_that_learned():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    opt = VSGD(model.named_parameters())
    assert opt.info().tensors == []
    assert "still starting" in str(opt.info())
    assert math.isinf(opt.info().noise_scale)
    x = torch.randn(16, 4)
    for _ in range(20):
        opt.step(closure_of(opt, lambda: model(x).abs().mean()))
    diagnosis = opt.info()
    assert [t.name for t in diagnosis.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for tensor in diagnosis.tensors:
        assert 0 <= tensor.rate.low <= tensor.rate.median <= tensor.rate.high
        assert tensor.memory.low >= 1
        assert 0 <= tensor.outliers <= 1
    text = str(diagnosis)
    assert len(text.splitlines()) == 7  # a title, four tensors, noise, memory
    assert "1.weight" in text
    assert "per_sample, or micro-batches" in text
    assert len(plot(diagnosis).axes) == 3


def test_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = nn.Linear(3, 1)
    opt = VSGD(model.named_parameters())
    writer = tensorboard.SummaryWriter(str(tmp_path))
    opt.register_step_post_hook(TensorBoard(writer, every=5))
    x = torch.randn(8, 3)
    for _ in range(20):
        opt.step(closure_of(opt, lambda: model(x).abs().mean()))
    writer.close()
    found = events.EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in found.Scalars("vsgd/rate/weight")] == [5, 10, 15, 20]
    assert "vsgd/noise_scale" in found.Tags()["scalars"]


def test_long_names_do_not_break_the_columns():
    layer = nn.Linear(3, 2)
    opt = VSGD([("a" * 50, layer.weight), ("b", layer.bias)])
    opt.minimize(lambda: layer(torch.ones(4, 3)).square().mean())
    title, first, second = str(opt.info()).splitlines()[:3]
    assert first.startswith("a" * 50 + "  ")
    assert first.index("eigenbasis") == second.index("vector")
    assert title.index("rate: 5 %") > 50


@pytest.mark.parametrize(("rows", "unit"), [(True, "samples"), (False, "micro-batches")])
def test_the_unit_of_the_noise_scale_is_what_a_sample_is(rows, unit):
    torch.manual_seed(0)
    layer = nn.Linear(20, 1, bias=False)
    opt = VSGD(layer.parameters(), per_sample=layer if rows else None)
    for _ in range(30):
        batches = [1 + torch.randn(8, 20) for _ in range(1 if rows else 4)]
        opt.minimize([lambda x=x: layer(x).mean() for x in batches])
    assert f" {unit}, " in str(opt.info())


def test_tensorboard_continues_the_steps_of_a_resumed_run():
    class Writer:
        def __init__(self):
            self.steps = []

        def add_scalar(self, name, value, step):
            if name == "vsgd/skipped":
                self.steps.append(step)

    def train(opt, steps):
        for _ in range(steps):
            opt.minimize(lambda: model(torch.ones(8, 3)).square().mean())

    model, writer = nn.Linear(3, 1), Writer()
    opt = VSGD(model.named_parameters())
    opt.register_step_post_hook(TensorBoard(writer, every=5))
    train(opt, 12)
    resumed = VSGD(model.named_parameters())
    resumed.load_state_dict(opt.state_dict())
    resumed.register_step_post_hook(TensorBoard(writer, every=5))
    train(resumed, 8)
    assert writer.steps == [5, 10, 15, 20]


def test_a_bias_before_batchnorm_shows_no_rate_and_triggers_no_second_gradient():
    """Its gradient is rounding, whose size varies from step to step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    opt = VSGD(model.named_parameters())
    calls = []
    for step in range(60):
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(step))

        def loss(x=x):
            calls.append(is_probing())
            return (model(x)[:, 0] - x.sum(1)).square().mean()

        opt.minimize(loss)
    tensors = {tensor.name: tensor for tensor in opt.info().tensors}
    assert tensors["0.bias"].rate == (0.0, 0.0, 0.0)
    assert "rounding" in tensors["0.bias"].basis
    assert 0 < tensors["0.weight"].rate.median < 100
    # further calls: checks in two steps, probes in the first three and every tenth, two for running statistics
    assert sum(calls) <= 2 + 3 + 6 + 2 + 3
