"""Accelerate: a closure passes through a prepared optimizer, and no batch is dropped silently."""

from __future__ import annotations

import copy
from functools import partial
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vsgd.torch import VSGD, is_probing


@pytest.fixture(autouse=True)
def no_accelerator_is_left():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(160, 6)
    return model, DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8)


def train(model, opt, batches, backward, micro_batches=1):
    def closure(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        backward(loss)
        return loss

    batches = iter(batches)
    while chunk := list(islice(batches, micro_batches)):
        opt.step([partial(closure, *batch) for batch in chunk])


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_run_equals_a_plain_loop(micro_batches):
    model, batches = problem()
    twin = copy.deepcopy(model)
    train(twin, VSGD(twin.parameters()), batches, torch.Tensor.backward, micro_batches)
    accelerator = Accelerator(cpu=True)
    model, opt, batches = accelerator.prepare(model, VSGD(model.parameters()), batches)
    train(model, opt, batches, accelerator.backward, micro_batches)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert opt.optimizer.info().skipped == 0
    assert opt.optimizer.param_groups[0]["samples"] == micro_batches


def test_bfloat16_and_the_state_of_a_run(tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, batches = problem()
    model, opt, batches = accelerator.prepare(model, VSGD(model.parameters()), batches)
    for _ in range(3):
        train(model, opt, batches, accelerator.backward)
    accelerator.save_state(tmp_path)
    train(model, opt, batches, accelerator.backward)
    through = copy.deepcopy(model.state_dict())
    accelerator.load_state(tmp_path)
    train(model, opt, batches, accelerator.backward)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in through.items())
    x, y = batches.dataset.tensors
    assert F.cross_entropy(model(x), y) < 0.3


def test_a_scaler_changes_nothing():
    """Use a scaler as with mixed_precision="fp16", which Accelerate allows on GPUs only."""
    model, batches = problem()
    twin = copy.deepcopy(model)
    train(twin, VSGD(twin.parameters()), batches, torch.Tensor.backward)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, opt = accelerator.prepare(model, VSGD(model.parameters()))
    for x, y in batches:
        opt.optimizer.minimize(lambda x=x, y=y: F.cross_entropy(model(x), y), scaler=accelerator.scaler)
        accelerator.scaler.update()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_loss_of_a_prepared_optimizer_is_last_loss(micro_batches):
    """Accelerate's `step` returns None."""
    accelerator = Accelerator(cpu=True)
    model, batches = problem()
    vsgd = VSGD(model.parameters())
    assert vsgd.last_loss is None
    model, opt, batches = accelerator.prepare(model, vsgd, batches)
    losses = []

    def closure(x, y):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if not is_probing():
            losses.append(loss.item())
        return loss

    batches = iter(batches)
    for _ in range(10):
        losses.clear()
        opt.step([partial(closure, *batch) for batch in islice(batches, micro_batches)])
        assert opt.optimizer.last_loss.item() == pytest.approx(sum(losses) / micro_batches)


def test_accumulate_is_refused_before_a_batch_is_lost():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, batches = problem()
    model, opt, batches = accelerator.prepare(model, VSGD(model.parameters()), batches)

    def usual(with_closure):
        for x, y in batches:
            with accelerator.accumulate(model):

                def closure(x=x, y=y):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    return loss

                opt.step(closure) if with_closure else (closure(), opt.step())
                opt.zero_grad()

    with pytest.raises(RuntimeError, match="accumulates over 4 batches"):
        usual(with_closure=True)
    with pytest.raises(TypeError, match=r"accelerator\.backward\(loss\) in the closure"):
        usual(with_closure=False)
