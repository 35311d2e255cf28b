"""Gradient functions for `vsgd.optax.vsgd`: of single samples, and of parameters some of which are masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

Params = Any
"""A pytree of parameters, or of their gradients."""

GradFn = Callable[[Params], Params]


@dataclass(frozen=True)
class SampleGradients:
    """The gradient of a minibatch, whose samples are known one by one. Made by `per_sample`."""

    loss: Callable[[Params, Any], Array]
    batch: Any
    count: int
    chunk: int

    def __call__(self, params: Params) -> Params:
        """Return the mean gradient."""
        return jax.grad(lambda p: jax.vmap(self.loss, (None, 0))(p, self.batch).mean())(params)

    def mean(self, statistic: Callable[[GradFn], Any]) -> Any:
        """Return the mean of a `statistic` of the gradients of samples, of which `chunk` are in memory at a time."""

        def total(rows: Any) -> Any:
            values = jax.vmap(lambda row: statistic(lambda p: jax.grad(self.loss)(p, row)))(rows)
            return jax.tree.map(lambda value: value.sum(0), values)

        whole = self.count - self.count % self.chunk
        parts = []
        if whole:
            chunks = jax.tree.map(lambda x: x[:whole].reshape(-1, self.chunk, *x.shape[1:]), self.batch)
            zero = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(total, jax.tree.map(lambda x: x[0], chunks))
            )
            parts.append(lax.scan(lambda sums, rows: (jax.tree.map(jnp.add, sums, total(rows)), None), zero, chunks)[0])
        if whole < self.count:
            parts.append(total(jax.tree.map(lambda x: x[whole:], self.batch)))
        return jax.tree.map(lambda *sums: sum(sums) / self.count, *parts)


def per_sample(loss: Callable[[Params, Any], Array], *, chunk: int = 32) -> Callable[[Any], SampleGradients]:
    """Return a function that makes a `grad_fn` of a minibatch in which every row is a sample, as in the paper.

    Without it, the minibatch is one sample.

    Args:
        loss: loss of one sample, `loss(params, sample)`. A sample is a pytree of arrays without the minibatch axis.
        chunk: number of per-sample gradients in memory at a time.

    Returns:
        A function of a minibatch, a pytree of arrays whose first axis counts samples. It returns a `grad_fn`, and
        raises ValueError if the arrays do not have the same number of samples.

    Raises:
        ValueError: if `chunk` is below 1.

    Example:
        >>> samples = per_sample(lambda params, sample: (params * sample) ** 2 / 2)
        >>> grad_fn = samples(jnp.array([1.0, 3.0]))
        >>> float(grad_fn(jnp.array(2.0)))  # the mean of 2 · 1² and 2 · 3²
        10.0
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, it must be at least 1")

    def of_batch(batch: Any) -> SampleGradients:
        lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
        if len(lengths) != 1 or lengths <= {(), (0,)}:
            raise ValueError(
                "the arrays of a minibatch must have the same number of samples, at least one; their first axes are "
                f"{sorted(lengths)}"
            )
        ((count,),) = lengths
        return SampleGradients(loss, batch, count, min(chunk, count))

    return of_batch


def unmasked(grad_fn: GradFn, params: Params) -> GradFn:
    """Return a gradient function for `optax.masked` and `optax.partition`, which hide some of the parameters.

    Args:
        grad_fn: gradient function of all parameters, which may come from `per_sample`.
        params: all parameters. The hidden ones have these values in every call.

    Returns:
        A gradient function of the parameters that are not hidden.

    Raises:
        ValueError: by the returned function, if its argument does not have the structure of `params`.

    Example:
        >>> def grad_fn(p):
        ...     return {"w": p["w"] * p["b"], "b": p["b"]}
        >>> params = {"w": jnp.array(2.0), "b": jnp.array(3.0)}
        >>> visible = {"w": jnp.array(5.0), "b": optax.MaskedNode()}
        >>> grads = unmasked(grad_fn, params)(visible)
        >>> float(grads["w"]), grads["b"]
        (15.0, MaskedNode())
    """
    if isinstance(grad_fn, SampleGradients):
        loss = grad_fn.loss
        return SampleGradients(lambda p, row: loss(filled(p, params), row), grad_fn.batch, grad_fn.count, grad_fn.chunk)
    return lambda hidden: hide_as(hidden, grad_fn(filled(hidden, params)))


def is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


@contextmanager
def explained_masks(params: Params) -> Iterator[None]:
    """Add the remedy to errors of a gradient function that cannot handle masked parameters."""
    try:
        yield
    except Exception as error:
        if any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked))):
            error.add_note("some parameters are masked here: pass grad_fn=vsgd.optax.unmasked(grad_fn, params)")
        raise


def filled(masked: Params, params: Params) -> Params:
    """Return the masked tree with values of `params` where it has none."""
    return jax.tree.map(lambda own, other: other if is_masked(own) else own, masked, params, is_leaf=is_masked)


def hide_as(masked: Params, params: Params) -> Params:
    """Return `params` without the parameters that are masked in the first tree."""
    return jax.tree.map(lambda own, other: own if is_masked(own) else other, masked, params, is_leaf=is_masked)
