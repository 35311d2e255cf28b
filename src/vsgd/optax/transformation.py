"""The transformation: `init`, `update` and the parameters to evaluate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from vsgd.algorithms.base import require
from vsgd.algorithms.networks import NETWORKS, Networks
from vsgd.algorithms.paper import Paper
from vsgd.algorithms.strategy import Config
from vsgd.optax.checks import check_arguments, check_parameters, check_settings
from vsgd.optax.coordinates import plan
from vsgd.optax.groups import Group, grouped
from vsgd.optax.samples import GradFn, Params, explained_masks, is_masked
from vsgd.optax.state import Numbers, State, new_state
from vsgd.optax.step import Settings, entered, take_step


def vsgd(
    algorithm: Config = NETWORKS,
    *,
    lr: float = 1.0,
    weight_decay: float = 0.0,
    steps_per_epoch: float | None = None,
    seed: int = 0,
    gradient_flops: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stochastic gradient descent whose rates set themselves, one for each coordinate (Schaul & LeCun 2013).

    `update(grads, state, params, grad_fn=...)` takes a function that returns the gradient of the same minibatch at
    other parameters. In about a tenth of the steps it is called twice: at the parameters, and near them. With a
    `grad_fn` of `per_sample` every row of the minibatch is a sample; otherwise the minibatch is. A step whose gradients
    are not finite changes nothing but `State.skipped`. Evaluate and save the weights that `eval_params` returns.

    `update` also takes `value`, the loss, as other transformations do. With it rates may exceed those for a single step
    while the loss falls fast, and parameters that are all zero at the start have a length scale. It may be left out.

    The curvature comes from two calls of `grad_fn`, not from `grads`. So `grad_fn` stays that of the plain loss where
    `grads` are clipped in an `optax.chain`, or accumulated by `optax.MultiSteps`.

    Args:
        algorithm: `vsgd.NETWORKS` by default; `vsgd.PAPER` is the published pseudocode.
        lr: a factor on the rates, for schedules with `optax.inject_hyperparams`. Not needed.
        weight_decay: λ as in AdamW, whose learning rate is about the RMS of its steps: θ ← (θ − Δ) / (1 + λ·RMS(Δ))
            for the step Δ of each tensor.
        seed: of the random signs of probes.
        gradient_flops: what a gradient costs, see `vsgd.optax.gradient_flops`. Rotations into the eigenbasis may take a
            quarter of it. By default that of 128 rows through dense layers with these parameters.
    """
    require(algorithm, Networks, Paper)
    check_settings(lr, weight_decay, steps_per_epoch, gradient_flops)
    settings = Settings(algorithm, lr, weight_decay, steps_per_epoch, seed)

    def groups_of(params: Params) -> list[Group]:
        leaves = [(jnp.shape(p), jnp.result_type(p)) for p in jax.tree.leaves(params)]
        return grouped(plan(leaves, algorithm, gradient_flops))

    def init(params: Params) -> State:
        check_parameters(params)
        return new_state(params, groups_of(params), algorithm)

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
            return take_step(settings, groups_of(params), grads, state, params, gradient_at, value)

    return optax.GradientTransformationExtraArgs(init, update)


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
            weight = Numbers(*each.numbers).weight

            def newest(average: Any, p: Any, weight: Array = weight) -> Any:
                return p if is_masked(average) else entered(average, p, weight).astype(p.dtype)

            params = jax.tree.map(newest, each.average, params, is_leaf=is_masked)
    return params
