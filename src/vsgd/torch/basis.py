"""The Kronecker eigenbasis of `vsgd.eigenbasis` for torch tensors, updated in place."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from vsgd.eigenbasis import Basis, cost, observed, plan_blocks, turned


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


def observe(basis: Basis, grad: Tensor, steps: int) -> None:
    """Let a gradient, as a matrix, enter the covariances; `steps` came before it."""
    for cov, side in ((basis.left_cov, grad), (basis.right_cov, grad.mT)):
        if cov is not None:
            cov.copy_(observed(cov, side, steps))


def refresh(basis: Basis) -> None:
    """Turn the basis towards the eigenvectors by one power iteration."""
    for q, cov in ((basis.left, basis.left_cov), (basis.right, basis.right_cov)):
        if q is not None:
            q.copy_(turned(q, cov, torch))


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


def cost_of(parameter: Tensor, state: dict[str, Tensor]) -> float:
    """What the basis of a parameter costs now."""
    sizes = [state[name].shape[-1] if name in state else 1 for name in ("left_basis", "right_basis")]
    return cost(matrix_shape(parameter), (sizes[0], sizes[1]))


def plan(parameters: Iterable[Tensor], gradient_flops: float, spent: float = 0.0) -> dict[Tensor, tuple[int, int]]:
    """Block sizes of both sides of each matrix, so that all rotations together cost no more than they may."""
    matrices = [p for p in parameters if p.dim() > 1 and min(matrix_shape(p)) > 1]
    blocks = plan_blocks([matrix_shape(p) for p in matrices], gradient_flops, spent)
    return dict(zip(matrices, blocks, strict=True))
