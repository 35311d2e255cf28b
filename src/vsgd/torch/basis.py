"""The Kronecker eigenbasis of `vsgd.eigenbasis` for torch tensors: matrices of equal shapes together, in place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vsgd.eigenbasis import Basis, cost, covariance_weight, factors, is_full, leading, plan_sizes, rotated_basis
from vsgd.torch.devices import for_factorization, multiplies_bfloat16
from vsgd.torch.state import BASIS_FIELDS, matrix_shape


def basis_of(state: dict[str, Tensor]) -> Basis:
    """Return the basis in the state of a parameter."""
    return Basis(*(state.get(name) for name in BASIS_FIELDS))


class Stack(NamedTuple):
    """Matrices of one shape whose bases have equal sizes, one after the other in memory."""

    parameters: slice
    """Which parameters of the block these are."""
    coordinates: slice
    """Where their coordinates are."""
    shape: tuple[int, int, int]
    """Number of matrices, rows and columns."""
    basis: Basis
    """Of all matrices: each part is matrices × width × columns."""

    def of_one(self, k: int) -> Stack:
        """Return the k-th matrix alone."""
        _, rows, columns = self.shape
        start, size = self.coordinates.start + k * rows * columns, rows * columns
        basis = Basis(*(None if part is None else part[k : k + 1] for part in self.basis))
        place = self.parameters.start + k
        return Stack(slice(place, place + 1), slice(start, start + size), (1, rows, columns), basis)


def stack_bases(shapes: Sequence[tuple[int, int]], bases: Sequence[Basis]) -> list[Stack]:
    """Stack the matrices that have bases. They come first, and those of equal shape and sizes are adjacent.

    Bases become copies in memory that is contiguous over a stack.
    """
    stacks, place, start = [], 0, 0
    keys = [stack_key(*each) for each in zip(shapes, bases, strict=True)]
    for key, same in itertools.groupby(key for key in keys if key is not None):
        count, (rows, columns) = len(list(same)), key[0]
        parts = zip(*bases[place : place + count], strict=True)
        basis = Basis(*(None if each[0] is None else torch.stack(each) for each in parts))
        size = count * rows * columns
        stacks.append(Stack(slice(place, place + count), slice(start, start + size), (count, rows, columns), basis))
        place, start = place + count, start + size
    return stacks


def stack_key(shape: tuple[int, int], basis: Basis) -> Any:
    """Return a key that is equal for matrices that can be stacked; None for those without a basis."""
    sizes = [None if q is None else q.shape[-1] for q in (basis.left, basis.right)]
    return None if sizes == [None, None] else (shape, *sizes)


MIN_COARSE = 1 << 22
"""Products of fewer operations are computed in float32: conversions to bfloat16 would take as long as they save."""


class Product(NamedTuple):
    """A batched matrix product."""

    left: Tensor
    right: Tensor
    out: Tensor
    """Memory for the result."""
    is_coarse: bool
    """Whether it is computed in bfloat16."""
    minuend: Tensor | None = None
    """If given, the product is subtracted from it."""


def product(left: Tensor, right: Tensor, out: Tensor) -> Product:
    """Return a product that is computed in bfloat16 if that takes less time, conversions included."""
    operations = 2 * left.numel() * right.shape[-1]
    is_large = operations >= MIN_COARSE and left.dtype == torch.float32
    return Product(left, right, out, is_large and multiplies_bfloat16(left.device.type))


def rotation(stack: Stack, values: Tensor, half: Tensor, out: Tensor, backwards: bool = False) -> list[Product]:
    """Return the products that rotate matrices into their bases, or back from these.

    Args:
        stack: the matrices.
        values: all coordinates of the block; flat, as `half` and `out` are.
        half: memory for intermediate results.
        out: memory for the result.
        backwards: whether `values` are in the coordinates of the bases.
    """
    values, half, out = (each[stack.coordinates].view(stack.shape) for each in (values, half, out))
    left, right = stack.basis.left, stack.basis.right
    products: list[Product] = []
    if left is not None:
        target = out if right is None else half
        if is_full(left):
            products.append(product(left if backwards else left.mT, values, target))
        else:
            first, second = factors(left, backwards)
            inner = values.new_empty(len(values), first.shape[-1], values.shape[-1])
            products += Product(first.mT, values, inner, False), Product(second, inner, target, False, values)
        values = target
    if right is not None:
        if is_full(right):
            products.append(product(values, right.mT if backwards else right, out))
        else:
            first, second = factors(right, backwards)
            inner = values.new_empty(*values.shape[:2], first.shape[-1])
            products += Product(values, first, inner, False), Product(inner, second.mT, out, False, values)
    return products


def multiply(products: Iterable[Product]) -> None:
    """Compute batched matrix products. Autocast does not change them, because their results have memory.

    Large products are computed in bfloat16 where that is faster. The rounding error is about 0.2 % of the RMS of a
    matrix. `docs/laboratory.md` compares final losses with both precisions.
    """
    for left, right, out, is_coarse, minuend in products:
        if minuend is not None:
            torch.baddbmm(minuend, left, right, alpha=-1, out=out)
        elif is_coarse:
            rounded = torch.empty_like(out, dtype=torch.bfloat16)
            out.copy_(torch.bmm(left.to(torch.bfloat16), right.to(torch.bfloat16), out=rounded))
        else:
            torch.bmm(left, right, out=out)


def update_covariances(basis: Basis, grads: Tensor, steps: float) -> None:
    """Let the gradients of one or of several matrices enter the covariances; `steps` came before them."""
    weight = float(covariance_weight(steps))
    sides = (basis.left, basis.left_cov, grads), (basis.right, basis.right_cov, grads.mT)
    for q, cov, side in sides:
        if q is not None:
            other = side.mT if is_full(q) else side.mT @ leading(q, torch)
            cov.baddbmm_(side, other, beta=1 - weight, alpha=weight)


def refresh(basis: Basis, steps: float) -> None:
    """Rotate bases towards the eigenvectors by one power iteration; `steps` came before this one."""
    for q, cov in ((basis.left, basis.left_cov), (basis.right, basis.right_cov)):
        if q is not None:
            q.copy_(rotated_basis(for_factorization(q), for_factorization(cov), steps, torch))


def describe(parameter: Tensor, state: dict[str, Tensor]) -> str:
    """Return a short text: which sides of a parameter are rotated, and why not all."""
    if min(matrix_shape(parameter.shape)) == 1:
        return "vector, as it is"
    if state["seen"].numel() > 1:
        return "table, row by row"
    widths, sizes = matrix_shape(parameter.shape), sizes_of(state)
    if sizes == (1, 1):
        return "as it is: a basis would take too much time"
    if sizes == widths:
        return f"eigenbasis {sizes[0]} x {sizes[1]}"
    return f"{sizes[0]} x {sizes[1]} directions: {widths[0]} x {widths[1]} would take too much time, memory or data"


def sizes_of(state: dict[str, Tensor]) -> tuple[int, int]:
    """Return the sizes of the basis in the state of a parameter; 1 for a side without one."""
    left, right = (state[name].shape[-1] if name in state else 1 for name in ("left_cov", "right_cov"))
    return left, right


def cost_of(parameter: Tensor, state: dict[str, Tensor]) -> float:
    """Return the floating-point operations per step of the basis of a parameter."""
    return cost(matrix_shape(parameter.shape), sizes_of(state))


def plan(parameters: Iterable[Tensor], gradient_flops: float, spent: float = 0.0) -> dict[Tensor, tuple[int, int]]:
    """Return the sizes of the bases of each matrix, within the limit on operations of all rotations."""
    matrices = [p for p in parameters if p.dim() > 1 and min(matrix_shape(p.shape)) > 1]
    sizes = plan_sizes([matrix_shape(p.shape) for p in matrices], gradient_flops, spent)
    return dict(zip(matrices, sizes, strict=True))


def flop_counter() -> FlopCounterMode:
    """Return a counter of floating-point operations that includes recurrent layers, unlike torch's own.

    A layer that is one operation for torch (an LSTM on a CPU, any recurrent layer with cuDNN) multiplies its matrices
    with every position of a sequence. The backward pass needs twice the operations.
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
    """Return the operations of a recurrent layer from the shapes of its input sequence and weights, without biases."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) > 1)
