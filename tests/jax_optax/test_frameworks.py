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
from steps import batches, new_params, squared_error, step_of

import vsgd.optax

ROOT = Path(__file__).parents[2]


def run(path: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, path], env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
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


def test_the_example_in_the_documentation():
    text = (ROOT / "docs" / "integrations.md").read_text().split("## JAX and optax")[1]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    names: dict[str, object] = {}
    exec(compile(code, "docs/integrations.md", "exec"), names)
    assert names["error"] < 0.1
