"""Sparse gradients: only rows that were touched are read or written, each with its own count."""

from __future__ import annotations

import pytest
import torch
from closures import closure_of
from torch import nn

import vsgd
from vsgd.torch import VSGD, Rows, coordinates, engine_numba, engine_torch, loops

ROWS, WIDTH = 9, 3


def lookups(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS - 2, (6, 2), generator=generator)  # the last two rows are never looked up


def table_of(module: nn.Module, index: torch.Tensor) -> torch.Tensor:
    return module(index).flatten(1).sum(1) if isinstance(module, nn.Embedding) else module(index).sum(1)


def closure_for(module: nn.Module, opt: VSGD, step: int):
    index = lookups(step)
    target = index.sum(1).to(module.weight.dtype)

    return closure_of(opt, lambda: (table_of(module, index) - target).abs().mean())


def by_hand(weight: torch.Tensor, gradients, steps: int) -> torch.Tensor:
    """The rule on whole tensors with a count per row. `gradients(weight, step)` gives one gradient a sample."""
    theta = weight.clone()
    state = vsgd.init(theta)

    def mean(values, count):
        return values.sum(0) / count.clamp(min=1)

    for step in range(steps):
        grads, touched = gradients(theta, step)
        count = touched.sum(0)[:, None].to(theta.dtype)
        delta = vsgd.probe(state, mean(grads, count), count)
        delta = (theta + delta * (count > 0)) - theta  # rows that no sample touches stay where they are
        shifted, _ = gradients(theta + delta, step)
        reach = delta.abs() + (delta == 0)
        curvs = (grads - shifted).abs() / reach
        batch = vsgd.Moments(*(mean(values, count) for values in (grads, grads**2, curvs, curvs**2)))
        theta, state, _ = vsgd.step(theta, state, batch, count)
    return theta


def sample_gradients(theta: torch.Tensor, step: int, each: bool):
    index = lookups(step)
    target = index.sum(1).to(theta.dtype)
    theta = theta.clone().requires_grad_()
    losses = (theta[index].flatten(1).sum(1) - target).abs()
    parts = list(losses) if each else [losses.mean()]
    grads = torch.stack([torch.autograd.grad(part, theta, retain_graph=True)[0] for part in parts])
    rows = [index[j : j + 1] if each else index for j in range(len(parts))]
    touched = torch.stack([torch.isin(torch.arange(ROWS), row) for row in rows])
    return grads, touched


@pytest.mark.parametrize("each", [False, True], ids=["minibatch", "samples"])
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_equals_the_rule_row_by_row(layer, each):
    torch.manual_seed(0)
    options = {"mode": "sum"} if layer is nn.EmbeddingBag else {}
    module = layer(ROWS, WIDTH, sparse=True, dtype=torch.float64, **options)
    start = module.weight.detach().clone()
    opt = VSGD(module.parameters(), per_sample=module if each else None, algorithm=vsgd.PAPER)
    steps = 60
    for step in range(steps):
        opt.step(closure_for(module, opt, step))
    expected = by_hand(start, lambda theta, step: sample_gradients(theta, step, each), steps)
    torch.testing.assert_close(module.weight.detach(), expected, rtol=1e-8, atol=1e-9)
    assert torch.equal(module.weight[-2:], start[-2:])
    assert opt.state[module.weight]["seen"][-2:].tolist() == [0, 0]


def test_dense_tables_count_their_rows_too():
    """With each row of the minibatch as a sample, sparse=True is a matter of speed only to the paper's rule."""
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        module = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.float64)
        opt = VSGD(module.parameters(), per_sample=module, algorithm=vsgd.PAPER)
        for step in range(40):
            opt.step(closure_for(module, opt, step))
        results.append((module.weight.detach(), opt.state[module.weight]["seen"]))
    torch.testing.assert_close(*results)


def test_micro_batches_that_touch_different_rows():
    torch.manual_seed(0)
    module = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    opt = VSGD(module.parameters(), algorithm=vsgd.PAPER)
    start = module.weight.detach().clone()
    for step in range(0, 60, 2):
        opt.step([closure_for(module, opt, step), closure_for(module, opt, step + 1)])
    assert torch.equal(module.weight[-2:], start[-2:])
    touched = torch.zeros(ROWS)
    for step in range(60):
        touched[lookups(step).unique()] += 1
    torch.testing.assert_close(opt.state[module.weight]["seen"].float(), touched)


@pytest.mark.filterwarnings("ignore:all micro-batches have exactly the same")
@pytest.mark.parametrize("kind", ["minibatch", "micro-batches", "per sample"])
def test_curvature_of_a_row_has_a_sign(kind):
    torch.manual_seed(0)
    module = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    opt = VSGD(module.parameters(), per_sample=Rows(module, reduction="sum") if kind == "per sample" else None)
    curvature = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)

    closure = closure_of(opt, lambda: (module(torch.tensor([4])).square() * curvature / 2).sum())

    for _ in range(3):
        opt.step([closure] * 2 if kind == "micro-batches" else closure)
    torch.testing.assert_close(opt.state[module.weight]["curv"][4], curvature)


def rows_of(sparse: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, padding_idx=0, sparse=sparse), nn.Linear(WIDTH, 1))


@pytest.mark.parametrize("steps_before", [0, 8])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_minibatch_of_padding_touches_no_row(sparse, steps_before):
    model = rows_of(sparse)
    opt = VSGD(model.parameters(), per_sample=model)
    for step in range(steps_before + 12):
        index = torch.tensor([1, 2, 3, 0]) if step < steps_before else torch.zeros(4, dtype=torch.long)
        if step == steps_before:
            before = model[0].weight.detach().clone()
        opt.minimize(lambda index=index: (model(index) - 1).square().mean())
    assert torch.equal(model[0].weight, before)
    assert opt.param_groups[0]["steps"] == steps_before + 12


@pytest.mark.parametrize("steps_before", [0, 8])
def test_a_minibatch_without_a_lookup_is_a_step(steps_before):
    bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
    opt = VSGD(bag.parameters())
    for step in range(steps_before + 2):
        index = torch.tensor([1, 2, 4] if step < steps_before else [], dtype=torch.long)
        opt.minimize(lambda index=index: (bag(index, torch.tensor([0, len(index)])) - 1).square().mean())
    assert opt.param_groups[0]["steps"] == steps_before + 2


def test_a_table_of_one_row_is_a_vector():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    opt = VSGD(model.parameters(), per_sample=model)
    losses = [
        float(opt.minimize(lambda: (model(torch.zeros(4, dtype=torch.long)) - 3).square().mean()).detach())
        for _ in range(30)
    ]
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize("sampling", ["minibatch", "rows", "micro-batches"])
def test_no_step_makes_the_gradient_of_a_table_dense(sampling, monkeypatch):
    def refuse(grad, *_, **__):
        raise AssertionError(f"a gradient of shape {tuple(grad.shape)} was made dense")

    monkeypatch.setattr(torch.Tensor, "to_dense", refuse)
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    opt = VSGD(table.parameters(), per_sample=table if sampling == "rows" else None)
    for step in range(4):
        opt.step([closure_for(table, opt, step)] * (2 if sampling == "micro-batches" and step else 1))
    assert opt.param_groups[0]["steps"] == 4


def test_a_closure_that_looks_up_other_rows_in_each_call_is_refused():
    table, calls = nn.Embedding(ROWS, WIDTH, sparse=True), []
    nn.init.ones_(table.weight)
    opt = VSGD(table.parameters())

    def loss():
        calls.append(0)
        return table(torch.tensor([len(calls) % ROWS])).sum()

    with pytest.raises(RuntimeError, match="does not compute the same gradient twice"):
        opt.minimize(loss)


def test_caches_do_not_grow_with_the_number_of_touched_rows():
    table = nn.Embedding(40, WIDTH, sparse=True)
    opt = VSGD(table.parameters())
    caches = [each for module in (coordinates, engine_numba, engine_torch, loops) for each in vars(module).values()]
    caches = [each for each in caches if hasattr(each, "cache_info")]

    def sizes(rows):
        for count in rows:
            opt.minimize(lambda count=count: table(torch.arange(count)).square().sum())
        return [each.cache_info().currsize for each in caches]

    assert sizes(range(2, 8)) == sizes(range(8, 30))
