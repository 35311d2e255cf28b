"""What a jitted step of the optax transformation costs: ratios to optax.adam, measured side by side, in turns.

The network is that of benchmarks/torch_step.py. A turn is ten steps, of which one takes a second gradient.

python benchmarks/optax_step.py
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import vsgd.optax
from vsgd import NETWORKS

TURNS, STEPS, WARM_UP = 12, 10, 20
SIZES, ROWS = (784, 1024, 1024, 10), 128
BAR = 1.5


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    *hidden, (weight, bias) = params
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    return optax.softmax_cross_entropy_with_integer_labels(x @ weight + bias, y).mean()


def new_params(key: jax.Array) -> Any:
    keys = jax.random.split(key, len(SIZES))
    pairs = zip(keys, itertools.pairwise(SIZES), strict=False)
    return [(jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b)) for k, (a, b) in pairs]


def task(tx: optax.GradientTransformation) -> Callable[[int], None]:
    """Takes some steps, each with a minibatch of its own, and waits for the last."""
    tx = optax.with_extra_args_support(tx)
    params = new_params(jax.random.key(0))
    state = tx.init(params)
    x = jax.random.normal(jax.random.key(1), (STEPS, ROWS, SIZES[0]))
    y = jax.random.randint(jax.random.key(2), (STEPS, ROWS), 0, SIZES[-1])

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
        def grad_fn(p: Any) -> Any:
            return jax.grad(loss)(p, x, y)

        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def run(steps: int) -> None:
        nonlocal params, state
        for k in range(steps):
            params, state = compiled(params, state, x[k % STEPS], y[k % STEPS])
        jax.block_until_ready(params)

    return run


def main() -> None:
    print(f"jax {jax.__version__}, optax {optax.__version__}, {jax.devices()[0].platform}, ", end="")
    print(f"MLP {'-'.join(map(str, SIZES))}, batch {ROWS}, {TURNS} turns of {STEPS} steps")
    tasks = {
        "optax.adam": task(optax.adam(1e-3)),
        "vsgd": task(vsgd.optax.vsgd()),
        "vsgd without a basis": task(vsgd.optax.vsgd(NETWORKS._replace(eigenbasis=False))),
    }
    for run in tasks.values():
        run(WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(TURNS):
        for name, run in tasks.items():
            started = time.perf_counter()
            run(STEPS)
            seconds[name].append((time.perf_counter() - started) / STEPS)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"  {name:<24}{1e3 * value:>9.2f} ms{value / medians['optax.adam']:>8.2f}x")
    print(f"the bar for the default is {BAR}x")


if __name__ == "__main__":
    main()
