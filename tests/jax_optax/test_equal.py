"""The transformation equals the paper as scalar loops, and the PyTorch optimizer with the same probes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import torch
from steps import batches, flat, new_params, squared_error
from torch import nn

import vsgd
import vsgd.optax
from vsgd import NETWORKS, PAPER
from vsgd.algorithms import networks
from vsgd.algorithms.strategy import Totals, probe_seed
from vsgd.optax.int64 import Int64
from vsgd.torch import VSGD


def distance(values, track):
    """Of two points, relative to the second."""
    return np.linalg.norm(values - track) / np.linalg.norm(track)


# --- the paper ----------------------------------------------------------------------------------------------------

SIZES, ROWS, STEPS = (3, 4, 2), 12, 200


def absolute_error(params, batch):
    x, y = batch
    (w, b), (v, c) = params
    return jnp.abs(jax.nn.relu(x @ w.T + b) @ v.T + c - y).mean()  # kinks in the loss, and in the network


def reference_track(split):
    """Algorithm 1 for every coordinate of the network. `split` makes samples of a minibatch."""
    params = new_params(SIZES, np.float64)
    _, structure = jax.tree.flatten(params)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    coordinates = [reference.Coordinate(value) for value in flat(params)]

    @jax.jit
    def gradient(values, batch):
        ends = np.cumsum([np.prod(shape) for shape in shapes])[:-1]
        leaves = [part.reshape(shape) for part, shape in zip(jnp.split(values, ends), shapes, strict=True)]
        grads = jax.grad(absolute_error)(structure.unflatten(leaves), batch)
        return jnp.concatenate([grad.ravel() for grad in jax.tree.leaves(grads)])

    for batch in batches(STEPS, SIZES, ROWS, np.float64):
        parts = split(batch)
        theta = np.array([c.theta for c in coordinates])
        here = np.array([gradient(theta, part) for part in parts]).T.tolist()
        delta = np.array([c.delta(grads) for c, grads in zip(coordinates, here, strict=True)])
        there = np.array([gradient(theta + delta, part) for part in parts]).T.tolist()
        for c, d, before, after in zip(coordinates, delta.tolist(), here, there, strict=True):
            c.observe(before, [abs((a - b) / d) for a, b in zip(before, after, strict=True)])
        yield np.array([c.theta for c in coordinates])


def whole(batch):
    return [batch]


def one_by_one(batch):
    x, y = batch
    return [(x[k : k + 1], y[k : k + 1]) for k in range(len(x))]


@pytest.mark.parametrize("split", [pytest.param(whole, marks=pytest.mark.slow), one_by_one])
def test_steps_equal_the_reference(split):
    with jax.enable_x64(True):
        tx = vsgd.optax.vsgd(PAPER)
        params = new_params(SIZES, np.float64)
        state = tx.init(params)
        samples = vsgd.optax.per_sample(absolute_error, chunk=5)  # of 12: two chunks and a rest

        @jax.jit
        def step(params, state, batch):
            grad_fn = samples(batch) if split is one_by_one else lambda p: jax.grad(absolute_error)(p, batch)
            updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
            return optax.apply_updates(params, updates), state

        for batch, expected in zip(batches(STEPS, SIZES, ROWS, np.float64), reference_track(split), strict=True):
            params, state = step(params, state, batch)
            assert distance(flat(params), expected) < 1e-12
        assert vsgd.optax.eval_params(params, state) is params
        assert distance(flat(params), flat(new_params(SIZES, np.float64))) > 0.1


# --- torch --------------------------------------------------------------------------------------------------------


def test_random_signs_are_those_of_torch():
    index = np.arange(1000)
    for step, place in ((0, 0), (3, 1), (12345, 7), (2**31 - 1, 99 + (5 << 20))):
        expected = networks.random_bit(torch.from_numpy(index), probe_seed(step, place))
        seed = probe_seed(Int64.of(jnp.int32(step)), place)
        bits = networks.random_bit(Int64.of(jnp.asarray(index, jnp.uint32)), seed).low
        np.testing.assert_array_equal(bits, expected.numpy())


def torch_network(params):
    layers = []
    for w, b in params:
        layer = nn.Linear(w.shape[1], w.shape[0]).to(torch.from_numpy(np.array(w)).dtype)
        layer.weight.data, layer.bias.data = torch.from_numpy(np.array(w)), torch.from_numpy(np.array(b))
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def torch_track(params, data, algorithm, rows_are_samples, **decay):
    """Weights to evaluate after each step, and how many operations a gradient was found to take."""
    model = torch_network(params)
    per_sample = model if rows_are_samples else None
    opt = VSGD(model.parameters(), algorithm=algorithm, per_sample=per_sample, **decay)
    track = []
    for x, y in data:
        opt.minimize(lambda x=x, y=y: (model(torch.from_numpy(x)) - torch.from_numpy(y)).square().mean())
        track.append(np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()]))
    return track, opt.param_groups[0]["gradient_flops"]


CASES = {
    "float32, no basis": (np.float32, (8, 12, 6), False, 40, {}),
    # rounding grows in the eigenvectors of small eigenvalues, and those of eigenvalue zero are rounding alone
    "float32": (np.float32, (4, 4, 4), True, 15, {"weight_decay": 1.0}),
    "float64": (
        np.float64,
        (8, 12, 6),
        True,
        60,
        {"weight_decay": 1.0, "steps_per_epoch": 3},
    ),  # the former replaces the latter
    "float64, leading directions": (np.float64, (128, 256, 3), True, 12, {"steps_per_epoch": 2.5}),
    "float64, estimated decay": (np.float64, (8, 12, 6), True, 60, {"steps_per_epoch": 3}),
}
FAST = "float32", "float64, estimated decay"


@pytest.mark.parametrize(
    "rows_are_samples", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["minibatch", "samples"]
)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in FAST)) for case in CASES])
def test_steps_equal_those_of_torch(case, rows_are_samples):
    dtype, sizes, eigenbasis, steps, decay = CASES[case]
    algorithm = NETWORKS._replace(eigenbasis=eigenbasis)
    with jax.enable_x64(dtype == np.float64):
        params = start = new_params(sizes, dtype)
        track, flops = torch_track(params, batches(steps, sizes, dtype=dtype), algorithm, rows_are_samples, **decay)
        tx = vsgd.optax.vsgd(algorithm, gradient_flops=flops, **decay)
        state = tx.init(params)
        samples = vsgd.optax.per_sample(squared_error)

        @jax.jit
        def step(params, state, batch):
            grad_fn = samples(batch) if rows_are_samples else lambda p: jax.grad(squared_error)(p, batch)
            loss = squared_error(params, batch)
            updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn, value=loss)
            return optax.apply_updates(params, updates), state

        errors = []
        for batch, expected in zip(batches(steps, sizes, dtype=dtype), track, strict=True):
            params, state = step(params, state, batch)
            errors.append(distance(flat(vsgd.optax.eval_params(params, state)), expected))

        assert max(errors) < 1e-5
        assert distance(track[-1], flat(start)) > 0.05
        assert any((Totals(*totals).momentum > 0).any() for totals in state.totals)
        sides = [leaf.shape for leaf in jax.tree.leaves([(basis.left, basis.right) for basis in state.basis])]
        assert any(shape[-1] > 1 for shape in sides) == eigenbasis
        assert any(shape[0] != shape[1] for shape in sides) == ("leading" in case)
