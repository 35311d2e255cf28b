"""The array libraries that the algorithms run on.

Each returns three functions: from a list of numbers to an array, from an array to a list, and a compiler.
"""

from __future__ import annotations

import numpy as np
import pytest

from vsgd.jit import compiled


def plainly(function, config):
    """Return the function itself. `config` is the position of its constants, which JAX needs."""
    return function


def scalars(made):
    return lambda numbers: float(*numbers), lambda x: [float(x)], made


def on_floats():
    return scalars(plainly)


def on_numba():
    return scalars(lambda function, config: compiled(function))


def on_numpy():
    return np.array, lambda x: x.tolist(), plainly


def on_torch():
    torch = pytest.importorskip("torch")
    return lambda numbers: torch.tensor(numbers, dtype=torch.float64), lambda x: x.tolist(), plainly


def on_jax():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    return (
        lambda numbers: jax.numpy.array(np.array(numbers)),
        lambda x: x.tolist(),
        lambda function, config: jax.jit(function, static_argnums=config),
    )


SCALARS = [on_floats, on_numba]
ARRAYS = [on_numpy, on_torch, on_jax]
