"""From the terms of a parameter to its sums, within a fixed amount of extra memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor

from vsgd.eigenbasis import Basis, into
from vsgd.torch.samples.embedding import lookup_sums
from vsgd.torch.samples.products import summed_products
from vsgd.torch.samples.replay import Call
from vsgd.torch.samples.sums import RowSums, SampleSums, add_rows, empty_sums, of_samples, stacked_rows, sum_dtype
from vsgd.torch.samples.terms import (
    Lookup,
    Outer,
    Placed,
    Rows,
    Term,
    Terms,
    lookups_in,
    narrowed,
    rotated,
    written_out,
)

TILE = 2**20
"""Numbers in a temporary, whatever the sizes of the batch and of the parameter. A handful live at once."""


def parameter_sums(param: Tensor, terms: Sequence[Sequence[Placed]], count: int) -> SampleSums | RowSums:
    """The sums of one parameter, from its terms in the first and, if there was one, the second recording."""
    placed = list(chain(*terms))
    if all(isinstance(item.term, Lookup) for item in placed):
        return lookup_sums(param, [lookups_in(one) for one in terms])
    # uses of parts of a parameter may overlap, as when attention is called with and without a separate query
    edges = sorted({0, len(param), *(edge for item in placed for edge in (item.lo, item.hi))})
    blocks = []
    for lo, hi in pairwise(edges):
        parts = [covering(one, lo, hi) for one in terms]
        blocks.append(products(parts) or tiles(param[lo:hi], parts, count))
    return stacked_rows(blocks, param.shape)


def rotated_sums(param: Tensor, terms: Sequence[Sequence[Placed]], count: int, basis: Basis) -> SampleSums | RowSums:
    """`parameter_sums` in the coordinates of a basis: by rotated factors, or else by rotated gradients of samples."""
    rows = len(param)
    factors = [[rotated(item, rows, basis) for item in one] for one in terms]
    if all(item is not None for one in factors for item in one):
        return parameter_sums(param, factors, count)  # type: ignore[arg-type]
    sums = empty_sums(param, pair=len(terms) > 1)
    columns = param[0].numel()
    for samples in slices(count, TILE // max(1, param.numel())):
        length = samples.stop - samples.start
        written = []
        for one in terms:
            grads = sums.grad_sq.new_zeros(length, rows, columns)
            for lo, hi, term in one:
                grads[:, lo:hi] += written_out(term, samples, columns)(slice(0, hi - lo))
            written.append(into(grads, basis).clone())
        add_rows(sums, ..., of_samples(*written))
    return sums


def covering(placed: Sequence[Placed], lo: int, hi: int) -> list[Term]:
    """What the terms have to say on the rows lo … hi, between two edges."""
    return [narrowed(item, lo, hi) for item in placed if item.lo <= lo and hi <= item.hi]


def products(terms: list[list[Term]]) -> SampleSums | None:
    """One outer product a sample: nothing has to be written out at all. None if it is not that simple."""
    factors = [pair for pair in map(single_factors, terms) if pair is not None]
    if len(factors) < len(terms):
        return None
    if len(factors) > 1:
        grad_sq, diff_abs, diff_sq = summed_products(*factors[0], *factors[1])
        return SampleSums(grad_sq, diff_abs, diff_sq, count=None)
    inputs, grads = factors[0]
    return SampleSums(grads.square().t() @ inputs.square(), None, None, None)


def single_factors(terms: list[Term]) -> tuple[Tensor, Tensor] | None:
    """Inputs n × columns and output gradients n × rows, if that is all there is, where the compiled loop can go."""
    if len(terms) != 1 or not isinstance(terms[0], Outer) or terms[0].unfold is not None:
        return None
    inputs, grads = terms[0].inputs, terms[0].grads
    if inputs.shape[1:3] != (1, 1) or inputs.device.type != "cpu":
        return None
    return inputs[:, 0, 0], grads[:, 0, :, 0]


def tiles(block: Tensor, terms: list[list[Term]], count: int) -> SampleSums:
    """The general way: write the samples' gradients out tile by tile, and add each tile up."""
    sums = empty_sums(block, pair=len(terms) > 1)
    rows, columns = len(block), block[:1].numel()
    grouped = any(isinstance(term, Outer) and term.grads.shape[1] > 1 for term in chain(*terms))
    needed = max([rows * columns if grouped else columns, *(unfolded_size(term) for term in chain(*terms))])
    for samples in slices(count, TILE // max(1, needed)):
        length = samples.stop - samples.start
        ready = [[written_out(term, samples, columns) for term in one] for one in terms]
        for part in slices(rows, rows if grouped else TILE // max(1, columns * length)):
            shape = (length, part.stop - part.start, columns)
            add_rows(sums, part, of_samples(*(added_up(one, part, shape, sums.grad_sq) for one in ready)))
    return sums


def added_up(writers: list[Rows], part: slice, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tile of the gradient, which is the sum over the uses of a parameter, as a fresh tensor."""
    tile = like.new_zeros(shape)
    for rows in writers:
        tile += rows(part)
    return tile


def replayed_sums(
    params: list[Tensor],
    recordings: list[tuple[Terms, list[Call]]],
    count: int,
    factor: float,
    bases: dict[Tensor, Basis],
) -> dict[Tensor, SampleSums | RowSums]:
    """The sums of parameters of module calls that have to be replayed, some samples at a time."""
    sums = {param: empty_sums(param, pair=len(recordings) > 1) for param in params}
    for samples in slices(count, TILE // max(1, sum(param.numel() for param in params))):
        written = [replayed_grads(params, terms, calls, samples) for terms, calls in recordings]
        for param in params:
            scaled = [grads[param].mul_(factor) for grads in written]
            if param in bases:
                scaled = [into(grads.flatten(2), bases[param]).view_as(grads).clone() for grads in scaled]
            add_rows(sums[param], ..., of_samples(*scaled))
    return dict(sums)


def replayed_grads(params: list[Tensor], terms: Terms, calls: list[Call], samples: slice) -> dict[Tensor, Tensor]:
    """Gradients of some samples, from replays and from all else that the parameters go into."""
    length = samples.stop - samples.start
    grads = {p: torch.zeros(length, *p.shape, dtype=sum_dtype(p.dtype), device=p.device) for p in params}
    for call in calls:
        for param, part in call.sample_grads(samples).items():
            grads[param] += part
    for param in params:
        for lo, hi, term in terms.get(param, []):
            block = grads[param][:, lo:hi]
            block += written_out(term, samples, block[:1, :1].numel())(slice(0, hi - lo)).view_as(block)
    return grads


def unfolded_size(term: Term) -> int:
    """How many numbers the unfolded inputs of one sample are."""
    if not isinstance(term, Outer) or term.unfold is None:
        return 0
    return term.unfold(term.inputs[:1]).numel()


def slices(length: int, step: int) -> Iterator[slice]:
    """Cut a length into steps, of one at least."""
    step = max(1, step)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
