"""The opponents of `vsgd compare` are configured as their authors recommend."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sklearn")

from standins import BY_NAME
from torch import nn

from vsgd_bench.compare import networks
from vsgd_bench.compare.methods import Budget, Setting
from vsgd_bench.compare.muon import split_parameters
from vsgd_bench.compare.schedules import Scheduled, cosine, warm_up_updates
from vsgd_bench.compare.table import why_absent

UPDATES = 40
SCHEDULED = ["adamw-cosine", "momentum-cosine", "soap-cosine", "muon-cosine", "prodigy-cosine"]
INSTALLED = [name for name in SCHEDULED if why_absent(BY_NAME[name]) is None]


def convolutions():
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers)


def setting_of(method):
    return Setting(0.01, 0.01 if method.decays else None) if method.rates else method.default


def step_on(method, setting, model):
    """Return an optimizer after updates with one minibatch, and the losses."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 1, 8, 8), torch.randint(3, (8,))
    optimizer = method.make(model, setting, Budget(UPDATES, 8, 1))

    def closure():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return optimizer, [float(optimizer.step(closure).detach()) for _ in range(UPDATES)]


def test_a_schedule_rises_to_one_and_falls_to_zero():
    factor = cosine(200, warm_up_updates(200))
    factors = [factor(update) for update in range(201)]
    assert factors.index(1.0) == 10 == warm_up_updates(200)
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[0] > 0
    assert factors[199] > 0
    assert factors[200] == 0
    assert factor(300) == 0
    assert cosine(100)(0) == 1


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_the_shortest_runs_have_a_schedule_too(updates):
    factor = cosine(updates, warm_up_updates(updates))
    assert all(0 < factor(update) <= 1 for update in range(updates))
    assert factor(updates) == 0


@pytest.mark.parametrize("name", INSTALLED)
def test_the_learning_rate_is_zero_after_the_last_update(name):
    optimizer, losses = step_on(BY_NAME[name], setting_of(BY_NAME[name]), convolutions())
    assert isinstance(optimizer, Scheduled)
    assert losses[-1] < losses[0]
    assert all(group["lr"] == 0 for each in optimizer.optimizers for group in each.param_groups)


@pytest.mark.parametrize(
    ("model", "hidden"),
    [
        (networks.mlp(6, 4, 3), []),
        (networks.mlp(6, 5, 4, 3), ["3.weight"]),
        (networks.cnn(normalize=True), ["4.weight"]),
        (networks.CharLSTM(7, 8), ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]),
        (nn.Sequential(nn.GRU(3, 4), nn.Linear(4, 2)), ["0.weight_hh_l0"]),
        (networks.WordBag(9, 3, sparse=False), ["read.0.weight"]),
        (
            networks.CharTransformer(7, 5, width=8, depth=1),
            [f"blocks.0.{n}.weight" for n in ("linear1", "linear2", "self_attn.out_proj")]
            + ["blocks.0.self_attn.in_proj_weight"],
        ),
        (networks.Point(torch.eye(2)), []),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_muon_gets_hidden_matrices_and_adamw_everything_else(model, hidden):
    split = split_parameters(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert sorted(names[parameter] for parameter in split.hidden) == sorted(hidden)
    assert sorted(names[parameter] for parameter in (*split.hidden, *split.other)) == sorted(names.values())


def test_frozen_parameters_are_nobodys():
    model = networks.mlp(6, 5, 4, 3)
    model[3].weight.requires_grad_(False)
    split = split_parameters(model)
    assert not split.hidden
    assert len(split.other) == len(list(model.parameters())) - 1


def test_muon_moves_filters_by_matrices_that_share_their_memory():
    model = convolutions()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, _ = step_on(BY_NAME["muon-cosine"], Setting(0.01, 0.01), model)
    adamw, muon = optimizer.optimizers
    (matrix,) = muon.param_groups[0]["params"]
    assert matrix.shape == (4, 36)
    assert matrix.data_ptr() == model[3].weight.data_ptr()
    assert len(adamw.param_groups[0]["params"]) == len(before) - 1
    assert all((parameter != before[name]).any() for name, parameter in model.named_parameters())


def test_schedule_free_receives_warm_up_steps():
    name = "schedulefree-adamw-warmup"
    if why_absent(BY_NAME[name]):
        pytest.skip("schedulefree is not installed")
    optimizer = BY_NAME[name].make(convolutions(), Setting(), Budget(200, 8, 1))
    assert optimizer.param_groups[0]["warmup_steps"] == 10


@pytest.mark.parametrize("name", ["adamw-cosine", "soap-cosine", "muon-cosine"])
def test_weight_decay_is_a_setting(name):
    if why_absent(BY_NAME[name]):
        pytest.skip("its package is not installed")
    optimizer = BY_NAME[name].make(convolutions(), Setting(0.01, 0.1), Budget(200, 8, 1))
    assert {group["weight_decay"] for each in optimizer.optimizers for group in each.param_groups} == {0.1}


def test_averaged_weights_of_adamw_lag_behind_its_weights():
    method, model = BY_NAME["adamw-ema"], convolutions()
    optimizer, _ = step_on(method, method.default, model)
    with method.evaluation_model(optimizer, model) as average:
        assert average is not model
        assert any((a != b).any() for a, b in zip(average.parameters(), model.parameters(), strict=True))
