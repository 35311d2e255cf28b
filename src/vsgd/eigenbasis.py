"""The Kronecker eigenbasis of a tensor, in which the covariance of its gradient is nearly diagonal.

For a weight matrix with gradient G, L = E[G Gᵀ] and R = E[Gᵀ G] are moving averages, and Q_L and Q_R approximate their
eigenvectors. The algorithm works on Q_Lᵀ G Q_R, its probes are Q_L S Q_Rᵀ with random signs S, and its step is rotated
back. A convolution is a matrix of out × (in · kernel). A side may be split into blocks of equal size, each with its own
basis. Q is then block-diagonal and stored as blocks × size × size.

Two limits determine the size of the blocks. Rotation takes at most a quarter of the operations of a gradient. Bases and
covariances take at most five times the memory of the parameters, or half a megabyte if that is more.

All functions are pure and work with torch and JAX. `xp` is the library, `torch` or `jax.numpy`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from vsgd.core import Mask, Scalar, ema, larger

Matrix: TypeAlias = Any
"""A torch or JAX array of shape (…, rows, columns)."""

Blocks: TypeAlias = Any
"""A torch or JAX array of shape (…, blocks, size, size): the diagonal blocks of a basis or of a covariance."""

DECAY = 0.95
"""Decay of the moving averages L and R per step."""

OBSERVE_INTERVAL = 5
"""Number of steps between two updates of L and R. The first steps all update them."""

REFRESH_INTERVAL = 10
"""Number of steps between two rotations of the basis. The first steps all rotate it."""

FIRST_STEPS = 5

NULL_SHARE = 1e-6
"""Multiple of the identity added to the covariance, in units of its mean eigenvalue. It keeps directions without
gradients unchanged."""

WIDEST = 2048
"""Maximum size of a block. Larger bases would take too long to converge."""

SHARE_OF_GRADIENT = 0.25
"""Maximum operations of the rotation per step, as a fraction of those of a gradient."""

ALLOWANCE = 2e7
"""Number of operations per step that is always allowed, since it takes little time."""

MEMORY_SHARE = 5
"""Bases and covariances of a matrix hold at most this many numbers per coordinate.

Five float32 numbers are 20 bytes, as much as the rest of the state in `vsgd.torch`. A square matrix needs 4 numbers, a
matrix twice as long as wide 5, so both have full bases. Without a limit, a matrix of 2,048 × 8 would need 512.
"""

MEMORY_ALLOWANCE = 2 * 256 * 256
"""Bases and covariances of all matrices may hold this many numbers, since that is little memory: those of width 256.

Without it, the 64 inputs of a classifier of digits would be split into blocks of 16. With these, it ended at a higher
loss than without a basis.
"""

MAX_ASPECT = 4
"""Maximum size of a block relative to the other side of the matrix.

The rank of a gradient is at most the width of the short side, and a covariance averages over few gradients. Further
eigenvectors would depend on rounding errors.
"""

MEMORY_BOUND = 64
"""Products with smaller blocks are limited by memory bandwidth. They take as long as blocks of about this size."""


class Basis(NamedTuple):
    """The bases Q and their covariances, for the left and for the right side; None for a side without a basis."""

    left: Blocks
    left_cov: Blocks
    right: Blocks
    right_cov: Blocks


def into(values: Matrix, basis: Basis) -> Matrix:
    """Return Q_Lᵀ X Q_R for X of shape … × rows × columns."""
    if basis.left is not None:
        values = _left(values, basis.left, True)
    return values if basis.right is None else _right(values, basis.right, False)


def back(values: Matrix, basis: Basis) -> Matrix:
    """Return Q_L X Q_Rᵀ for X of shape … × rows × columns."""
    if basis.left is not None:
        values = _left(values, basis.left, False)
    return values if basis.right is None else _right(values, basis.right, True)


def _left(values: Matrix, q: Blocks, transposed: bool) -> Matrix:
    q = q[0] if q.shape[0] == 1 else q
    q = q.mT if transposed else q  # last, so that compilers make it part of the product
    if q.ndim == 2:
        return q @ values
    blocks = values.reshape(*values.shape[:-2], len(q), -1, values.shape[-1])
    return (q @ blocks).reshape(values.shape)


def _right(values: Matrix, q: Blocks, transposed: bool) -> Matrix:
    q = q[0] if q.shape[0] == 1 else q
    q = q.mT if transposed else q
    if q.ndim == 2:
        return values @ q
    blocks = values.reshape(*values.shape[:-1], len(q), -1).swapaxes(-3, -2)  # one product per block, not one per row
    return (blocks @ q).swapaxes(-3, -2).reshape(values.shape)


def is_covariance_step(steps: Scalar) -> Mask:
    """Return whether a step updates the covariances. `steps` is the number of steps before it."""
    return (steps < FIRST_STEPS) | (steps % OBSERVE_INTERVAL == 0)


def is_refresh_step(steps: Scalar) -> Mask:
    """Return whether a step updates the basis. Such a step also updates the covariances."""
    return (steps < FIRST_STEPS) | (steps % REFRESH_INTERVAL == 0)


def updated_covariance(cov: Blocks, side: Matrix, steps: Scalar) -> Blocks:
    """Return a covariance after a gradient is added.

    Args:
        cov: the covariance, blocks × size × size.
        side: the gradient as a matrix whose rows are the side of the covariance.
        steps: number of steps before this one.
    """
    rows = side.reshape(len(cov), -1, side.shape[-1])
    return ema(cov, rows @ rows.mT, covariance_weight(steps))


def covariance_weight(steps: Scalar) -> Scalar:
    """Return the weight with which a gradient enters the covariances if `steps` came before it."""
    usual = (steps < FIRST_STEPS) * (1 - DECAY) + (steps >= FIRST_STEPS) * (1 - DECAY**OBSERVE_INTERVAL)
    plain = 1 / (steps + 1)
    return (plain > usual) * plain + (plain <= usual) * usual


def rotated_basis(q: Blocks, cov: Blocks, xp: Any) -> Blocks:
    """Return a basis rotated towards the eigenvectors of its covariance by one power iteration.

    Both are … × blocks × size × size.
    """
    scale = larger(xp.linalg.diagonal(cov).mean((-2, -1)), float(xp.finfo(cov.dtype).tiny))[..., None, None, None]
    new, triangle = xp.linalg.qr(cov / scale @ q + NULL_SHARE * q)
    signs = xp.sign(xp.linalg.diagonal(triangle))
    # columns keep their signs, so that the averages of a coordinate stay valid
    return new * xp.where(signs == 0, 1, signs)[..., None, :]


# --- costs and block sizes ----------------------------------------------------------------------------------------


def cost(shape: tuple[int, int], blocks: tuple[int, int]) -> float:
    """Return the floating-point operations per step: rotations, covariances and power iterations."""
    rows, columns = shape
    products = 2 + 1 / OBSERVE_INTERVAL
    return sum(
        2 * products * rows * columns * max(size, MEMORY_BOUND) + 5 * width * size**2 / REFRESH_INTERVAL
        for width, size in zip(shape, blocks, strict=True)
        if size > 1
    )


def largest_divisor(width: int, limit: int) -> int:
    """Return the largest divisor of `width` that is at most `limit`."""
    return next(d for d in range(min(width, limit), 0, -1) if width % d == 0)


def basis_numbers(shape: tuple[int, int], blocks: tuple[int, int]) -> int:
    """Return the number of elements of the bases and covariances of a matrix."""
    return sum(2 * width * size for width, size in zip(shape, blocks, strict=True) if size > 1)


def memory_share(shapes: Sequence[tuple[int, int]]) -> float:
    """Return how many numbers per coordinate the bases and covariances of matrices may hold."""
    coordinates = sum(rows * columns for rows, columns in shapes if min(rows, columns) > 1)
    return max(MEMORY_SHARE, MEMORY_ALLOWANCE / max(coordinates, 1))


def largest_blocks(shape: tuple[int, int], share: float) -> tuple[int, int]:
    """Return the largest block sizes of a matrix within `WIDEST`, `MAX_ASPECT` and `share` numbers per coordinate.

    The short side takes its whole width if it can, since that costs little memory. The long side takes the largest
    block that fits into the rest of the allowance.
    """
    short, long = min(shape), max(shape)
    short_block = largest_divisor(short, WIDEST)
    rest = share * short * long - basis_numbers((short, long), (short_block, 1))
    limit = min(WIDEST, MAX_ASPECT * short, int(rest // (2 * long)))
    long_block = largest_divisor(long, limit)
    return (short_block, long_block) if shape[0] <= shape[1] else (long_block, short_block)


def plan_blocks(shapes: Sequence[tuple[int, int]], gradient_flops: float, spent: float = 0.0) -> list[tuple[int, int]]:
    """Return block sizes of both sides of each matrix, within the limits on memory and on operations.

    Sides start with `largest_blocks` within `memory_share`. Then the largest blocks are cut until the rotations of all
    matrices together cost at most `SHARE_OF_GRADIENT` of a gradient minus `spent`, the operations already planned.
    Small blocks on both sides help more than large blocks on one. Blocks of up to `MEMORY_BOUND` are not cut, because
    that saves no time. Instead the costliest sides keep their own coordinates (block size 1), as do both sides of
    matrices with a single row or column.
    """
    budget = max(SHARE_OF_GRADIENT * gradient_flops, ALLOWANCE) - spent
    share = memory_share(shapes)
    blocks = [list(largest_blocks(shape, share)) if min(shape) > 1 else [1, 1] for shape in shapes]

    def side_cost(k: int, side: int) -> float:
        only = [1, 1]
        only[side] = blocks[k][side]
        return cost(shapes[k], (only[0], only[1]))

    def entry(k: int, side: int) -> tuple[int, float, int, int]:
        return -max(blocks[k][side], MEMORY_BOUND), -side_cost(k, side), k, side

    # a heap, because a search of all sides for every cut would take quadratic time
    queue = [entry(k, side) for k in range(len(shapes)) for side in (0, 1) if blocks[k][side] > 1]
    heapq.heapify(queue)
    total = sum((Fraction(-negative_cost) for _, negative_cost, _, _ in queue), Fraction(0))  # exact, in any order
    while queue and total > budget:
        _, negative_cost, k, side = heapq.heappop(queue)
        size = blocks[k][side]
        blocks[k][side] = largest_divisor(shapes[k][side], size - 1) if size > MEMORY_BOUND else 1
        total += Fraction(negative_cost) + Fraction(side_cost(k, side))
        if blocks[k][side] > 1:
            heapq.heappush(queue, entry(k, side))
    return [(left, right) for left, right in blocks]
