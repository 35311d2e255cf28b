"""The statistics of a group of tensors and of its minibatch in one step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vsgd.algorithms.strategy import Totals, gradient_limit
from vsgd.core import Moments
from vsgd.core import State as CoreState
from vsgd.eigenbasis import Basis
from vsgd.optax.coordinates import back, into
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
    norm_sq: Array
    """Squared norm of the gradient of each tensor."""
    mean: Moments
    """In the precision of the state."""
    memory: Array
    seen: Array
    totals: Totals

    @property
    def precision(self) -> Any:
        return self.group.tensors[0].precision

    @property
    def state(self) -> CoreState:
        """The statistics in the precision of the computation."""
        return CoreState(Moments(*(part.astype(self.precision) for part in self.mean)), self.memory, self.seen)

    @property
    def sizes(self) -> np.ndarray:
        """Number of coordinates of each tensor."""
        return self.group.sizes.astype(self.precision)

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


def collect(
    groups: list[Group], grads: Params, state: State, seen: Array, params: Params, grad_fn: GradFn
) -> list[Local]:
    """Return the state and the gradients of each group."""
    all_params, all_grads = jax.tree.leaves(params), jax.tree.leaves(grads)
    work = []
    for k, group in enumerate(groups):
        basis = [state.basis[tensor.place] for tensor in group.tensors]
        mean, totals = Moments(*(part[k] for part in state.mean)), Totals(*state.totals[k])
        empty = jnp.zeros(0)
        w = Local(group, [], [], basis, empty, None, empty, mean, state.memory[k], seen, totals)
        w = w._replace(theta=w.select(all_params), plain_grad=w.select(all_grads), seen=seen.astype(w.precision))
        grad = w.rotate(w.plain_grad)
        work.append(w._replace(grad=grad, norm_sq=group.sums(grad * grad)[0]))
    if isinstance(grad_fn, SampleGradients):
        squares = grad_fn.mean(lambda gradient_at: [g * g for g in in_coordinates(work, gradient_at(params))])
        work = [w._replace(grad_sq=square) for w, square in zip(work, squares, strict=True)]
    return work


def in_coordinates(work: list[Local], grads: Params) -> list[Array]:
    """Return gradients in the coordinates of the bases, one array per group."""
    leaves = jax.tree.leaves(grads)
    return [w.rotate(w.select(leaves)) for w in work]


def in_leaf_order(work: list[Local], per_group: Iterable[Iterable[Any]]) -> list[Any]:
    """Return values of the tensors of each group in the order of the leaves of the parameters."""
    places = [tensor.place for w in work for tensor in w.group.tensors]
    values = [value for part in per_group for value in part]
    return [value for _, value in sorted(zip(places, values, strict=True), key=operator.itemgetter(0))]


def is_usable(values: Array | None, w: Local) -> Array:
    """Return whether all numbers are finite, and small enough to be divided by a squared probe."""
    if values is None:
        return jnp.asarray(True)
    largest = jnp.max(abs(values), initial=0)
    return largest < gradient_limit(float(np.finfo(w.precision).max))


def all_of(answers: Iterable[Array]) -> Array:
    return functools.reduce(operator.and_, answers, jnp.asarray(True))


def total(numbers: Iterable[Array]) -> Array:
    return functools.reduce(operator.add, numbers, jnp.zeros((), jnp.result_type(float)))
