"""Compute sums and inner products of samples, from their factors or from gradients written out in tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vsgd.eigenbasis import Basis, into
from vsgd.jit import cached_jit
from vsgd.torch.devices import share_range
from vsgd.torch.per_sample.fallback import Recording
from vsgd.torch.per_sample.terms import (
    Lookup,
    Outer,
    Placed,
    Rows,
    RowSums,
    SampleError,
    SampleSums,
    Term,
    add_rows,
    empty_sums,
    has_factors,
    lookups_in,
    of_samples,
    rotated,
    stacked_rows,
)

WIDTH = 256
"""Columns of a block. A constant, so that the compiler knows the distance between the halves of a packed row."""

DEPTH = 128
"""Samples of a block. Two packed copies of WIDTH columns of each, 256 kB in all, stay in the second-level cache."""

TILE = 2**20
"""Numbers in a temporary tensor, whatever the sizes of the batch and of the parameter. A few exist at once."""

ROUNDING = 30.0
"""Error of a gradient that cancels to zero, in machine epsilons of the largest gradient in the model."""


def accumulate(
    inputs: Any,
    grads: Any,
    inputs_there: Any,
    grads_there: Any,
    grad_sq: Any,
    diff_abs: Any,
    diff_sq: Any,
    first: int,
    last: int,
) -> None:
    """Fill the rows first … last of the results. Inputs are samples × columns, grads are rows × samples.

    Both inputs of a sample are packed side by side, and so are the sums. The compiler then has few enough pointers to
    prove that nothing overlaps; otherwise it does not vectorize. Samples are taken four at a time. Those whose output
    gradients are zero at both points, as half of them are after a ReLU, are skipped.
    """
    samples, columns = inputs.shape
    packed = np.empty((DEPTH, 2 * WIDTH), inputs.dtype)
    sums = np.empty(3 * WIDTH, inputs.dtype)
    active = np.empty(DEPTH, np.int64)
    for left in range(0, columns, WIDTH):
        width = min(WIDTH, columns - left)
        for top in range(0, samples, DEPTH):
            depth = min(DEPTH, samples - top)
            packed[:] = 0
            for j in range(depth):
                packed[j, :width] = inputs[top + j, left : left + width]
                packed[j, WIDTH : WIDTH + width] = inputs_there[top + j, left : left + width]
            for row in range(first, last):
                b, c = grads[row, top : top + depth], grads_there[row, top : top + depth]
                count = 0
                for j in range(depth):
                    # no branch, which would be mispredicted half the time
                    active[count] = j
                    count += (b[j] != 0) | (c[j] != 0)
                sums[:] = 0
                whole = count - count % 4
                for k in range(0, whole, 4):
                    j0, j1, j2, j3 = active[k], active[k + 1], active[k + 2], active[k + 3]
                    b0, b1, b2, b3 = b[j0], b[j1], b[j2], b[j3]
                    c0, c1, c2, c3 = c[j0], c[j1], c[j2], c[j3]
                    a0, a1, a2, a3 = packed[j0], packed[j1], packed[j2], packed[j3]
                    for i in range(WIDTH):
                        g0 = b0 * a0[i]
                        d0 = g0 - c0 * a0[i + WIDTH]
                        g1 = b1 * a1[i]
                        d1 = g1 - c1 * a1[i + WIDTH]
                        g2 = b2 * a2[i]
                        d2 = g2 - c2 * a2[i + WIDTH]
                        g3 = b3 * a3[i]
                        d3 = g3 - c3 * a3[i + WIDTH]
                        sums[i] += (g0 * g0 + g1 * g1) + (g2 * g2 + g3 * g3)
                        sums[i + WIDTH] += (abs(d0) + abs(d1)) + (abs(d2) + abs(d3))
                        sums[i + 2 * WIDTH] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
                for k in range(whole, count):
                    b0, c0, a0 = b[active[k]], c[active[k]], packed[active[k]]
                    for i in range(WIDTH):
                        g0 = b0 * a0[i]
                        d0 = g0 - c0 * a0[i + WIDTH]
                        sums[i] += g0 * g0
                        sums[i + WIDTH] += abs(d0)
                        sums[i + 2 * WIDTH] += d0 * d0
                window = slice(left, left + width)
                if top == 0:
                    grad_sq[row, window] = sums[:width]
                    diff_abs[row, window] = sums[WIDTH : WIDTH + width]
                    diff_sq[row, window] = sums[2 * WIDTH : 2 * WIDTH + width]
                else:
                    grad_sq[row, window] += sums[:width]
                    diff_abs[row, window] += sums[WIDTH : WIDTH + width]
                    diff_sq[row, window] += sums[2 * WIDTH : 2 * WIDTH + width]


def summed_products(inputs: Tensor, grads: Tensor, inputs_there: Tensor, grads_there: Tensor) -> list[Tensor]:
    """Return the three sums, rows × columns, for inputs n × columns and output gradients n × rows on the CPU."""
    operands = [part.detach().contiguous().numpy() for part in (inputs, grads.t(), inputs_there, grads_there.t())]
    rows = grads.shape[1]
    results = [torch.empty(rows, inputs.shape[1], dtype=inputs.dtype, device="cpu") for _ in range(3)]
    arrays = [result.numpy() for result in results]
    kernel = cached_jit(accumulate)

    def fill(first: int, last: int) -> None:
        kernel(*operands, *arrays, first, last)

    share_range(fill, rows, torch.get_num_threads())
    return results


def lookup_sums(table: Tensor, recordings: Sequence[Sequence[Lookup]]) -> SampleSums | RowSums:
    """Return the sums of the rows of a table. A row's count is the number of samples that looked it up.

    A sample may look up a row several times. Its gradient is the sum over all of these lookups, so the pairs (sample,
    row) are collected first. Two recordings may look up different rows.
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
    if all(term.sparse for term in lookups):
        return RowSums(rows, touched)

    def of_table(values: Tensor | None) -> Any:
        return None if values is None else values.new_zeros(len(table), *values.shape[1:]).index_copy_(0, rows, values)

    return SampleSums(*map(of_table, touched))


def parameter_sums(
    param: Tensor, terms: Sequence[Sequence[Placed]], count: int, basis: Basis | None = None
) -> SampleSums | RowSums:
    """Return the sums of one parameter over `count` samples, from its terms in one or two recordings.

    `basis` are the coordinates of the sums; default: those of the parameter.
    """
    if basis is not None:
        if not all(has_factors(item, len(param)) for item in chain(*terms)):  # gradients are rotated instead
            recordings = [Recording(count, {param: list(one)}) for one in terms]
            return written_sums([param], recordings, 1.0, {param: basis})[param]
        terms = [[rotated(item, basis) for item in one] for one in terms]
    placed = list(chain(*terms))
    if all(isinstance(item.term, Lookup) for item in placed):
        return lookup_sums(param, [lookups_in(one) for one in terms])
    blocks = []
    for lo, hi in row_ranges(param, placed):
        parts = [covering(one, lo, hi) for one in terms]
        blocks.append(products(parts) or tiles(param[lo:hi], parts, count))
    return stacked_rows(blocks, param.shape)


def row_ranges(param: Tensor, placed: Sequence[Placed]) -> list[tuple[int, int]]:
    """Return ranges of rows, each of which a term covers as a whole or not at all.

    Uses of parts of a parameter may overlap, as when attention is called with and without a separate query.
    """
    return list(pairwise(sorted({0, len(param), *(edge for item in placed for edge in (item.lo, item.hi))})))


def covering(placed: Sequence[Placed], lo: int, hi: int) -> list[Term]:
    """Return the parts in the rows lo … hi, one of `row_ranges`, of the terms that cover them."""
    return [item.narrowed(lo, hi) for item in placed if item.lo <= lo and hi <= item.hi]


def products(terms: list[list[Term]]) -> SampleSums | None:
    """Return the sums if each sample has one outer product, which need not be written out; None otherwise."""
    factors = [pair for pair in map(single_factors, terms) if pair is not None]
    if len(factors) < len(terms):
        return None
    if len(factors) > 1:
        grad_sq, diff_abs, diff_sq = summed_products(*factors[0], *factors[1])
        return SampleSums(grad_sq, diff_abs, diff_sq, count=None)
    inputs, grads = factors[0]
    return SampleSums(grads.square().t() @ inputs.square(), None, None, None)


def single_factors(terms: list[Term]) -> tuple[Tensor, Tensor] | None:
    """Return inputs n × columns and output gradients n × rows of a single outer product on the CPU; else None."""
    if len(terms) != 1 or not isinstance(terms[0], Outer) or terms[0].unfold is not None:
        return None
    inputs, grads = terms[0].inputs, terms[0].grads
    if inputs.shape[1:3] != (1, 1) or inputs.device.type != "cpu":
        return None
    return inputs[:, 0, 0], grads[:, 0, :, 0]


def tiles(block: Tensor, terms: list[list[Term]], count: int) -> SampleSums:
    """Return the sums by writing the samples' gradients out tile by tile."""
    sums = empty_sums(block, pair=len(terms) > 1)
    rows, columns = len(block), block[:1].numel()
    outer = [term for term in chain(*terms) if isinstance(term, Outer)]
    grouped = any(term.is_grouped for term in outer)
    unfolded = [term.unfold(term.inputs[:1]).numel() for term in outer if term.unfold is not None]
    needed = max(rows * columns if grouped else columns, *unfolded, 1)
    for samples in slices(count, TILE // needed):
        length = samples.stop - samples.start
        ready = [[term.written_out(samples, columns) for term in one] for one in terms]
        for part in slices(rows, rows if grouped else TILE // max(1, columns * length)):
            shape = (length, part.stop - part.start, columns)
            add_rows(sums, part, of_samples(*(added_up(one, part, shape, sums.grad_sq) for one in ready)))
    return sums


def added_up(writers: list[Rows], part: slice, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tile of the gradient, which is the sum over the uses of a parameter, as a new tensor."""
    tile = like.new_zeros(shape)
    for rows in writers:
        tile += rows(part)
    return tile


def written_sums(
    params: list[Tensor], recordings: Sequence[Recording], factor: float, bases: dict[Tensor, Basis]
) -> dict[Tensor, SampleSums | RowSums]:
    """Return sums by writing out the gradients of some samples at a time, as replays do.

    Args:
        params: the parameters, including all that module calls are replayed for.
        recordings: one, or two of the same minibatch.
        factor: factor on the gradients.
        bases: coordinates of those parameters whose sums are wanted in other coordinates than their own.
    """
    sums = {param: empty_sums(param, pair=len(recordings) > 1) for param in params}
    for written in parts_written(params, recordings):
        for param in params:
            scaled = [grads[param].mul_(factor) for grads in written]
            if param in bases:
                scaled = [into(grads.flatten(2), bases[param]).view_as(grads).clone() for grads in scaled]
            add_rows(sums[param], ..., of_samples(*scaled))
    return dict(sums)


def parts_written(params: list[Tensor], recordings: Sequence[Recording]) -> Iterator[list[dict[Tensor, Tensor]]]:
    """Yield the gradients of some samples at a time in each recording, samples × parameter."""
    for samples in slices(recordings[0].count, TILE // max(1, sum(param.numel() for param in params))):
        yield [recording.sample_grads(params, samples) for recording in recordings]


def slices(length: int, step: int) -> Iterator[slice]:
    """Yield slices that cover a length, of `step` elements each, or of one if `step` is less."""
    step = max(1, step)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


# --- checks, inner products and weighted sums ------------------------------------------------------------------------


def check_totals(
    recording: Recording, received: dict[Tensor, Tensor | None], names: dict[Tensor, str], epsilon: float
) -> None:
    """Raise SampleError unless Σ_j g_j is the gradient, for every parameter that received one."""
    expected = {param: grad for param, grad in received.items() if grad is not None}
    totals = {param: torch.zeros_like(param) for param in recording.replayed()}
    for (written,) in parts_written(list(totals), [recording]):
        for param, grads in written.items():
            totals[param] += grads.sum(0)
    largest = max((largest_of(grad) for grad in expected.values()), default=0.0)
    for param, grad in expected.items():
        found = totals[param] if param in totals else placed_total(param, recording.terms[param], grad.is_sparse)
        off, size = largest_of(grad - found), largest_of(grad)
        eps = max(epsilon, torch.finfo(param.dtype).eps)
        if off > math.sqrt(eps) * size + ROUNDING * eps * largest:
            raise SampleError(
                f"the recorded samples of parameter {names[param]!r} do not add up to its gradient (off by {off:.3g} "
                f"of {size:.3g}): something used the parameter unseen, changed its gradient on the way or mixed the "
                "samples; look for gradient hooks and custom autograd functions"
            )


def placed_total(param: Tensor, placed: list[Placed], sparse: bool) -> Tensor:
    """Return Σ_j g_j of a parameter from its terms. It is sparse if that is wanted, and all terms are lookups."""
    if sparse and all(isinstance(item.term, Lookup) for item in placed):
        return torch.stack([item.term.total(param.shape) for item in placed]).sum(0)
    whole = torch.zeros_like(param)
    for lo, hi, term in placed:
        part = term.total(whole[lo:hi].shape)
        whole[lo:hi] += part.to_dense() if part.is_sparse else part
    return whole


def parameter_gram(param: Tensor, placed: list[Placed], count: int) -> Tensor:
    """Return ⟨g_i, g_j⟩ over one parameter."""
    lookups = lookups_in(placed)
    if len(lookups) == len(placed):
        # only rows that were looked up take part: renumber them
        rows, place = torch.unique(torch.cat([term.row for term in lookups]), return_inverse=True)
        places = place.split([len(term.row) for term in lookups])
        renumbered: list[Term] = [t._replace(row=p) for t, p in zip(lookups, places, strict=True)]
        return block_gram(renumbered, len(rows), param[:1].numel(), count)
    ranges = row_ranges(param, placed)
    blocks = [block_gram(covering(placed, lo, hi), hi - lo, param[:1].numel(), count) for lo, hi in ranges]
    return torch.stack(blocks).sum(0)


def block_gram(terms: list[Term], rows: int, columns: int, count: int) -> Tensor:
    """Return ⟨g_i, g_j⟩ over rows of a parameter that all terms cover."""
    factors = single_factors(terms)
    if factors is not None:
        # an outer product a sample: ⟨b_i a_iᵀ, b_j a_jᵀ⟩ = (a_i·a_j)(b_i·b_j)
        inputs, grads = factors
        return (inputs @ inputs.T) * (grads @ grads.T)
    grouped = any(isinstance(term, Outer) and term.is_grouped for term in terms)
    writers = [term.written_out(slice(0, count), columns) for term in terms]
    gram = terms[0].grads.new_zeros(count, count)
    for part in slices(rows, rows if grouped else TILE // max(1, columns * count)):
        tile = torch.stack([rows_of(part) for rows_of in writers]).sum(0).flatten(1)
        gram.addmm_(tile, tile.T)
    return gram


def largest_of(tensor: Tensor) -> float:
    """Return the largest finite magnitude. NaN and infinity are checked by the caller of the recorder."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(values.nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0
