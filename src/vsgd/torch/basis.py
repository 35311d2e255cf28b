"""The Kronecker eigenbasis of `vsgd.eigenbasis` for torch tensors, updated in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vsgd.eigenbasis import Basis, cost, plan_blocks, rotated_basis, updated_covariance
from vsgd.torch.devices import for_factorization
from vsgd.torch.state import matrix_shape


def basis_of(state: dict[str, Tensor]) -> Basis:
    """The basis that the state of a parameter has."""
    names = ("left_basis", "left_cov", "right_basis", "right_cov")
    return Basis(*(state.get(name) for name in names))


def update_covariances(basis: Basis, grad: Tensor, steps: int) -> None:
    """Let a gradient, as a matrix, enter the covariances; `steps` came before it."""
    for cov, side in ((basis.left_cov, grad), (basis.right_cov, grad.mT)):
        if cov is not None:
            cov.copy_(updated_covariance(cov, side, steps))


def refresh(basis: Basis) -> None:
    """Rotate the basis towards the eigenvectors by one power iteration."""
    for q, cov in ((basis.left, basis.left_cov), (basis.right, basis.right_cov)):
        if q is not None:
            q.copy_(rotated_basis(for_factorization(q), for_factorization(cov), torch))


def describe(parameter: Tensor, state: dict[str, Tensor]) -> str:
    """What was rotated, and why not all of it, in a few words."""
    if min(matrix_shape(parameter.shape)) == 1:
        return "vector, as it is"
    if state["seen"].numel() > 1:
        return "table, row by row"
    found, widths = basis_of(state), matrix_shape(parameter.shape)
    sizes = [1 if q is None else q.shape[-1] for q in (found.left, found.right)]
    if sizes == [1, 1]:
        return "as it is: a basis would take too much time"
    if tuple(sizes) == widths:
        return f"eigenbasis {sizes[0]} x {sizes[1]}"
    return f"blocks of {sizes[0]} x {sizes[1]}: {widths[0]} x {widths[1]} would take too much time or memory"


def cost_of(parameter: Tensor, state: dict[str, Tensor]) -> float:
    """What the basis of a parameter costs now."""
    sizes = [state[name].shape[-1] if name in state else 1 for name in ("left_basis", "right_basis")]
    return cost(matrix_shape(parameter.shape), (sizes[0], sizes[1]))


def plan(parameters: Iterable[Tensor], gradient_flops: float, spent: float = 0.0) -> dict[Tensor, tuple[int, int]]:
    """Block sizes of both sides of each matrix, so that all rotations together cost no more than they may."""
    matrices = [p for p in parameters if p.dim() > 1 and min(matrix_shape(p.shape)) > 1]
    blocks = plan_blocks([matrix_shape(p.shape) for p in matrices], gradient_flops, spent)
    return dict(zip(matrices, blocks, strict=True))


def flop_counter() -> FlopCounterMode:
    """Counts floating-point operations, those of recurrent layers included, of which torch's own counter knows nothing.

    A layer that is one operation for torch (an LSTM on a CPU, any recurrent layer with cuDNN) multiplies its matrices
    with every position of a sequence; the backward pass takes twice as long.
    """

    def one_layer(x: Sequence[int], *arguments: Any, **_: Any) -> int:
        return _recurrent_flops(x, arguments[:2])

    def all_layers(x: Sequence[int], weights: Sequence[Sequence[int]], *arguments: Any, **_: Any) -> int:
        return _recurrent_flops(x, weights)

    ops = torch.ops.aten
    forward = {ops.mkldnn_rnn_layer: one_layer, ops._cudnn_rnn: all_layers}
    backward = {ops.mkldnn_rnn_layer_backward: one_layer, ops._cudnn_rnn_backward: all_layers}
    twice = {op: lambda *shapes, count=count, **rest: 2 * count(*shapes, **rest) for op, count in backward.items()}
    return FlopCounterMode(display=False, custom_mapping={**forward, **twice})


def _recurrent_flops(x: Sequence[int], weights: Sequence[Sequence[int]]) -> int:
    """From the shapes of a sequence and of the weights it meets, of which vectors do not count."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) > 1)
