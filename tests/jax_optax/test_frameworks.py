"""Several devices, checkpoints, and the examples with Flax and Equinox."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx
from processes import TIMEOUT
from steps import batches, new_params, squared_error, step_of

import vsgd.optax

ROOT = Path(__file__).parents[2]


def run(path: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, path], env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_four_devices_equal_one():
    flags = "--xla_force_host_platform_device_count=4"
    # in float64: eigenvectors of eigenvalue zero are rounding, of which there is little
    assert float(run(Path(__file__).with_name("sharded.py"), XLA_FLAGS=flags, JAX_PLATFORMS="cpu")) < 1e-6


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_resumes_to_the_bit(tmp_path):
    sizes = (6, 8, 3)
    tx = vsgd.optax.vsgd()
    params = new_params(sizes)
    state, step = tx.init(params), step_of(tx, squared_error)
    data = list(batches(24, sizes))
    for batch in data[:12]:
        params, state = step(params, state, batch)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", (params, state))
        checkpointer.wait_until_finished()
        fresh = new_params(sizes, seed=9)
        restored = checkpointer.restore(tmp_path / "saved", (fresh, tx.init(fresh)))
    jax.tree.map(np.testing.assert_array_equal, restored, (params, state))
    ends = []
    for params, state in ((params, state), restored):  # noqa: B020
        for batch in data[12:]:
            params, state = step(params, state, batch)
        ends.append((params, state))
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optax_equinox.py", "optax_flax.py"])
def test_examples(name):
    lines = run(ROOT / "examples" / name, JAX_PLATFORMS="cpu").splitlines()
    assert float(re.search(r"accuracy on held-out digits ([\d.]+)$", lines[-1])[1]) > 0.93


def test_flax_layers_with_state_change_once_per_step():
    """Both evaluations of a probe start from the state before the step; only the first one of the step is stored."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.out = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(self.dropout(self.norm(x)))

    model, once = Network(nnx.Rngs(0)), Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, vsgd.optax.vsgd(), wrt=nnx.Param)
    x = 3 + jax.random.normal(jax.random.key(1), (16, 4))
    seen = []

    @nnx.jit
    def step(model, optimizer, x):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params):
            network = nnx.merge(graph, params, rest, copy=True)
            hidden = network.dropout(network.norm(x))
            jax.debug.callback(lambda zeros: seen.append(np.asarray(zeros)), hidden == 0)
            return (network.out(hidden) ** 2).mean(), nnx.state(network, nnx.Not(nnx.Param))

        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, new_rest), grads = gradient(params)
        optimizer.update(model, grads, grad_fn=lambda p: gradient(p)[1], value=value)
        nnx.update(model, new_rest)

    before = jax.tree.leaves(nnx.state(model, nnx.Param))
    step(model, optimizer, x)
    jax.effects_barrier()
    once(x)
    assert len(seen) == 3, "the gradient, and two for the curvature"
    assert all((mask == seen[0]).all() for mask in seen)
    stored, expected = (nnx.state(network, nnx.Not(nnx.Param)) for network in (model, once))
    as_numbers = [
        [
            np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
            for x in leaves
        ]
        for leaves in (jax.tree.leaves(stored), jax.tree.leaves(expected))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *as_numbers)
    for _ in range(4):
        step(model, optimizer, x)
    after = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(before, after, strict=True))
