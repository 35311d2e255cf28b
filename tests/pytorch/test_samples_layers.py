"""Sums over samples equal the written-out gradients, layer by layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expansion import assert_sums_match, by_vmap
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vsgd.torch.per_sample import Recorder, reduce


def label(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else ""


LAYERS = [
    (lambda: nn.Linear(7, 5), (6, 7)),
    (lambda: nn.Linear(7, 5, bias=False), (1, 7)),
    (lambda: nn.Linear(7, 5), (4, 3, 7)),
    (lambda: nn.Linear(7, 5), (4, 3, 2, 7)),
    (lambda: nn.Linear(1, 1), (3, 1)),
    (lambda: nn.Conv1d(4, 6, 3), (5, 4, 9)),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (5, 4, 12)),
    (lambda: nn.Conv1d(4, 4, 4, padding="same"), (5, 4, 9)),
    (lambda: nn.Conv2d(3, 4, 3), (5, 3, 6, 7)),
    (lambda: nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=2), (5, 4, 8, 9)),
    (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), (2, 6, 5, 5)),
    (lambda: nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), (3, 3, 6, 7)),
    (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 3, 6, 7)),
    (lambda: nn.LayerNorm(7), (6, 7)),
    (lambda: nn.LayerNorm((3, 7)), (6, 2, 3, 7)),
    (lambda: nn.LayerNorm(7, bias=False), (6, 3, 7)),
    (lambda: nn.RMSNorm(7), (6, 3, 7)),
    (lambda: nn.GroupNorm(2, 6), (5, 6)),
    (lambda: nn.GroupNorm(3, 6), (5, 6, 4, 3)),
    (lambda: nn.BatchNorm2d(6).eval(), (5, 6, 4, 3)),
    (lambda: nn.PReLU(4), (5, 4, 3)),
    (lambda: nn.Conv3d(2, 3, 2), (4, 2, 3, 4, 3)),
    (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2), (4, 3, 4, 4)),
]


def problem(make, shape):
    """A layer between two elementwise functions, and a loss that treats every output differently."""
    torch.manual_seed(1)
    model = make().double()
    for p in model.parameters():
        nn.init.normal_(p)
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        y = torch.randn_like(model(x))
    return model, x, y


@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:There is a performance drop")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("make", "shape"), LAYERS, ids=label)
def test_layer_equals_expansion(make, shape, reduction):
    model, x, y = problem(make, shape)
    assert_sums_match(Recorder(model), model, F.mse_loss, x, y, reduction=reduction, expand=by_vmap)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("tile", [1, 50])
@pytest.mark.parametrize(("make", "shape"), LAYERS[2:10:2], ids=label)
def test_tiles_of_any_size_add_up(make, shape, tile, monkeypatch):
    monkeypatch.setattr(reduce, "TILE", tile)
    model, x, y = problem(make, shape)
    assert_sums_match(Recorder(model), model, F.mse_loss, x, y, expand=by_vmap)


@settings(max_examples=15, deadline=None)
@given(
    samples=st.integers(1, 40),
    columns=st.integers(1, 300),
    rows=st.integers(1, 9),
    positions=st.integers(0, 3),
)
def test_linear_of_any_shape(samples, columns, rows, positions):
    shape = (samples, *([positions] if positions else []), columns)
    model, x, y = problem(lambda: nn.Linear(columns, rows), shape)
    assert_sums_match(Recorder(model), model, F.mse_loss, x, y, expand=by_vmap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_less_precise_parameters_are_as_right_as_they_can_be(dtype):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(300, 20), nn.Tanh(), nn.Linear(20, 4))
    x, y = torch.randn(64, 300), torch.randn(64, 4)
    sums = {}
    for kind in (dtype, torch.float64):
        twin = nn.Sequential(nn.Linear(300, 20), nn.Tanh(), nn.Linear(20, 4)).to(kind)
        twin.load_state_dict({name: value.to(dtype).to(kind) for name, value in model.state_dict().items()})
        recorder = Recorder(twin)
        with recorder.record() as here:
            F.mse_loss(twin(x.to(dtype).to(kind)), y.to(dtype).to(kind)).backward()
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1.25)
        with recorder.record() as there:
            F.mse_loss(twin(x.to(dtype).to(kind)), y.to(dtype).to(kind)).backward()
        found = recorder.sums(here, there)
        sums[kind] = [found[p] for p in twin.parameters()]
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    for got, want in zip(sums[dtype], sums[torch.float64], strict=True):
        for part, exact in zip(got[:3], want[:3], strict=True):
            assert part.dtype == torch.float32
            assert (part - exact).abs().max() <= tolerance * exact.max()
