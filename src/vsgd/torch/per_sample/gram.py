"""Inner products between the gradients of samples, and their weighted sum, without writing the gradients out."""

from __future__ import annotations

from itertools import chain, pairwise

import torch
from torch import Tensor

from vsgd.torch.per_sample.fallback import Call
from vsgd.torch.per_sample.reduce import TILE, covering, placed_total, replayed_grads, single_factors, slices
from vsgd.torch.per_sample.terms import Lookup, Outer, Placed, Term, Terms, lookups_in, written_out


def gram_matrix(terms: Terms, calls: list[Call], count: int) -> Tensor:
    """Return ⟨g_i, g_j⟩ over all parameters, n × n."""
    replayed = list(dict.fromkeys(param for call in calls for param in call.params))
    parts = [parameter_gram(param, placed, count) for param, placed in terms.items() if param not in replayed]
    if replayed:
        grads = replayed_grads(replayed, terms, calls, slice(0, count))
        parts += [grad.flatten(1) @ grad.flatten(1).T for grad in grads.values()]
    return torch.stack([part.to(parts[0].dtype) for part in parts]).sum(0)


def parameter_gram(param: Tensor, placed: list[Placed], count: int) -> Tensor:
    lookups = lookups_in(placed)
    if len(lookups) == len(placed):
        # only rows that were looked up take part: renumber them
        rows, place = torch.unique(torch.cat([term.row for term in lookups]), return_inverse=True)
        places = place.split([len(term.row) for term in lookups])
        renumbered: list[Term] = [t._replace(row=p) for t, p in zip(lookups, places, strict=True)]
        return block_gram(renumbered, len(rows), param[:1].numel(), count)
    edges = sorted({0, len(param), *chain(*((item.lo, item.hi) for item in placed))})
    blocks = [block_gram(covering(placed, lo, hi), hi - lo, param[:1].numel(), count) for lo, hi in pairwise(edges)]
    return torch.stack(blocks).sum(0)


def block_gram(terms: list[Term], rows: int, columns: int, count: int) -> Tensor:
    factors = single_factors(terms)
    if factors is not None:
        # an outer product a sample: ⟨b_i a_iᵀ, b_j a_jᵀ⟩ = (a_i·a_j)(b_i·b_j)
        inputs, grads = factors
        return (inputs @ inputs.T) * (grads @ grads.T)
    grouped = any(isinstance(term, Outer) and term.grads.shape[1] > 1 for term in terms)
    writers = [written_out(term, slice(0, count), columns) for term in terms]
    gram = terms[0].grads.new_zeros(count, count)
    for part in slices(rows, rows if grouped else TILE // max(1, columns * count)):
        tile = torch.stack([rows_of(part) for rows_of in writers]).sum(0).flatten(1)
        gram.addmm_(tile, tile.T)
    return gram


def weighted_sums(
    params: list[Tensor], terms: Terms, calls: list[Call], count: int, weights: Tensor
) -> dict[Tensor, Tensor]:
    """Return Σ_j w_j g_j of these parameters."""
    replayed = list(dict.fromkeys(param for call in calls for param in call.params))
    result = {
        param: placed_total(param, [weighted(item, weights) for item in terms[param]], sparse=False)
        for param in params
        if param not in replayed
    }
    if any(param in set(replayed) for param in params):
        grads = replayed_grads(replayed, terms, calls, slice(0, count))
        result.update({param: torch.tensordot(weights.to(grad.dtype), grad, 1) for param, grad in grads.items()})
    return result


def weighted(placed: Placed, weights: Tensor) -> Placed:
    term = placed.term
    own = weights.to(term.grads.dtype)
    own = own[term.sample] if isinstance(term, Lookup) else own
    return placed._replace(term=term._replace(grads=term.grads * own.view(-1, *[1] * (term.grads.dim() - 1))))
