"""Embeddings and bags of them: only the rows that were looked up are ever touched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from vsgd.torch.samples.sums import RowSums, SampleSums, empty_sums
from vsgd.torch.samples.terms import Lookup


def lookup_sums(table: Tensor, recordings: Sequence[Sequence[Lookup]]) -> SampleSums | RowSums:
    """The sums of the rows of a table. A row's count is the number of samples that looked it up.

    A sample may look a row up several times, in several places: its gradient is the sum over all of them, so the
    pairs (sample, row) are collected first. Two recordings need not look up the same rows.
    """
    lookups = list(chain(*recordings))
    pairs, place = torch.unique(
        torch.cat([term.sample * len(table) + term.row for term in lookups]), return_inverse=True
    )
    places = iter(place.split([len(term.row) for term in lookups]))
    rows, row_of_pair = torch.unique(pairs % len(table), return_inverse=True)

    def collected(terms: Sequence[Lookup]) -> Tensor:
        grads = lookups[0].grads.new_zeros(len(pairs), *table.shape[1:])
        for term in terms:
            grads.index_add_(0, next(places), term.grads)
        return grads

    def by_row(values: Tensor) -> Tensor:
        return values.new_zeros(len(rows), *values.shape[1:]).index_add_(0, row_of_pair, values)

    grads = [collected(terms) for terms in recordings]
    count = by_row(torch.ones_like(grads[0][:, :1]))
    touched = SampleSums(by_row(grads[0].square()), None, None, count)
    if len(grads) > 1:
        diff = (grads[0] - grads[1]).abs()
        touched = touched._replace(diff_abs=by_row(diff), diff_sq=by_row(diff.square()))
    return RowSums(rows, touched) if all(term.sparse for term in lookups) else spread(table, rows, touched)


def spread(table: Tensor, rows: Tensor, touched: SampleSums) -> SampleSums:
    """The sums of the touched rows, as sums of the whole table."""
    whole = empty_sums(table, pair=touched.diff_abs is not None)
    whole = whole._replace(count=whole.grad_sq.new_zeros(len(table), 1))
    for target, values in zip(whole, touched, strict=True):
        if target is not None and values is not None:
            target[rows] = values
    return whole


def tokens(index: Tensor, grad: Tensor, padding: int | None, sparse: bool) -> Lookup:
    """The lookups of an embedding: index n × …, grad n × … × columns."""
    sample = torch.arange(len(index), device=index.device).repeat_interleave(index[:1].numel())
    return without_padding(Lookup(sample, index.flatten(), grad.reshape(-1, grad.shape[-1]), sparse), padding)


def bags(
    index: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    grad: Tensor,
    mean: bool,
    padding: int | None,
    sparse: bool,
) -> Lookup:
    """The lookups of bags: each bag is a sample, and its gradient goes to all that is in it."""
    if offsets is None:
        bag = torch.arange(len(index), device=index.device).repeat_interleave(index[:1].numel())
    else:
        positions = torch.arange(len(index), device=index.device)
        bag = torch.searchsorted(offsets, positions, right=True) - 1
    share = torch.ones(bag.shape, dtype=grad.dtype, device=grad.device)
    if weights is not None:
        share = weights.flatten().to(grad.dtype)
    kept = without_padding(Lookup(bag, index.flatten(), share[:, None], sparse), padding)
    share = kept.grads
    if mean:
        share = share / torch.bincount(kept.sample, minlength=len(grad))[kept.sample][:, None]
    return kept._replace(grads=grad[kept.sample] * share)


def without_padding(lookup: Lookup, padding: int | None) -> Lookup:
    """The padding row gets no gradient."""
    if padding is None:
        return lookup
    keep = lookup.row != padding
    return Lookup(lookup.sample[keep], lookup.row[keep], lookup.grads[keep], lookup.sparse)
