"""Coordinates of a tensor: its own, or those of the eigenbasis of its gradients. Its shape decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vsgd import eigenbasis
from vsgd.algorithms.strategy import Config, strategy_of
from vsgd.eigenbasis import Basis

ROWS = 128
"""Batch size that the default estimate of the cost of a gradient assumes, for dense layers."""


class Tensor(NamedTuple):
    """A parameter without its value: shape, precision, and how its coordinates are rotated."""

    place: int
    """Index among the leaves of the parameters."""
    shape: tuple[int, ...]
    dtype: Any
    matrix: tuple[int, int]
    sizes: tuple[int, int]
    """Sizes of the bases of both sides; 1 for a side that is not rotated."""
    decoupled: bool
    """Whether the covariance of the gradient is nearly diagonal in the coordinates."""

    @property
    def precision(self) -> Any:
        """Return the type of the computation."""
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def is_rotated(self) -> bool:
        return self.sizes != (1, 1)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix.

    The first axis against the others or the others against the last, whichever has the longer short side: outputs come
    first in Equinox and last in Flax.
    """
    if len(shape) < 2:
        return math.prod(shape), 1
    first = shape[0], math.prod(shape[1:])
    last = math.prod(shape[:-1]), shape[-1]
    return last if min(last) > min(first) else first


def gradient_flops(grad_fn: Callable[..., Any], *args: Any) -> float:
    """Return the floating-point operations of one gradient, as counted by the compiler.

    The body of a loop counts once.

    Args:
        grad_fn: function that returns the gradient of a minibatch, for example `jax.grad(loss)`.
        args: its arguments, for example parameters and a minibatch.

    Returns:
        The number of operations, for the argument `gradient_flops` of `vsgd`; 0 if the compiler does not count them.

    Raises:
        TypeError: if an argument is no pytree of arrays.

    Example:
        >>> def loss(params, x):
        ...     return jnp.sum((x @ params) ** 2)
        >>> gradient_flops(jax.grad(loss), jnp.ones((64, 8)), jnp.ones((32, 64))) > 2 * 32 * 64 * 8
        True
    """
    analysis = jax.jit(grad_fn).lower(*args).cost_analysis()
    return float((analysis or {}).get("flops", 0.0))


def plan(leaves: Sequence[tuple[tuple[int, ...], Any]], config: Config, flops: float | None) -> list[Tensor]:
    """Return how parameters of these shapes and types are rotated, at a cost of at most 30 % of a gradient."""
    matrices = [matrix_shape(shape) for shape, _ in leaves]
    rotated = strategy_of(config).rotates(config)
    if flops is None:
        flops = 6.0 * ROWS * sum(math.prod(matrix) for matrix in matrices)
    planned = eigenbasis.plan_sizes(matrices, flops) if rotated else [(1, 1)] * len(leaves)
    return [
        Tensor(k, shape, dtype, matrix, sizes, rotated and (min(matrix) == 1 or sizes != (1, 1)))
        for k, ((shape, dtype), matrix, sizes) in enumerate(zip(leaves, matrices, planned, strict=True))
    ]


def new_basis(tensor: Tensor) -> Basis:
    """Return identities, and covariances of zero; None for a side that is not rotated."""
    sides: list[Array | None] = []
    for width, size in zip(tensor.matrix, tensor.sizes, strict=True):
        if size == 1:
            sides += [None, None]
            continue
        # made by NumPy, so that nothing is compiled; 1 − N Vᵀ is the identity if both are zero
        columns = eigenbasis.columns(width, size)
        q = np.eye(width, dtype=tensor.precision) if size == width else np.zeros((width, columns), tensor.precision)
        sides += [jnp.array(q), jnp.array(np.zeros((width, size), tensor.precision))]
    return Basis(*sides)


def into(tensor: Tensor, values: Array, basis: Basis) -> Array:
    """Return values in the coordinates of the basis, from the parameter's own."""
    return _rotate(eigenbasis.into, tensor, values, basis)


def back(tensor: Tensor, values: Array, basis: Basis) -> Array:
    """Return values in the parameter's own coordinates, from those of the basis."""
    return _rotate(eigenbasis.back, tensor, values, basis)


def _rotate(rotate: Callable[[Array, Basis], Array], tensor: Tensor, values: Array, basis: Basis) -> Array:
    with jax.default_matmul_precision("highest"):
        return rotate(values.reshape(tensor.matrix), basis).reshape(tensor.shape)


def updated_covariances(tensor: Tensor, basis: Basis, grad: Array, step: Array) -> Basis:
    """Return the basis whose covariances include this gradient. Call it where `eigenbasis.is_covariance_step(step)`."""
    matrix = grad.reshape(tensor.matrix)

    def updated(cov: Array | None, q: Array, side: Array) -> Array | None:
        return None if cov is None else eigenbasis.updated_covariance(cov, q, side, step, jnp).astype(cov.dtype)

    with jax.default_matmul_precision("highest"):
        return basis._replace(
            left_cov=updated(basis.left_cov, basis.left, matrix),
            right_cov=updated(basis.right_cov, basis.right, matrix.mT),
        )


class Library:
    """Functions for `eigenbasis.rotated_basis`. A diagonal of `jax.numpy` is a gather, which compiles slowly."""

    concatenate, finfo, ones_like, sign, tril, triu, where = (
        jnp.concatenate,
        jnp.finfo,
        jnp.ones_like,
        jnp.sign,
        jnp.tril,
        jnp.triu,
        jnp.where,
    )

    @staticmethod
    def geqrf(matrix: Array) -> tuple[Array, Array]:
        """Return Householder vectors below the diagonal, and the factors of the reflections."""
        reflections, factors = jnp.linalg.qr(matrix, mode="raw")
        return reflections.mT, factors

    class linalg:
        @staticmethod
        def qr(matrix: Array) -> tuple[Array, Array]:
            q, r = jnp.linalg.qr(matrix)
            return q, r

        @staticmethod
        def diagonal(matrices: Array) -> Array:
            return jnp.sum(matrices * jnp.eye(matrices.shape[-1], dtype=matrices.dtype), -1)


def rotated_bases(bases: Sequence[Basis], step: Array) -> list[Basis]:
    """Return the bases rotated towards the eigenvectors of their covariances. `step` steps came before this one.

    They are not stacked by shape: the compiler compiles identical loops once, but each slice of a stack by itself.
    """

    def rotated(q: Array | None, cov: Array) -> Array | None:
        return None if q is None else eigenbasis.rotated_basis(q, cov, step, Library)

    with jax.default_matmul_precision("highest"):
        return [
            basis._replace(left=rotated(basis.left, basis.left_cov), right=rotated(basis.right, basis.right_cov))
            for basis in bases
        ]
