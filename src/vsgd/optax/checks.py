"""Checks of structures, shapes and types, when a step is traced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def check_settings(lr: Any, weight_decay: Any, steps_per_epoch: Any, gradient_flops: Any) -> None:
    """Raise if an argument of `vsgd` is not possible.

    `optax.inject_hyperparams` passes tracers, whose values are not known, and arrays.
    """
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not isinstance(value, jax.core.Tracer) and not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}, it must be finite and at least 0")
    if steps_per_epoch is not None and not isinstance(steps_per_epoch, jax.core.Tracer):
        is_number = isinstance(steps_per_epoch, int | float | jax.Array)
        if not (is_number and 1 <= steps_per_epoch < math.inf):
            raise ValueError(
                f"steps_per_epoch is {steps_per_epoch!r}; it must be the number of steps in which all training data "
                "are seen once, at least 1, for example len(loader). Leave it out if data are not repeated."
            )
    if isinstance(gradient_flops, jax.core.Tracer):
        raise TypeError(
            "gradient_flops decides the shapes of the state, so it cannot be traced; pass "
            "static_args='gradient_flops' to optax.inject_hyperparams"
        )


def check_parameters(params: Any) -> None:
    """Raise if a parameter is not a real floating-point number, since no other can be moved by small steps."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} is {jnp.result_type(leaf)}, not floating-point; keep it out of "
                "the parameters, or hide it with optax.masked"
            )


def check_arguments(grads: Any, params: Any, grad_fn: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return `grad_fn`. Raise if an argument is missing, or if gradients do not belong to the parameters."""
    if params is None:
        raise ValueError("vsgd needs the parameters: tx.update(grads, state, params, grad_fn=grad_fn)")
    if grad_fn is None:
        raise TypeError(
            "vsgd needs a function that returns the gradient of this minibatch at other parameters: "
            "tx.update(grads, state, params, grad_fn=lambda p: jax.grad(loss)(p, batch))"
        )
    check_parameters(params)
    check_like_parameters("grads", grads, params)
    return grad_fn


def check_like_parameters(name: str, grads: Any, params: Any) -> None:
    """Raise if gradients do not have the structure and the shapes of the parameters."""
    found: Any = jax.tree.structure(grads)
    wanted: Any = jax.tree.structure(params)
    if found != wanted:
        raise ValueError(f"{name} and parameters must have the same structure; {name}: {found}, parameters: {wanted}")
    leaves = jax.tree.leaves(grads)
    for (path, leaf), grad in zip(jax.tree_util.tree_leaves_with_path(params), leaves, strict=True):
        if jnp.shape(leaf) != jnp.shape(grad):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(grad)}, its parameter has {jnp.shape(leaf)}"
            )
