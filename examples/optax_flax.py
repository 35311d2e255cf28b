"""Train a Flax (nnx) network with BatchNorm and Dropout on scikit-learn's digits with vsgd.optax, without tuning.

python examples/optax_flax.py
"""

from __future__ import annotations

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import vsgd.optax

EPOCHS, BATCH = 5, 64


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.filters = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(16 * 16, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(nnx.avg_pool(self.norm(self.filters(x)), (2, 2), (2, 2)))
        return self.out(self.dropout(nnx.relu(self.hidden(x.reshape(len(x), -1)))))


def main() -> float:
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    x_train, x_test, y_train, y_test = train_test_split(images, labels, random_state=0)
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, vsgd.optax.vsgd(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params):
            # Both evaluations use a copy: same random numbers and statistics, and the model is unchanged.
            network = nnx.merge(graph, params, rest, copy=True)
            value = optax.softmax_cross_entropy_with_integer_labels(network(x), y).mean()
            return value, nnx.state(network, nnx.Not(nnx.Param))

        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, new_rest), grads = gradient(params)
        optimizer.update(model, grads, grad_fn=lambda p: gradient(p)[1], value=value)
        nnx.update(model, new_rest)  # random numbers and BatchNorm statistics of the first evaluation only
        return value

    @nnx.jit
    def predict(model, optimizer, x):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        weights = vsgd.optax.eval_params(params, nnx.as_pure(optimizer.opt_state))
        network = nnx.merge(graph, weights, rest, copy=True)
        network.eval()
        return network(x).argmax(1)

    rng = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        for rows in rng.permutation(len(x_train))[: len(x_train) // BATCH * BATCH].reshape(-1, BATCH):
            value = step(model, optimizer, x_train[rows], y_train[rows])
        accuracy = float((np.asarray(predict(model, optimizer, x_test)) == y_test).mean())
        print(f"epoch {epoch + 1}: loss of the last batch {value:.3f}, accuracy on held-out digits {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
