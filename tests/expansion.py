"""Reference for per-sample sums: compute and store the gradient of every sample."""

from __future__ import annotations

import torch
from torch.func import functional_call, grad, vmap


def by_vmap(model, loss, x, y):
    """Return {name: samples × parameter}, computed by torch.func."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def sample_loss(params, x, y):
        return loss(functional_call(model, params, (x[None],)), y[None])

    return vmap(grad(sample_loss), in_dims=(None, 0, 0))(params, x, y)


def by_loop(model, loss, x, y, axis=0):
    """Return the same with one backward pass per sample, for any model."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    params = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for j in range(x.shape[axis]):
        value = loss(model(x.narrow(axis, j, 1)), y.narrow(axis, j, 1))
        grads = torch.autograd.grad(value, params, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g.detach() for p, g in zip(params, grads, strict=True)])
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def sums_of(here, there):
    """Return Σg², Σ|g − g'| and Σ(g − g')² of each parameter."""
    return {
        name: (g.square().sum(0), (g - there[name]).abs().sum(0), (g - there[name]).square().sum(0))
        for name, g in here.items()
    }


def shift(model, seed=0):
    """Move the weights to another point."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=noise, dtype=p.dtype)


def assert_sums_match(recorder, model, loss, x, y, *, reduction="mean", expand=by_loop, rtol=1e-9, **options):
    """Record two gradients, and compare every sum with the reference."""

    def backward():
        model.zero_grad()
        value = loss(model(x), y)
        (value if reduction == "mean" else value * batch).backward()

    batch = x.shape[options.get("axis", 0)]
    with recorder.record() as here:
        backward()
    first = expand(model, loss, x, y, **options)
    shift(model)
    with recorder.record() as there:
        backward()
    expected = sums_of(first, expand(model, loss, x, y, **options))
    assert here.count == batch
    sums = recorder.sums(here, there, reduction=reduction)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(sums) == set(trainable.values())
    for name, param in trainable.items():
        for kind, got, want in zip(("grad_sq", "diff_abs", "diff_sq"), sums[param][:3], expected[name], strict=True):
            assert got.shape == param.shape
            assert torch.allclose(got, want, rtol=rtol, atol=rtol * float(want.max())), f"{kind} of {name}"
    alone = recorder.sums(here, None, reduction=reduction)
    for param in trainable.values():
        torch.testing.assert_close(alone[param].grad_sq, sums[param].grad_sq)
        assert alone[param].diff_abs is None
    return sums
