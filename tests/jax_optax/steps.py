"""Small problems, and training as a user of optax writes it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax


def network(params, x):
    """Dense layers with weights of outputs × inputs, as torch has them."""
    *hidden, (weight, bias) = params
    for w, b in hidden:
        x = jnp.tanh(x @ w.T + b)
    return x @ weight.T + bias


def squared_error(params, batch):
    x, y = batch
    return jnp.mean((network(params, x) - y) ** 2)


def new_params(sizes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (jnp.asarray(rng.standard_normal((b, a)) / a**0.5, dtype), jnp.asarray(0.1 * rng.standard_normal(b), dtype))
        for a, b in itertools.pairwise(sizes)
    ]


def batches(steps, sizes, rows=32, dtype=np.float32, seed=1):
    rng = np.random.default_rng(seed)
    solution = rng.standard_normal((sizes[0], sizes[-1]))
    for _ in range(steps):
        x = rng.standard_normal((rows, sizes[0]))
        yield x.astype(dtype), (x @ solution + 0.5 * rng.standard_normal((rows, sizes[-1]))).astype(dtype)


def step_of(tx, loss):
    """A step as it is in the documentation, jitted."""

    @jax.jit
    def step(params, state, batch):
        def grad_fn(p):
            return jax.grad(loss)(p, batch)

        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    return step


def flat(params):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)])
