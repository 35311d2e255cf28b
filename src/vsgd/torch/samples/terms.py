"""The forms in which backpropagation leaves the gradients of single samples behind.

A parameter is seen as a matrix: its leading axis is the rows, all others are the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vsgd.eigenbasis import Basis, into


class Outer(NamedTuple):
    """g_j = grads_j @ inputs_j for each group of rows: linear layers and convolutions."""

    inputs: Tensor
    """samples first; n × groups × positions × columns once unfolded"""
    grads: Tensor
    """n × groups × rows × positions"""
    unfold: Callable[[Tensor], Tensor] | None = None
    """Spreads the inputs out, for some samples at a time, where that takes more room than the inputs themselves."""


class Explicit(NamedTuple):
    """g_j itself, n × parameter: where it is no larger than the activations, as for biases and norms."""

    grads: Tensor


class Lookup(NamedTuple):
    """g_j is the sum of those `grads` (K × columns) whose `sample` is j, each added to its `row`."""

    sample: Tensor
    row: Tensor
    grads: Tensor
    sparse: bool


Term = Outer | Explicit | Lookup


class Placed(NamedTuple):
    """A term of the rows lo … hi of a parameter. The parameter's gradient is the sum over its terms."""

    lo: int
    hi: int
    term: Term


def lookups_in(placed: Sequence[Placed]) -> list[Lookup]:
    """The lookups among these, with rows counted from the beginning of the parameter."""
    return [item.term._replace(row=item.term.row + item.lo) for item in placed if isinstance(item.term, Lookup)]


UNFOLDED_AT_ONCE = 16
"""Samples to unfold at a time where no exact limit on memory is needed."""

Terms = dict[Tensor, list[Placed]]
"""All that parameters went into."""

Rows = Callable[[slice], Tensor]
"""Gives the gradients of some samples and some rows: samples × rows × columns."""


def unfolded(term: Outer, samples: slice) -> tuple[Tensor, Tensor]:
    """Both factors, for some samples."""
    inputs = term.inputs[samples]
    return (inputs if term.unfold is None else term.unfold(inputs)), term.grads[samples]


def written_out(term: Term, samples: slice, columns: int) -> Rows:
    """The gradients of some samples, ready to be written out some rows at a time."""
    if isinstance(term, Explicit):
        grads = term.grads[samples].flatten(2) if term.grads.dim() > 2 else term.grads[samples].unsqueeze(-1)
        return lambda rows: grads[:, rows]
    if isinstance(term, Outer):
        inputs, output_grads = unfolded(term, samples)
        if inputs.shape[1] == 1:
            return lambda rows: output_grads[:, 0, rows] @ inputs[:, 0]
        return lambda rows: (output_grads @ inputs).flatten(1, 2)[:, rows]
    return lambda rows: scattered(term, samples, rows, columns)


def scattered(term: Lookup, samples: slice, rows: slice, columns: int) -> Tensor:
    """The looked-up rows within a window of samples and rows, zeros elsewhere."""
    sample, row = term.sample - samples.start, term.row - rows.start
    height, width = samples.stop - samples.start, rows.stop - rows.start
    inside = (sample >= 0) & (sample < height) & (row >= 0) & (row < width)
    cells = sample[inside] * width + row[inside]
    return (
        term.grads.new_zeros(height * width, columns)
        .index_add_(0, cells, term.grads[inside])
        .view(height, width, columns)
    )


def narrowed(placed: Placed, lo: int, hi: int) -> Term:
    """The part of a term that lies in the rows lo … hi, which it covers."""
    term = placed.term
    if (placed.lo, placed.hi) == (lo, hi):
        return term
    rows = slice(lo - placed.lo, hi - placed.lo)
    if isinstance(term, Explicit):
        return Explicit(term.grads[:, rows])
    if isinstance(term, Outer):
        return term._replace(grads=term.grads[:, :, rows])
    inside = (term.row >= rows.start) & (term.row < rows.stop)
    return term._replace(sample=term.sample[inside], row=term.row[inside] - rows.start, grads=term.grads[inside])


def scaled(placed: Placed, factor: float) -> Placed:
    """The same term of gradients that are `factor` times as large."""
    return placed._replace(term=placed.term._replace(grads=placed.term.grads * factor))


def rotated(placed: Placed, rows: int, basis: Basis) -> Placed | None:
    """The same term in other coordinates, if its factors can be rotated: b_j a_jᵀ becomes (Q_Lᵀ b_j)(Q_Rᵀ a_j)ᵀ."""
    term = placed.term
    if not isinstance(term, Outer) or term.grads.shape[1] > 1 or (placed.lo, placed.hi) != (0, rows):
        return None
    right = basis._replace(left=None)
    spread = term.unfold
    inputs = into(term.inputs, right) if spread is None else term.inputs
    unfold = None if spread is None else (lambda part: into(spread(part), right))
    grads = into(term.grads, basis._replace(right=None))
    return placed._replace(term=Outer(inputs, grads, unfold))


def total(term: Term, shape: torch.Size) -> Tensor:
    """Σ_j g_j, which has to be the gradient that backpropagation itself arrived at."""
    if isinstance(term, Explicit):
        return term.grads.sum(0).view(shape)
    if isinstance(term, Outer):
        summed = term.grads.new_zeros(())
        for start in range(0, len(term.grads), UNFOLDED_AT_ONCE):
            inputs, grads = unfolded(term, slice(start, start + UNFOLDED_AT_ONCE))
            summed = summed + torch.einsum("ngti,ngot->goi", inputs, grads)
        return summed.reshape(shape)
    indices, values = term.row[None], term.grads
    return torch.sparse_coo_tensor(indices, values, shape, device=values.device, check_invariants=False)
