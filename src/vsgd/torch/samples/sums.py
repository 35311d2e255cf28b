"""What a parameter's samples sum up to."""

from __future__ import annotations

from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor


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
    count: Tensor | None  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    """How many samples took part: None for all, otherwise one number per row, shaped to broadcast."""


class RowSums(NamedTuple):
    """The sums of the rows of a sparse table that were looked up; all other rows' sums are zero."""

    rows: Tensor
    sums: SampleSums


def empty_sums(like: Tensor, pair: bool) -> SampleSums:
    """Zeros shaped like the parameter, in a precision that sums can be kept in."""

    def zeros() -> Tensor:
        return torch.zeros(like.shape, dtype=sum_dtype(like.dtype), device=like.device)

    return SampleSums(zeros(), zeros() if pair else None, zeros() if pair else None, None)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision has too few digits to add up squares in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def of_samples(here: Tensor, there: Tensor | None = None) -> SampleSums:
    """The sums over the leading axis of gradients that are written out; overwrites both arguments."""
    if there is None:
        return SampleSums(here.square_().sum(0), None, None, None)
    diff = there.sub_(here).abs_()
    grad_sq, diff_abs = here.square_().sum(0), diff.sum(0)
    return SampleSums(grad_sq, diff_abs, diff.square_().sum(0), None)


def stacked_rows(blocks: list[SampleSums], shape: torch.Size) -> SampleSums:
    """The sums of all rows from those of consecutive ones."""

    def stack(parts: tuple[Tensor | None, ...]) -> Tensor | None:
        given = [part.reshape(-1, *shape[1:]) for part in parts if part is not None]
        return None if not given else given[0] if len(given) == 1 else torch.cat(given)

    grad_sq, diff_abs, diff_sq, count = map(stack, zip(*blocks, strict=True))
    assert grad_sq is not None
    return SampleSums(grad_sq, diff_abs, diff_sq, count)


def add_rows(total: SampleSums, rows: slice | EllipsisType, part: SampleSums) -> None:
    """Add the sums of some rows, in place."""
    for whole, piece in zip(total[:3], part[:3], strict=True):
        if whole is not None and piece is not None:
            whole[rows] += piece.view_as(whole[rows])
