"""Coordinates in which the covariance of a tensor's gradient is nearly diagonal: its Kronecker eigenbasis.

For a weight matrix with gradient G, L = E[G Gᵀ] and R = E[Gᵀ G] are moving averages, and Q_L and Q_R follow their
eigenvectors. The algorithm works on Q_Lᵀ G Q_R, probes by Q_L S Q_Rᵀ with random signs S, and its step is rotated back.
A convolution is a matrix of out × (in · kernel). A side may be cut into blocks of equal size, each with a basis of its
own: Q is then block-diagonal and kept as blocks × size × size.

How large the blocks may be is decided, not tuned: rotation takes at most a quarter of the operations of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

DECAY = 0.95
"""Of the moving averages L and R, per step."""

OBSERVE_INTERVAL = 5
"""L and R are updated in every so many steps, and in the first ones."""

REFRESH_INTERVAL = 10
"""The basis turns in every so many steps, and in the first ones."""

FIRST_STEPS = 5

NULL_SHARE = 1e-6
"""Added to the covariance, in units of its mean eigenvalue: directions without gradients stay where they are."""

WIDEST = 2048
"""A wider side is always cut into blocks: its basis would take longer to follow than it is worth."""

SHARE_OF_GRADIENT = 0.25
ALLOWANCE = 2e7
"""Operations that are always allowed: fewer take no time worth saving."""


MEMORY_BOUND = 64
"""Products with smaller blocks wait for memory: they take as long as with blocks of about this size."""


class Basis(NamedTuple):
    """Q and the covariance that it follows, for the left and for the right side; None where a side stays as it is."""

    left: Tensor | None
    left_cov: Tensor | None
    right: Tensor | None
    right_cov: Tensor | None


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix."""
    return (len(parameter), math.prod(parameter.shape[1:])) if parameter.dim() > 1 else (parameter.numel(), 1)


def basis_of(state: dict[str, Tensor]) -> Basis:
    """The basis that the state of a parameter has."""
    names = ("left_basis", "left_cov", "right_basis", "right_cov")
    return Basis(*(state.get(name) for name in names))


def new_basis(parameter: Tensor, blocks: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """State of a basis before its first gradient: the identity, in blocks of these sizes; 1 leaves a side as it is."""
    state = {}
    for name, width, size in zip(("left", "right"), matrix_shape(parameter), blocks, strict=True):
        if size > 1:
            eye = torch.eye(size, dtype=dtype, device=parameter.device)
            state[f"{name}_basis"] = eye.repeat(width // size, 1, 1)
            state[f"{name}_cov"] = torch.zeros_like(state[f"{name}_basis"])
    return state


def into(values: Tensor, basis: Basis) -> Tensor:
    """Q_Lᵀ X Q_R for X of shape … × rows × columns."""
    if basis.left is not None:
        values = _left(values, basis.left.mT)
    return values if basis.right is None else _right(values, basis.right)


def back(values: Tensor, basis: Basis) -> Tensor:
    """Q_L X Q_Rᵀ for X of shape … × rows × columns."""
    if basis.left is not None:
        values = _left(values, basis.left)
    return values if basis.right is None else _right(values, basis.right.mT)


def _left(values: Tensor, q: Tensor) -> Tensor:
    if len(q) == 1:
        return torch.matmul(q[0], values)
    return torch.matmul(q, values.unflatten(-2, (len(q), -1))).flatten(-3, -2)


def _right(values: Tensor, q: Tensor) -> Tensor:
    if len(q) == 1:
        return torch.matmul(values, q[0])
    blocks = values.unflatten(-1, (len(q), -1)).transpose(-3, -2)  # one product per block, not one per row
    return torch.matmul(blocks, q).transpose(-3, -2).flatten(-2)


def observes(steps: int) -> bool:
    """Do the covariances take in the gradient of a step, when there were so many `steps` before it?"""
    return steps < FIRST_STEPS or steps % OBSERVE_INTERVAL == 0


def turns(steps: int) -> bool:
    """Does the basis turn after that step? Only where covariances take it in."""
    return steps < FIRST_STEPS or steps % REFRESH_INTERVAL == 0


def observe(basis: Basis, grad: Tensor, steps: int) -> None:
    """Let a gradient, as a matrix, enter the covariances; `steps` came before it."""
    weight = max(1 - DECAY ** (1 if steps < FIRST_STEPS else OBSERVE_INTERVAL), 1 / (steps + 1))
    for cov, side in ((basis.left_cov, grad), (basis.right_cov, grad.mT)):
        if cov is not None:
            rows = side.unflatten(0, (len(cov), -1))
            cov.lerp_(rows @ rows.mT, weight)


def refresh(basis: Basis) -> None:
    """Turn the basis towards the eigenvectors by one power iteration."""
    for q, cov in ((basis.left, basis.left_cov), (basis.right, basis.right_cov)):
        if q is not None and cov is not None:
            scale = cov.diagonal(dim1=-2, dim2=-1).mean().clamp(min=torch.finfo(cov.dtype).tiny)
            turned, triangle = torch.linalg.qr(cov / scale @ q + NULL_SHARE * q)
            signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
            # a column keeps its side, so that the averages of its coordinate stay about the same thing
            q.copy_(turned * torch.where(signs == 0, 1, signs)[..., None, :])


def describe(parameter: Tensor, state: dict[str, Tensor]) -> str:
    """What was rotated, and why not all of it, in a few words."""
    if min(matrix_shape(parameter)) == 1:
        return "vector, as it is"
    if state["seen"].numel() > 1:
        return "table, row by row"
    found, widths = basis_of(state), matrix_shape(parameter)
    sizes = [1 if q is None else q.shape[-1] for q in (found.left, found.right)]
    if sizes == [1, 1]:
        return "as it is: a basis would cost too much"
    if tuple(sizes) == widths:
        return f"eigenbasis {sizes[0]} x {sizes[1]}"
    return f"blocks of {sizes[0]} x {sizes[1]}: all of {widths[0]} x {widths[1]} would cost too much"


# --- what it may cost ---------------------------------------------------------------------------------------------


def cost(shape: tuple[int, int], blocks: tuple[int, int]) -> float:
    """Floating-point operations per step: into the basis, back, covariances and power iterations."""
    rows, columns = shape
    products = 2 + 1 / OBSERVE_INTERVAL
    return sum(
        2 * products * rows * columns * max(size, MEMORY_BOUND) + 5 * width * size**2 / REFRESH_INTERVAL
        for width, size in zip(shape, blocks, strict=True)
        if size > 1
    )


def cost_of(parameter: Tensor, state: dict[str, Tensor]) -> float:
    """What the basis of a parameter costs now."""
    sizes = [state[name].shape[-1] if name in state else 1 for name in ("left_basis", "right_basis")]
    return cost(matrix_shape(parameter), (sizes[0], sizes[1]))


def next_smaller(width: int, size: int) -> int:
    """The largest divisor of `width` below `size`."""
    return max(d for d in range(1, size) if width % d == 0)


def plan(parameters: Iterable[Tensor], gradient_flops: float, spent: float = 0.0) -> dict[Tensor, tuple[int, int]]:
    """Block sizes of both sides of each matrix, so that all rotations together cost no more than they may.

    The costliest side is cut into smaller blocks until they do. Sides of one coordinate, and what would be cut into
    blocks of one, stay as they are.
    """
    budget = max(SHARE_OF_GRADIENT * gradient_flops, ALLOWANCE) - spent
    shapes = {p: matrix_shape(p) for p in parameters if p.dim() > 1 and min(matrix_shape(p)) > 1}
    blocks = {p: [w if w <= WIDEST else next_smaller(w, WIDEST + 1) for w in shape] for p, shape in shapes.items()}

    def side_cost(p: Tensor, k: int) -> float:
        only = [1, 1]
        only[k] = blocks[p][k]
        return cost(shapes[p], (only[0], only[1]))

    costs = {(p, k): side_cost(p, k) for p in shapes for k in (0, 1)}
    while costs and math.fsum(costs.values()) > budget:
        p, k = max(costs, key=lambda side: costs[side])
        if costs[p, k] == 0:
            break
        smaller = next_smaller(shapes[p][k], blocks[p][k])
        blocks[p][k] = smaller if blocks[p][k] > MEMORY_BOUND else 1  # still smaller blocks would save nothing
        costs[p, k] = side_cost(p, k)
    return {p: (sizes[0], sizes[1]) for p, sizes in blocks.items()}
