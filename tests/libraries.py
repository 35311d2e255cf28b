"""The array libraries that the algorithms run on.

Each returns how a number is put into an array of one element, how it is taken out, and how a function is made ready.
"""

from __future__ import annotations

import numpy as np
import pytest

from vsgd.jit import compiled


def plainly(function, config):
    """The function as it is; `config` is the position of its constants, which JAX has to know."""
    return function


def on_floats():
    return float, float, plainly


def on_numpy():
    return lambda x: np.array([x]), lambda x: float(x[0]), plainly


def on_numba():
    return float, float, lambda function, config: compiled(function)


def on_torch():
    torch = pytest.importorskip("torch")
    return lambda x: torch.tensor([x], dtype=torch.float64), lambda x: float(x[0]), plainly


def on_jax():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    return (
        lambda x: jax.numpy.array([x], dtype=float),
        lambda x: float(x[0]),
        lambda function, config: jax.jit(function, static_argnums=config),
    )


LIBRARIES = [on_floats, on_numpy, on_numba, on_torch, on_jax]
