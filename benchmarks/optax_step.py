"""Measure steps of the optax transformation: ratios of step time and compile time to optax.adam.

Tasks alternate in one process, and the minimum of each is reported. A turn is ten steps, one of which has a second
gradient. Compile time is process time. Each compilation is that of a new function, from tracing to the executable.

    python benchmarks/optax_step.py [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import vsgd.optax
from vsgd import NETWORKS

STEPS, WARM_UP = 10, 20
BASELINE = "optax.adam"
METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    BASELINE: lambda: optax.adam(1e-3),
    "vsgd": vsgd.optax.vsgd,
    "vsgd(steps_per_epoch=100)": lambda: vsgd.optax.vsgd(steps_per_epoch=100),
    "vsgd without a basis": lambda: vsgd.optax.vsgd(NETWORKS._replace(eigenbasis=False)),
}


class Network(NamedTuple):
    """A network and the minibatches of a turn."""

    title: str
    params: Any
    apply: Callable[[Any, jax.Array], jax.Array]
    """(params, x) → logits."""
    x: jax.Array
    """Inputs of the minibatches; the first axis is the step."""
    y: jax.Array
    """Labels of each minibatch."""


def normal(seed: int, *shape: int) -> jax.Array:
    """Return initial weights for a matrix of inputs × outputs."""
    return jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5


def mlp(sizes: tuple[int, ...] = (784, 1024, 1024, 10), rows: int = 128) -> Network:
    """Return the network of benchmarks/torch_step.py."""

    def apply(params: Any, x: jax.Array) -> jax.Array:
        *hidden, (weight, bias) = params
        for w, b in hidden:
            x = jax.nn.relu(x @ w + b)
        return x @ weight + bias

    params = [(normal(k, a, b), jnp.zeros(b)) for k, (a, b) in enumerate(itertools.pairwise(sizes))]
    x = jax.random.normal(jax.random.key(10), (STEPS, rows, sizes[0]))
    y = jax.random.randint(jax.random.key(11), (STEPS, rows), 0, sizes[-1])
    return Network(f"MLP {'-'.join(map(str, sizes))}, batch {rows}", params, apply, x, y)


def transformer(width: int = 64, heads: int = 4, tokens: int = 32, rows: int = 16, classes: int = 32) -> Network:
    """Return a transformer block with normalization before attention and MLP, and a linear layer of logits."""

    def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jax.nn.standardize(x) * scale

    def apply(p: Any, x: jax.Array) -> jax.Array:
        h = normalized(x, p["attention_scale"])
        query, key, value = (
            (h @ p[name]).reshape(*h.shape[:2], heads, width // heads) for name in ("query", "key", "value")
        )
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + attended.reshape(h.shape) @ p["out"]
        h = normalized(x, p["mlp_scale"])
        x = x + jax.nn.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
        return x @ p["logits"]

    params = {name: normal(k, width, width) for k, name in enumerate(("query", "key", "value", "out"))} | {
        "up": normal(4, width, 4 * width),
        "up_bias": jnp.zeros(4 * width),
        "down": normal(5, 4 * width, width),
        "down_bias": jnp.zeros(width),
        "logits": normal(6, width, classes),
        "attention_scale": jnp.ones(width),
        "mlp_scale": jnp.ones(width),
    }
    x = jax.random.normal(jax.random.key(10), (STEPS, rows, tokens, width))
    y = jax.random.randint(jax.random.key(11), (STEPS, rows, tokens), 0, classes)
    return Network(f"transformer block of width {width}, {rows} x {tokens} tokens", params, apply, x, y)


class Task:
    """Training of a network with an optimizer."""

    def __init__(self, network: Network, method: Callable[[], optax.GradientTransformation]) -> None:
        self._network, self._method = network, method
        self._params = jax.tree.map(jnp.copy, network.params)
        self._state = optax.with_extra_args_support(method()).init(self._params)
        self._step: Any = None

    def compile(self) -> float:
        """Compile the step. Return the seconds of process time."""
        # new functions, because JAX caches compiled functions
        tx, network = optax.with_extra_args_support(self._method()), self._network

        def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(network.apply(params, x), y).mean()

        def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
            value, grads = jax.value_and_grad(loss)(params, x, y)
            grad_fn = lambda p: jax.grad(loss)(p, x, y)  # noqa: E731
            updates, state = tx.update(grads, state, params, grad_fn=grad_fn, value=value)
            return optax.apply_updates(params, updates), state

        started = time.process_time()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(self._params, self._state, network.x[0], network.y[0])
        self._step = lowered.compile()
        return time.process_time() - started

    def run(self, steps: int = STEPS) -> float:
        """Take steps with different minibatches. Return the seconds per step."""
        minibatches = [(self._network.x[k % STEPS], self._network.y[k % STEPS]) for k in range(steps)]
        jax.block_until_ready(minibatches)
        started = time.perf_counter()
        for x, y in minibatches:
            self._params, self._state = self._step(self._params, self._state, x, y)
        jax.block_until_ready((self._params, self._state))
        return (time.perf_counter() - started) / steps


def compare(network: Network, turns: int, compilations: int) -> None:
    """Print the ratios for one network."""
    tasks = {name: Task(network, method) for name, method in METHODS.items()}
    compiled: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(compilations):
        for name, task in tasks.items():
            compiled[name].append(task.compile())
    for task in tasks.values():
        task.run(WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(turns):
        for name, task in tasks.items():
            seconds[name].append(task.run())
    print(f"\n{network.title}\n  {'':<28}{'step':>10}{'ratio':>8}{'compile':>12}{'ratio':>8}")
    for name in tasks:
        step, compilation = min(seconds[name]), min(compiled[name])
        ratios = step / min(seconds[BASELINE]), compilation / min(compiled[BASELINE])
        print(f"  {name:<28}{1e3 * step:>7.2f} ms{ratios[0]:>8.2f}{compilation:>10.2f} s{ratios[1]:>8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few turns, one compilation")
    turns, compilations = (3, 1) if parser.parse_args().quick else (12, 3)
    print(f"jax {jax.__version__}, optax {optax.__version__}, {jax.devices()[0].platform}; ", end="")
    print(f"minimum of {turns} turns of {STEPS} steps and of {compilations} compilations; ratios to {BASELINE}")
    for network in (mlp(), transformer()):
        compare(network, turns, compilations)


if __name__ == "__main__":
    main()
