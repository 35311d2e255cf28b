"""Trains on four virtual devices and on one, and prints how far the ends are apart. Run by test_frameworks.py."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from steps import batches, flat, new_params, squared_error, step_of

import vsgd.optax

SIZES = (8, 12, 4)


def train(mesh: Mesh | None) -> np.ndarray:
    tx = vsgd.optax.vsgd()
    params = new_params(SIZES, np.float64)
    if mesh is not None:  # outputs of every layer are divided among the devices
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec("x")))
    state, step = tx.init(params), step_of(tx, squared_error)
    for batch in batches(25, SIZES, dtype=np.float64):
        if mesh is not None:
            batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("x")))
            assert len(batch[0].sharding.device_set) == len(params[0][0].sharding.device_set) == 4
        params, state = step(params, state, batch)
    return flat(vsgd.optax.eval_params(params, state))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    one, four = train(None), train(Mesh(np.array(jax.devices()), ("x",)))
    print(np.linalg.norm(four - one) / np.linalg.norm(one))
