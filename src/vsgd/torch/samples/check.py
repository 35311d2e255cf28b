"""The pieces of a recording must add up to the gradient that backpropagation itself arrived at."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vsgd.torch.samples.errors import SampleError
from vsgd.torch.samples.reduce import TILE, replayed_grads, slices
from vsgd.torch.samples.replay import Call
from vsgd.torch.samples.terms import Lookup, Placed, Terms, total

ROUNDING = 30.0
"""How many machine epsilons of the largest gradient in the model a gradient that cancels to zero may be off."""


def check_totals(
    terms: Terms,
    calls: list[Call],
    count: int,
    received: dict[Tensor, Tensor | None],
    names: dict[Tensor, str],
    epsilon: float,
) -> None:
    """Raise unless Σ_j g_j is the gradient, for every parameter that received one."""
    expected = {param: grad for param, grad in received.items() if grad is not None}
    replays = replayed_totals(terms, calls, count)
    largest = max((largest_of(grad) for grad in expected.values()), default=0.0)
    for param, grad in expected.items():
        found = replays[param] if param in replays else placed_total(param, terms[param], grad.is_sparse)
        off, size = largest_of(grad - found), largest_of(grad)
        eps = max(epsilon, torch.finfo(param.dtype).eps)
        if off > math.sqrt(eps) * size + ROUNDING * eps * largest:
            raise SampleError(
                f"the recorded samples of parameter {names[param]!r} do not add up to its gradient (off by {off:.3g} "
                f"of {size:.3g}): something used the parameter unseen, changed its gradient on the way or mixed the "
                "samples; look for gradient hooks and custom autograd functions"
            )


def placed_total(param: Tensor, placed: list[Placed], sparse: bool) -> Tensor:
    if sparse and all(isinstance(item.term, Lookup) for item in placed):
        return torch.stack([total(item.term, param.shape) for item in placed]).sum(0)
    whole = torch.zeros_like(param)
    for lo, hi, term in placed:
        part = total(term, whole[lo:hi].shape)
        whole[lo:hi] += part.to_dense() if part.is_sparse else part
    return whole


def replayed_totals(terms: Terms, calls: list[Call], count: int) -> dict[Tensor, Tensor]:
    params = list(dict.fromkeys(param for call in calls for param in call.params))
    totals = {param: torch.zeros_like(param) for param in params}
    for samples in slices(count, TILE // max(1, sum(param.numel() for param in params))) if params else ():
        for param, grads in replayed_grads(params, terms, calls, samples).items():
            totals[param] += grads.sum(0)
    return totals


def largest_of(tensor: Tensor) -> float:
    """The largest magnitude; NaN and infinity are for the caller of the recorder to notice, not a sign of mistakes."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(values.nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0
