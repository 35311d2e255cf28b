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
    """What is known of a parameter before its first value: shape, precision, and how its coordinates are rotated."""

    place: int
    """Its number among all parameters."""
    shape: tuple[int, ...]
    dtype: Any
    matrix: tuple[int, int]
    blocks: tuple[int, int]
    """Block sizes of both sides; 1 where a side stays as it is."""
    decoupled: bool

    @property
    def precision(self) -> Any:
        """What it is computed in."""
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix.

    The first axis against the others or the others against the last, whichever has the longer short side: outputs come
    first in Equinox and last in Flax.
    """
    if len(shape) < 2:
        return math.prod(shape), 1
    first = shape[0], math.prod(shape[1:])
    last = math.prod(shape[:-1]), shape[-1]
    return last if min(last) > min(first) else first


def gradient_flops(grad_fn: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of one call, as the compiler counts them; loops count once."""
    analysis = jax.jit(grad_fn).lower(*args).cost_analysis()
    return float((analysis or {}).get("flops", 0.0))


def plan(leaves: Sequence[tuple[tuple[int, ...], Any]], config: Config, flops: float | None) -> list[Tensor]:
    """How parameters of these shapes and types are rotated, so that all of it costs at most a quarter of a gradient."""
    matrices = [matrix_shape(shape) for shape, _ in leaves]
    rotated = strategy_of(config).rotates(config)
    if flops is None:
        flops = 6.0 * ROWS * sum(math.prod(matrix) for matrix in matrices)
    blocks = eigenbasis.plan_blocks(matrices, flops) if rotated else [(1, 1)] * len(leaves)
    return [
        Tensor(k, shape, dtype, matrix, sizes, rotated and (min(matrix) == 1 or sizes != (1, 1)))
        for k, ((shape, dtype), matrix, sizes) in enumerate(zip(leaves, matrices, blocks, strict=True))
    ]


def new_basis(tensor: Tensor) -> Basis:
    """The identity in blocks. A side that stays as it is has one of a single number, since None is no leaf."""
    sides: list[Array] = []
    for width, size in zip(tensor.matrix, tensor.blocks, strict=True):
        eye = np.eye(size, dtype=tensor.precision)  # made by NumPy, so that nothing is compiled
        blocks = np.tile(eye, (width // size if size > 1 else 1, 1, 1))
        sides += [jnp.array(blocks), jnp.array(np.zeros_like(blocks))]
    return Basis(*sides)


def rotated_sides(tensor: Tensor, basis: Basis) -> Basis:
    """The basis as `vsgd.eigenbasis` wants it: None where a side stays as it is."""
    left, right = tensor.blocks
    sides = (basis.left, basis.left_cov) if left > 1 else (None, None)
    return Basis(*sides, *((basis.right, basis.right_cov) if right > 1 else (None, None)))


def into(tensor: Tensor, values: Array, basis: Basis) -> Array:
    """From the parameter's own coordinates to those of its basis."""
    return _rotate(eigenbasis.into, tensor, values, basis)


def back(tensor: Tensor, values: Array, basis: Basis) -> Array:
    """From the coordinates of its basis to the parameter's own."""
    return _rotate(eigenbasis.back, tensor, values, basis)


def _rotate(rotate: Callable[[Array, Basis], Array], tensor: Tensor, values: Array, basis: Basis) -> Array:
    if tensor.blocks == (1, 1):
        return values
    with jax.default_matmul_precision("highest"):
        return rotate(values.reshape(tensor.matrix), rotated_sides(tensor, basis)).reshape(tensor.shape)


def observed_basis(tensor: Tensor, basis: Basis, grad: Array, step: Array) -> Basis:
    """Return the basis whose covariances include this gradient. Call it where `eigenbasis.is_covariance_step(step)`."""
    matrix = grad.reshape(tensor.matrix)
    with jax.default_matmul_precision("highest"):
        return basis._replace(
            left_cov=_observed(basis.left_cov, matrix, step, tensor.blocks[0]),
            right_cov=_observed(basis.right_cov, matrix.mT, step, tensor.blocks[1]),
        )


def _observed(cov: Array, side: Array, step: Array, size: int) -> Array:
    return cov if size == 1 else eigenbasis.updated_covariance(cov, side, step).astype(cov.dtype)


class Library:
    """Functions for `eigenbasis.rotated_basis`. A diagonal of `jax.numpy` is a gather, which compiles slowly."""

    finfo, sign, where = jnp.finfo, jnp.sign, jnp.where

    class linalg:
        qr = jnp.linalg.qr

        @staticmethod
        def diagonal(matrices: Array) -> Array:
            return jnp.sum(matrices * jnp.eye(matrices.shape[-1], dtype=matrices.dtype), -1)


def turned_basis(tensor: Tensor, basis: Basis) -> Basis:
    """Return the basis turned towards the eigenvectors of its covariances."""
    with jax.default_matmul_precision("highest"):
        return basis._replace(
            left=basis.left if tensor.blocks[0] == 1 else eigenbasis.rotated_basis(basis.left, basis.left_cov, Library),
            right=basis.right
            if tensor.blocks[1] == 1
            else eigenbasis.rotated_basis(basis.right, basis.right_cov, Library),
        )
