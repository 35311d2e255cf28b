"""Train an Equinox network on scikit-learn's digits with vsgd.optax, without tuning.

python examples/optax_equinox.py
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import vsgd.optax

EPOCHS, BATCH = 10, 64


def main() -> float:
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x.astype(np.float32) / 16, y, random_state=0)
    model = eqx.nn.MLP(64, 10, 32, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def logits(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    tx = vsgd.optax.vsgd()
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        def loss(p):
            return optax.softmax_cross_entropy_with_integer_labels(logits(p, x), y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, grad_fn=jax.grad(loss), value=value)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        for rows in rng.permutation(len(x_train))[: len(x_train) // BATCH * BATCH].reshape(-1, BATCH):
            params, state, value = step(params, state, x_train[rows], y_train[rows])
        weights = vsgd.optax.eval_params(params, state)
        accuracy = float(jnp.mean(logits(weights, x_test).argmax(1) == y_test))
        print(f"epoch {epoch + 1}: loss of the last batch {value:.3f}, accuracy on held-out digits {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
