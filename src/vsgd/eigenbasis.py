"""The Kronecker eigenbasis of a tensor, in which the covariance of its gradient is nearly diagonal.

For a weight matrix with gradient G, L = E[G Gᵀ] and R = E[Gᵀ G] are moving averages, and Q_L and Q_R approximate their
eigenvectors. The algorithm works on Q_Lᵀ G Q_R, its probes are Q_L S Q_Rᵀ with random signs S, and its step is rotated
back. A convolution is a matrix of out × (in · kernel).

A side has one of three kinds of basis. Its size tells them apart:

- full (the width of the side): Q and the covariance are width × width.
- leading directions (between 1 and the width): the first r columns of Q approximate the leading eigenvectors U. The
  others complete them to an orthogonal matrix, the product of r Householder reflections: Q = 1 − N Vᵀ. V and N are
  stored side by side, width × 2r. Instead of the covariance C, a moving average of C U is stored, width × r.
- none (1): the side keeps its own coordinates.

Two limits determine the sizes. Rotation takes at most 30 % of the operations of a gradient. Bases and covariances
take at most five times the memory of the parameters, or half a megabyte if that is more.

All functions are pure and work with torch and JAX. `xp` is the library, `torch` or `jax.numpy`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from vsgd.core import Mask, Scalar, ema, larger

Matrix: TypeAlias = Any
"""A torch or JAX array of shape (…, rows, columns)."""

Side: TypeAlias = Any
"""A torch or JAX array of shape (…, width, columns): the basis of a side, or what is stored of its covariance."""

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

FIRST_NULL_SHARE = 1e-3
"""The same in the first steps. The covariance then has a low rank, and its rounding errors, divided by this number,
rotate the directions without gradients."""

WIDEST = 2048
"""Maximum size of a full basis. Larger bases would take too long to converge."""

RANK = 16
"""Number of leading directions of a side that has no full basis."""

SHARE_OF_GRADIENT = 0.3
"""Maximum operations of the rotation per step, as a fraction of those of a gradient."""

ALLOWANCE = 2e7
"""Number of operations per step that is always allowed, since it takes little time."""

MEMORY_SHARE = 5
"""Bases and covariances of a matrix hold at most this many numbers per coordinate.

Five float32 numbers are 20 bytes, as much as the rest of the state in `vsgd.torch`. A square matrix needs 4 numbers, a
matrix twice as long as wide 5, so both have full bases. Without a limit, a matrix of 2,048 × 8 would need 512.
"""

MEMORY_ALLOWANCE = 2 * 256 * 256
"""Bases and covariances of all matrices may hold this many numbers, since that is little memory: those of width 256."""

MAX_ASPECT = 4
"""Maximum size of a basis relative to the other side of the matrix.

The rank of a gradient is at most the width of the short side, and a covariance averages over few gradients. Further
eigenvectors would depend on rounding errors.
"""

MEMORY_BOUND = 64
"""Products with smaller full bases are limited by memory bandwidth. They take as long as those of about this size."""


class Basis(NamedTuple):
    """The bases and their covariances, for the left and for the right side; None for a side without a basis."""

    left: Side
    left_cov: Side
    right: Side
    right_cov: Side


def is_full(q: Side) -> bool:
    """Return whether a basis is full, not only the leading directions."""
    return bool(q.shape[-1] == q.shape[-2])


def halves(q: Side) -> tuple[Side, Side]:
    """Return V and N of a basis of leading directions."""
    rank = q.shape[-1] // 2
    return q[..., :rank], q[..., rank:]


def into(values: Matrix, basis: Basis) -> Matrix:
    """Return Q_Lᵀ X Q_R for X of shape … × rows × columns."""
    return _rotated(values, basis, transposed=False)


def back(values: Matrix, basis: Basis) -> Matrix:
    """Return Q_L X Q_Rᵀ for X of shape … × rows × columns."""
    return _rotated(values, basis, transposed=True)


def _rotated(values: Matrix, basis: Basis, transposed: bool) -> Matrix:
    """Return Q_Lᵀ X Q_R or, with `transposed` bases, Q_L X Q_Rᵀ. X is not transposed, since JAX would copy it."""
    left, right = basis.left, basis.right
    if left is not None and is_full(left):
        values = (left if transposed else left.mT) @ values
    elif left is not None:
        first, second = factors(left, transposed)
        values = values - second @ (first.mT @ values)
    if right is not None and is_full(right):
        values = values @ (right.mT if transposed else right)
    elif right is not None:
        first, second = factors(right, transposed)
        values = values - values @ first @ second.mT
    return values


def factors(q: Side, transposed: bool) -> tuple[Side, Side]:
    """Return A and B in X Q = X − X A Bᵀ for a basis of leading directions, or in X Qᵀ = X − X A Bᵀ."""
    v, n = halves(q)
    return (v, n) if transposed else (n, v)


def leading(q: Side, xp: Any) -> Side:
    """Return U, the first columns of a basis of leading directions."""
    v, n = halves(q)
    return unit_columns(n, xp) - n @ v[..., : v.shape[-1], :].mT


def unit_columns(like: Side, xp: Any) -> Side:
    """Return the first columns of the identity, with the shape of `like`."""
    return xp.tril(xp.triu(xp.ones_like(like)))


def is_covariance_step(steps: Scalar) -> Mask:
    """Return whether a step updates the covariances. `steps` is the number of steps before it."""
    return (steps < FIRST_STEPS) | (steps % OBSERVE_INTERVAL == 0)


def is_refresh_step(steps: Scalar) -> Mask:
    """Return whether a step updates the basis. Such a step also updates the covariances."""
    return (steps < FIRST_STEPS) | (steps % REFRESH_INTERVAL == 0)


def updated_covariance(cov: Side, q: Side, side: Matrix, steps: Scalar, xp: Any) -> Side:
    """Return the covariance C after a gradient is added, or C U if the basis has leading directions only.

    Args:
        cov: the moving average so far.
        q: the basis.
        side: the gradient as a matrix whose rows are the side of the covariance.
        steps: number of steps before this one.
        xp: the library.
    """
    other = side.mT if is_full(q) else side.mT @ leading(q, xp)
    return ema(cov, side @ other, covariance_weight(steps))


def covariance_weight(steps: Scalar) -> Scalar:
    """Return the weight with which a gradient enters the covariances if `steps` came before it."""
    usual = (steps < FIRST_STEPS) * (1 - DECAY) + (steps >= FIRST_STEPS) * (1 - DECAY**OBSERVE_INTERVAL)
    plain = 1 / (steps + 1)
    return (plain > usual) * plain + (plain <= usual) * usual


def rotated_basis(q: Side, cov: Side, steps: Scalar, xp: Any) -> Side:
    """Return a basis rotated towards the eigenvectors of its covariance by one power iteration.

    Args:
        q: the basis.
        cov: what is stored of the covariance.
        steps: number of steps before this one.
        xp: the library.
    """
    share = (steps < FIRST_STEPS) * FIRST_NULL_SHARE + (steps >= FIRST_STEPS) * NULL_SHARE
    return _rotated_full(q, cov, share, xp) if is_full(q) else _rotated_leading(q, cov, share, xp)


def _rotated_full(q: Side, cov: Side, null_share: Scalar, xp: Any) -> Side:
    scale = _positive(xp.linalg.diagonal(cov).mean(-1), xp)
    new, triangle = xp.linalg.qr(cov / scale @ q + null_share * q)
    signs = xp.sign(xp.linalg.diagonal(triangle))
    # columns keep their signs, so that the averages of a coordinate stay valid
    return new * xp.where(signs == 0, 1, signs)[..., None, :]


def _rotated_leading(q: Side, cov: Side, null_share: Scalar, xp: Any) -> Side:
    """Orthogonalize C U by Householder reflections, and write their product as 1 − N Vᵀ (compact WY form)."""
    scale = _positive(abs(cov).mean((-2, -1)), xp)
    reflections, factors = xp.geqrf(cov / scale + null_share * leading(q, xp))
    unit = unit_columns(reflections, xp)
    v = xp.tril(reflections, -1) + unit
    rank = v.shape[-1]
    overlaps = factors[..., None] * xp.triu(v.mT @ v, 1)
    # (1 + K)⁻¹ = (1 − K)(1 + K²)(1 + K⁴)… ends, because K is strictly triangular
    identity = unit[..., :rank, :]
    inverse, power, order = identity - overlaps, overlaps @ overlaps, 2
    while order < rank:
        inverse, power, order = inverse @ (identity + power), power @ power, 2 * order
    return xp.concatenate([v, v @ (inverse * factors[..., None, :])], -1)


def _positive(scale: Any, xp: Any) -> Any:
    """Return numbers per matrix as 1 × 1 matrices that can be divided by."""
    return larger(scale, float(xp.finfo(scale.dtype).tiny))[..., None, None]


# --- costs and sizes ----------------------------------------------------------------------------------------------


def columns(width: int, size: int) -> int:
    """Return the number of columns that are stored of a basis; 0 for a side without one."""
    return 0 if size == 1 else width if size == width else 2 * size


def cost(shape: tuple[int, int], sizes: tuple[int, int]) -> float:
    """Return the floating-point operations per step: rotations, covariances and power iterations."""
    products = 2 + 1 / OBSERVE_INTERVAL
    total = 0.0
    for width, size in zip(shape, sizes, strict=True):
        if size > 1:
            used = max(width, MEMORY_BOUND) if size == width else 2 * size
            total += 2 * products * shape[0] * shape[1] * used + 5 * width * size**2 / REFRESH_INTERVAL
    return total


def basis_numbers(shape: tuple[int, int], sizes: tuple[int, int]) -> int:
    """Return the number of elements of the bases and covariances of a matrix."""
    return sum(width * (columns(width, size) + size) for width, size in zip(shape, sizes, strict=True) if size > 1)


def memory_share(shapes: Sequence[tuple[int, int]]) -> float:
    """Return how many numbers per coordinate the bases and covariances of matrices may hold."""
    coordinates = sum(rows * columns for rows, columns in shapes if min(rows, columns) > 1)
    return max(MEMORY_SHARE, MEMORY_ALLOWANCE / max(coordinates, 1))


def leading_size(width: int, other: int, numbers: float = math.inf) -> int:
    """Return the number of leading directions of a side, or 1 if there is no memory for two of them.

    V and N have fewer columns than a full basis.

    Args:
        width: width of the side.
        other: width of the other side, see `MAX_ASPECT`.
        numbers: how many elements the basis and its covariance may have.
    """
    rank = min(RANK, MAX_ASPECT * other, (width - 1) // 2, numbers // (3 * width))
    return max(int(rank), 1)


def largest_sizes(shape: tuple[int, int], share: float) -> tuple[int, int]:
    """Return the largest sizes of a matrix within `WIDEST`, `MAX_ASPECT` and `share` numbers per coordinate.

    The short side has a full basis if it can, since that costs little memory. The long side has the largest size that
    fits into the rest of the allowance.
    """
    short, long = min(shape), max(shape)
    short_size = short if short <= WIDEST else leading_size(short, long)
    rest = share * short * long - basis_numbers((short, long), (short_size, 1))
    is_possible = long <= min(WIDEST, MAX_ASPECT * short) and 2 * long * long <= rest
    long_size = long if is_possible else leading_size(long, short, rest)
    return (short_size, long_size) if shape[0] <= shape[1] else (long_size, short_size)


def plan_sizes(shapes: Sequence[tuple[int, int]], gradient_flops: float, spent: float = 0.0) -> list[tuple[int, int]]:
    """Return the sizes of the bases of both sides of each matrix, within the limits on memory and on operations.

    Sides start with `largest_sizes` within `memory_share`. Then the bases with the most columns are reduced, first to
    their leading directions, until the rotations of all matrices together cost at most `SHARE_OF_GRADIENT` of a
    gradient minus `spent`, the operations already planned. Full bases of up to `MEMORY_BOUND` are not reduced to
    leading directions, because that saves no time. Instead sides keep their own coordinates (size 1): those with
    leading directions first, and the costliest of them. Both sides of matrices with a single row or column do so, too.
    """
    budget = max(SHARE_OF_GRADIENT * gradient_flops, ALLOWANCE) - spent
    share = memory_share(shapes)
    sizes = [list(largest_sizes(shape, share)) if min(shape) > 1 else [1, 1] for shape in shapes]

    def side_cost(k: int, side: int) -> float:
        only = [1, 1]
        only[side] = sizes[k][side]
        return cost(shapes[k], (only[0], only[1]))

    def entry(k: int, side: int) -> tuple[int, bool, float, int, int]:
        width, size = shapes[k][side], sizes[k][side]
        return -max(columns(width, size), MEMORY_BOUND), size == width, -side_cost(k, side), k, side

    # a heap, because a search of all sides for every reduction would take quadratic time
    queue = [entry(k, side) for k in range(len(shapes)) for side in (0, 1) if sizes[k][side] > 1]
    heapq.heapify(queue)
    total = sum((Fraction(-negative_cost) for _, _, negative_cost, _, _ in queue), Fraction(0))  # exact, in any order
    while queue and total > budget:
        _, _, negative_cost, k, side = heapq.heappop(queue)
        width, other = shapes[k][side], shapes[k][1 - side]
        is_wide = sizes[k][side] == width > MEMORY_BOUND
        sizes[k][side] = leading_size(width, other) if is_wide else 1
        total += Fraction(negative_cost) + Fraction(side_cost(k, side))
        if sizes[k][side] > 1:
            heapq.heappush(queue, entry(k, side))
    return [(left, right) for left, right in sizes]
