"""Per-sample gradients in the forms in which backpropagation computes them, and sums over samples.

A parameter is viewed as a matrix: its first axis is the rows, all others are the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.eigenbasis import Basis, into
from vsgd.torch.coordinates import precision


class SampleError(RuntimeError):
    """Per-sample gradients cannot be computed from this recording. The message says why, and what to do."""


Rows = Callable[[slice], Tensor]
"""Returns gradients for a range of rows: samples × rows × columns."""


class Outer(NamedTuple):
    """g_j = grads_j @ inputs_j for each group of rows: linear layers and convolutions."""

    inputs: Tensor
    """samples first; n × groups × positions × columns once unfolded"""
    grads: Tensor
    """n × groups × rows × positions"""
    unfold: Callable[[Tensor], Tensor] | None = None
    """Unfolds the inputs of some samples at a time, where unfolded inputs take more memory than the inputs."""

    @property
    def is_grouped(self) -> bool:
        return self.grads.shape[1] > 1

    def factors(self, samples: slice) -> tuple[Tensor, Tensor]:
        """Return both factors for some samples."""
        inputs = self.inputs[samples]
        return (inputs if self.unfold is None else self.unfold(inputs)), self.grads[samples]

    def written_out(self, samples: slice, columns: int) -> Rows:
        inputs, grads = self.factors(samples)
        if not self.is_grouped:
            return lambda rows: grads[:, 0, rows] @ inputs[:, 0]
        return lambda rows: (grads @ inputs).flatten(1, 2)[:, rows]

    def narrowed(self, rows: slice) -> Outer:
        return self._replace(grads=self.grads[:, :, rows])

    def total(self, shape: torch.Size) -> Tensor:
        summed = self.grads.new_zeros(())
        for start in range(0, len(self.grads), UNFOLDED_AT_ONCE):
            inputs, grads = self.factors(slice(start, start + UNFOLDED_AT_ONCE))
            summed = summed + torch.einsum("ngti,ngot->goi", inputs, grads)
        return summed.reshape(shape)


class Explicit(NamedTuple):
    """g_j itself, n × parameter. It is no larger than the activations for biases and norms."""

    grads: Tensor

    def written_out(self, samples: slice, columns: int) -> Rows:
        grads = self.grads[samples].flatten(2) if self.grads.dim() > 2 else self.grads[samples].unsqueeze(-1)
        return lambda rows: grads[:, rows]

    def narrowed(self, rows: slice) -> Explicit:
        return Explicit(self.grads[:, rows])

    def total(self, shape: torch.Size) -> Tensor:
        return self.grads.sum(0).view(shape)


class Lookup(NamedTuple):
    """g_j is the sum of those `grads` (K × columns) whose `sample` is j, each added to its `row`."""

    sample: Tensor
    row: Tensor
    grads: Tensor
    sparse: bool

    def written_out(self, samples: slice, columns: int) -> Rows:
        def scattered(rows: slice) -> Tensor:
            sample, row = self.sample - samples.start, self.row - rows.start
            height, width = samples.stop - samples.start, rows.stop - rows.start
            inside = (sample >= 0) & (sample < height) & (row >= 0) & (row < width)
            cells = sample[inside] * width + row[inside]
            grads = self.grads.new_zeros(height * width, columns).index_add_(0, cells, self.grads[inside])
            return grads.view(height, width, columns)

        return scattered

    def narrowed(self, rows: slice) -> Lookup:
        inside = (self.row >= rows.start) & (self.row < rows.stop)
        return self._replace(sample=self.sample[inside], row=self.row[inside] - rows.start, grads=self.grads[inside])

    def total(self, shape: torch.Size) -> Tensor:
        device = self.grads.device
        return torch.sparse_coo_tensor(self.row[None], self.grads, shape, device=device, check_invariants=False)


Term = Outer | Explicit | Lookup
"""The gradients of all samples from one use of a parameter. Each kind of term has three methods:

`written_out(samples, columns)` returns a function that writes out the gradients of some samples, some rows at a time.
`narrowed(rows)` returns the part of the term in some rows.
`total(shape)` returns Σ_j g_j.
"""

UNFOLDED_AT_ONCE = 16
"""Samples to unfold at a time where no exact limit on memory is needed."""


class Placed(NamedTuple):
    """A term of the rows lo … hi of a parameter. The parameter's gradient is the sum over its terms."""

    lo: int
    hi: int
    term: Term

    def narrowed(self, lo: int, hi: int) -> Term:
        """Return the part of the term in the rows lo … hi, which it covers."""
        return self.term if (self.lo, self.hi) == (lo, hi) else self.term.narrowed(slice(lo - self.lo, hi - self.lo))


def lookups_in(placed: Sequence[Placed]) -> list[Lookup]:
    """Return the lookups among these, with rows counted from the beginning of the parameter."""
    return [item.term._replace(row=item.term.row + item.lo) for item in placed if isinstance(item.term, Lookup)]


def scaled(placed: Placed, factor: float | Tensor) -> Placed:
    """Return the term with gradients multiplied by a factor, or by one factor for each sample."""
    term = placed.term
    if isinstance(factor, Tensor):
        factor = factor[term.sample] if isinstance(term, Lookup) else factor
        factor = factor.to(term.grads.dtype).view(-1, *[1] * (term.grads.dim() - 1))
    return placed._replace(term=term._replace(grads=term.grads * factor))


def has_factors(placed: Placed, rows: int) -> bool:
    """Return whether a term has factors that can be rotated: outer products of whole `rows` and columns."""
    term = placed.term
    return isinstance(term, Outer) and not term.is_grouped and (placed.lo, placed.hi) == (0, rows)


def rotated(placed: Placed, basis: Basis) -> Placed:
    """Return a term that has factors in the coordinates of a basis: (Q_Lᵀ b_j)(Q_Rᵀ a_j)ᵀ for b_j a_jᵀ."""
    term = placed.term
    assert isinstance(term, Outer)
    left, right = basis._replace(right=None), basis._replace(left=None)
    grads, unfold = into(term.grads, left), term.unfold
    if unfold is None:
        return placed._replace(term=Outer(into(term.inputs, right), grads))
    return placed._replace(term=Outer(term.inputs, grads, lambda part: into(unfold(part), right)))


class SampleSums(NamedTuple):
    """Sums over the n samples of a minibatch, each shaped like the parameter.

    g_j is the gradient of the loss of sample j alone, g'_j the same at the shifted parameters.
    """

    grad_sq: Tensor
    """Σ_j g_j²"""
    diff_abs: Tensor | None
    """Σ_j |g_j − g'_j|, if there was a second recording"""
    diff_sq: Tensor | None
    """Σ_j (g_j − g'_j)²"""
    count: Tensor | None  # type: ignore[assignment]  # hides tuple.count, which is not used
    """Number of samples with a gradient: None for all, otherwise one number per row, shaped to broadcast."""


class RowSums(NamedTuple):
    """Sums of the rows of a sparse table that were looked up. The sums of other rows are zero."""

    rows: Tensor
    sums: SampleSums


def empty_sums(like: Tensor, pair: bool) -> SampleSums:
    """Return zeros shaped like the parameter. Half precision has too few digits to add up squares."""

    def zeros() -> Tensor:
        return torch.zeros(like.shape, dtype=precision(like.dtype), device=like.device)

    return SampleSums(zeros(), zeros() if pair else None, zeros() if pair else None, None)


def of_samples(here: Tensor, there: Tensor | None = None) -> SampleSums:
    """Return the sums over the leading axis of written-out gradients. Overwrites both arguments."""
    if there is None:
        return SampleSums(here.square_().sum(0), None, None, None)
    diff = there.sub_(here).abs_()
    grad_sq, diff_abs = here.square_().sum(0), diff.sum(0)
    return SampleSums(grad_sq, diff_abs, diff.square_().sum(0), None)


def stacked_rows(blocks: list[SampleSums], shape: torch.Size) -> SampleSums:
    """Return the sums of all rows from the sums of consecutive blocks of rows."""

    def stack(parts: Sequence[Tensor | None]) -> Any:
        rows = [part.reshape(-1, *shape[1:]) for part in parts if part is not None]
        return torch.cat(rows) if len(rows) > 1 else rows[0] if rows else None

    return SampleSums(*map(stack, zip(*blocks, strict=True)))


def add_rows(total: SampleSums, rows: slice | EllipsisType, part: SampleSums) -> None:
    """Add the sums of some rows, in place."""
    for whole, piece in zip(total[:3], part[:3], strict=True):
        if whole is not None and piece is not None:
            whole[rows] += piece.view_as(whole[rows])
