"""The state of a group of tensors and the gradients of its minibatch, in one step."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from vsgd.algorithms.strategy import gradient_limit
from vsgd.core import Moments
from vsgd.core import State as CoreState
from vsgd.eigenbasis import Basis
from vsgd.optax.coordinates import Tensor, back, into
from vsgd.optax.groups import Group
from vsgd.optax.samples import GradFn, Params, SampleGradients
from vsgd.optax.state import State


class Local(NamedTuple):
    """A group of tensors in a step: its state, and the statistics of the minibatch."""

    group: Group
    theta: list[Array]
    """Parameters of each tensor."""
    plain_grad: list[Array]
    """Mean gradient of each tensor in its own coordinates; `grad` and all statistics are in those of the bases."""
    basis: list[Basis]
    grad: Array
    grad_sq: Array | None
    """Mean square over the samples; None if the minibatch is one sample."""
    mean: Moments
    """In the precision of the state."""
    memory: Array
    seen: Array
    columns: slice
    """Where numbers per tensor contain those of this group."""

    @property
    def precision(self) -> Any:
        return self.group.tensors[0].precision

    @property
    def state(self) -> CoreState:
        """Return the statistics in the precision of the computation."""
        return CoreState(Moments(*(part.astype(self.precision) for part in self.mean)), self.memory, self.seen)

    def rotate(self, values: Sequence[Array]) -> Array:
        """Return values of each tensor as one array in the coordinates of the bases."""
        return self.group.join([into(*each) for each in zip(self.group.tensors, values, self.basis, strict=True)])

    def rotate_back(self, coordinates: Array) -> list[Array]:
        """Return the values of each tensor in its own coordinates. Inverse of `rotate`."""
        parts = self.group.split(coordinates)
        return [back(*each) for each in zip(self.group.tensors, parts, self.basis, strict=True)]

    def select(self, leaves: Sequence[Any]) -> list[Array]:
        """Return those leaves of a tree that belong to this group, in the precision of the computation."""
        return [jnp.asarray(leaves[tensor.place], self.precision) for tensor in self.group.tensors]

    def select_grads(self, leaves: Sequence[Any]) -> list[Array]:
        """Return those gradients that belong to this group, in the precision of the computation.

        The gradient of a weight matrix often ends in a transposition. Without the barrier, the compiler fuses that into
        rotations, and stores the gradient of a large tensor in both layouts.
        """
        grads = self.select(leaves)
        return grads if self.group.is_joined else lax.optimization_barrier(grads)


def collect(
    groups: list[Group], grads: Params, state: State, seen: Array, params: Params, grad_fn: GradFn
) -> list[Local]:
    """Return the state and the gradients of each group."""
    all_params, all_grads = jax.tree.leaves(params), jax.tree.leaves(grads)
    work: list[Local] = []
    for k, group in enumerate(groups):
        first = len(tensors_of(work))
        basis = [state.basis[tensor.place] for tensor in group.tensors]
        mean = Moments(*(part[k] for part in state.mean))
        columns = slice(first, first + len(group.tensors))
        w = Local(group, [], [], basis, jnp.zeros(0), None, mean, state.memory[k], seen, columns)
        w = w._replace(theta=w.select(all_params), plain_grad=w.select_grads(all_grads), seen=seen.astype(w.precision))
        work.append(w._replace(grad=w.rotate(w.plain_grad)))
    if isinstance(grad_fn, SampleGradients):
        squares = grad_fn.mean(lambda gradient_at: [g * g for g in in_coordinates(work, gradient_at(params))])
        work = [w._replace(grad_sq=square) for w, square in zip(work, squares, strict=True)]
    return work


def in_coordinates(work: list[Local], grads: Params) -> list[Array]:
    """Return gradients in the coordinates of the bases, one array per group."""
    leaves = jax.tree.leaves(grads)
    return [w.rotate(w.select_grads(leaves)) for w in work]


def in_leaf_order(work: list[Local], values: Iterable[Any]) -> list[Any]:
    """Return values of all tensors, group after group, in the order of the leaves of the parameters."""
    places = [tensor.place for tensor in tensors_of(work)]
    return [value for _, value in sorted(zip(places, values, strict=True), key=operator.itemgetter(0))]


def tensors_of(work: list[Local]) -> list[Tensor]:
    """Return all tensors, group after group. Numbers per tensor have this order."""
    return [tensor for w in work for tensor in w.group.tensors]


def products(work: list[Local], a: Iterable[Array], *others: Iterable[Array]) -> Array:
    """Return the scalar products of each tensor of `a` with those of `others`, of shape others × tensors.

    Tensors are given group after group.
    """
    iterators = [iter(values) for values in (a, *others)]
    parts = []
    for w in work:
        first, *rest = (w.group.join([next(values) for _ in w.group.tensors]) for values in iterators)
        parts.append(w.group.sums(*(first * other for other in rest)))
    return jnp.concatenate(parts, axis=1)


def are_usable(work: list[Local], norm_sq: Array, value: Array | None) -> Array:
    """Return whether the squared norms of all gradients, their mean squares and the loss are usable."""
    limits = np.array([limit(tensor.precision) for tensor in tensors_of(work)])
    checks = [(norm_sq < limits.astype(norm_sq.dtype)).all()]
    checks += [is_usable(w.grad_sq, w.precision) for w in work if w.grad_sq is not None]
    return jnp.stack(checks if value is None else [*checks, jnp.isfinite(value)]).all()


def is_usable(values: Array, precision: Any) -> Array:
    """Return whether all numbers are finite, and small enough to be divided by a squared probe."""
    return jnp.max(abs(values), initial=0) < limit(precision)


def limit(precision: Any) -> float:
    """Return the size beyond which a gradient of this precision is not usable."""
    return gradient_limit(float(np.finfo(precision).max))
