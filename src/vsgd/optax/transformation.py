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
    """Return stochastic gradient descent that estimates a learning rate for each coordinate (Schaul & LeCun 2013).

    `update` takes two extra arguments, `grad_fn` and `value`:

    - `grad_fn(params)` returns the gradient of the same minibatch at any parameters. In about one of ten steps it is
      called twice: at the parameters, and near them. If it comes from `per_sample`, every row of the minibatch is a
      sample; otherwise the minibatch is one sample. The curvature is computed from the difference of the two calls
      and does not depend on `grads`. `grad_fn` is therefore the gradient of the plain loss, even if `optax.chain`
      clips `grads` or `optax.MultiSteps` accumulates them.
    - `value` is the loss at the parameters. It is optional. Without it, learning rates are optimal for a single step
      only, and parameters that are all zero at the start have no length scale.

    A step whose gradients are not finite leaves the parameters unchanged and increases `State.skipped`. Evaluate and
    save the weights that `eval_params` returns.

    Args:
        algorithm: the algorithm and its constants. `vsgd.PAPER` is the published algorithm.
        lr: factor on the learning rates that are computed, for schedules with `optax.inject_hyperparams`.
        weight_decay: λ with the meaning of AdamW. Each tensor is updated by θ ← (θ − Δ) / (1 + λ·RMS(Δ)), where Δ is
            its step. RMS(Δ) replaces the learning rate of AdamW.
        steps_per_epoch: number of steps in which all training data are seen once. Weight decay is then estimated for
            each tensor of at least two dimensions, from the noise of its gradients. Leave it out for data that are
            seen once. A `weight_decay` above 0 replaces the estimate.
        seed: seed of the random signs of probes.
        gradient_flops: floating-point operations of a gradient, see `vsgd.optax.gradient_flops`. Rotations into the
            eigenbasis may take 30 % of them. The default assumes 128 rows through dense layers.

    Returns:
        A transformation with `init(params)` and `update(grads, state, params, grad_fn=..., value=...)`.

    Raises:
        ValueError: if `lr`, `weight_decay` or `steps_per_epoch` is outside its range.
        TypeError: if `algorithm` is not for networks, or `gradient_flops` is traced.

    Example:
        >>> def loss(params, x):
        ...     return jnp.mean((x @ params - 1) ** 2)
        >>> x, params = jnp.eye(3), jnp.full(3, 0.1)
        >>> tx = vsgd()
        >>> state = tx.init(params)
        >>> @jax.jit
        ... def step(params, state, x):
        ...     value, grads = jax.value_and_grad(loss)(params, x)
        ...     grad_fn = lambda p: jax.grad(loss)(p, x)
        ...     updates, state = tx.update(grads, state, params, grad_fn=grad_fn, value=value)
        ...     return optax.apply_updates(params, updates), state
        >>> for _ in range(100):
        ...     params, state = step(params, state, x)
        >>> bool(loss(eval_params(params, state), x) < 0.01)
        True
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
    """Return the parameters to evaluate and to save: the average of the iterates.

    Args:
        params: the parameters after the last update.
        state: the state of `vsgd`, or one that contains it, such as that of `optax.chain`, `masked` or `partition`.

    Returns:
        A tree like `params`. Parameters that `vsgd` does not average, such as masked ones, are returned unchanged.

    Raises:
        TypeError: if there is no state of `vsgd` in `state`.

    Example:
        >>> params = {"w": jnp.ones(2)}
        >>> state = vsgd().init(params)
        >>> eval_params(params, state)["w"].tolist()
        [1.0, 1.0]
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
