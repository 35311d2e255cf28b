"""The transformation: `init`, `update` and the parameters to evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from vsgd.algorithms.base import require
from vsgd.algorithms.networks import NETWORKS, Averaging, Networks, Progress
from vsgd.algorithms.paper import Paper
from vsgd.core import Moments, ema
from vsgd.eigenbasis import Basis
from vsgd.optax.checks import check_arguments, check_parameters
from vsgd.optax.coordinates import Tensor, new_basis, plan
from vsgd.optax.samples import GradFn, Params, explained_masks, is_masked
from vsgd.optax.step import State, curvature_dtype, take_step
from vsgd.tensors import Config, Totals, averages_iterates


def vsgd(
    algorithm: Config = NETWORKS, *, weight_decay: float = 0.0, seed: int = 0, gradient_flops: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Stochastic gradient descent whose rates set themselves, one for each coordinate (Schaul & LeCun 2013).

    `update(grads, state, params, grad_fn=...)` takes a function that returns the gradient of the same minibatch at
    other parameters. It is called where a second gradient is due, in about a tenth of the steps. With a `grad_fn` of
    `per_sample` every row of the minibatch is a sample; otherwise the minibatch is. A step whose gradients are not
    finite changes nothing but `State.skipped`. What `eval_params` returns are the weights to evaluate and save.

    `update` also takes `value`, the loss, as other transformations do. With it rates may exceed those for a single step
    while the loss falls fast, and parameters that are all zero at the start have a length scale. It may be left out.

    Args:
        algorithm: `vsgd.NETWORKS` by default; `vsgd.PAPER` is the published pseudocode.
        weight_decay: λ as in AdamW, whose learning rate is about the RMS of its steps: θ ← (θ − Δ) / (1 + λ·RMS(Δ))
            for the step Δ of each tensor.
        seed: of the random signs of probes.
        gradient_flops: what a gradient costs, see `vsgd.optax.gradient_flops`. Rotations into the eigenbasis may take a
            quarter of it. By default that of 128 rows through dense layers with these parameters.
    """
    require(algorithm, Networks, Paper)
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay is {weight_decay}, it must be at least 0")

    def tensors_of(params: Params) -> list[Tensor]:
        leaves = [(jnp.shape(p), jnp.result_type(p)) for p in jax.tree.leaves(params)]
        return plan(leaves, algorithm, gradient_flops, seed)

    def init(params: Params) -> State:
        check_parameters(params)
        return new_state(params, tensors_of(params), algorithm)

    def update(
        grads: Params,
        state: State,
        params: Params | None = None,
        *,
        grad_fn: GradFn | None = None,
        value: Array | None = None,
        **extra_args: Any,
    ) -> tuple[Params, State]:
        del extra_args  # of other transformations of a chain
        gradient_at = check_arguments(grads, params, grad_fn)
        with explained_masks(params):
            return take_step(algorithm, tensors_of(params), grads, state, params, gradient_at, value, weight_decay)

    return optax.GradientTransformationExtraArgs(init, update)


def new_state(params: Params, tensors: list[Tensor], config: Config) -> State:
    """The state before the first step. No two arrays share memory, so that all may be donated."""
    structure: Any = jax.tree.structure(params)

    def each(make: Callable[[Tensor, Array], Array]) -> Params:
        return structure.unflatten(make(t, p) for t, p in zip(tensors, jax.tree.leaves(params), strict=True))

    def zeros() -> Params:
        return each(lambda tensor, p: jnp.zeros_like(p, tensor.precision))

    def number(value: float) -> Array:
        return jnp.full((), value, jnp.result_type(float))

    def curvature() -> Params:
        return each(lambda tensor, p: jnp.zeros_like(p, curvature_dtype(tensor, config)))

    bases = [new_basis(tensor) for tensor in tensors]
    window = config.min_window if isinstance(config, Networks) else 1.0
    return State(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        seen=number(0),
        mean=Moments(zeros(), zeros(), curvature(), curvature()),
        memory=each(lambda tensor, p: jnp.full_like(p, config.memory, tensor.precision)),
        totals=each(lambda tensor, p: jnp.zeros(len(Totals._fields), tensor.precision)),
        basis=Basis(*(structure.unflatten(basis[k] for basis in bases) for k in range(len(Basis._fields)))),
        average=zeros() if averages_iterates(config) else None,
        weight=number(1),
        averaging=Averaging(number(window), number(0)),
        bend=number(0),
        progress=Progress(number(0), number(0), number(1), number(0)),
        unprobed=jnp.zeros((), jnp.int32),
    )


def eval_params(params: Params, state: Any) -> Params:
    """The parameters to evaluate and to save: the average of the iterates, or the iterates where nothing is averaged.

    Args:
        params: the parameters after the last update.
        state: that of `vsgd`, or one that contains it, such as that of `optax.chain`, `masked` or `partition`.
    """

    def is_state(node: Any) -> bool:
        return isinstance(node, State)

    found = [node for node in jax.tree.leaves(state, is_leaf=is_state) if is_state(node)]
    if not found:
        raise TypeError(f"there is no state of vsgd in {jax.tree.structure(state)}")
    for each in found:
        if each.average is not None:

            def newest(average: Any, p: Any, weight: Array = each.weight) -> Any:
                if is_masked(average):
                    return p
                return ema(average, p.astype(average.dtype), weight.astype(average.dtype)).astype(p.dtype)

            params = jax.tree.map(newest, each.average, params, is_leaf=is_masked)
    return params
