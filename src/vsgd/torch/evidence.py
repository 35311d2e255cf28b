"""What gradients say about each parameter, for the kinds of sample that there are.

A sample is a minibatch, one of several micro-batches, or a single row. Each kind ends in the same thing: averages over
`count` samples of the gradient, its square, and its difference to the gradient at θ + δ.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.torch.samples import RowSums, SampleSums
from vsgd.torch.update import Averages, Gradient, GradientPair, Weighted
from vsgd.torch.window import precision


class Grad(NamedTuple):
    """A gradient as rows × columns; `rows` says which ones if it is sparse."""

    values: Tensor
    rows: Tensor | None


class Observed(NamedTuple):
    """The evidence for one parameter."""

    source: Any
    """One of the kinds that `vsgd.torch.update` reads."""
    counts: Tensor
    """Samples, one number a row."""
    rows: Tensor | None

    @property
    def by_rows(self) -> bool:
        """Are there counts for single rows of a table?"""
        return self.rows is not None or self.counts.numel() > 1


def as_rows(grad: Tensor, parameter: Tensor) -> Grad:
    if not grad.is_sparse:
        # a view is of someone's buffer, as in distributed training, and the second gradient will be written there too
        grad = grad.detach().clone() if grad._is_view() else grad.detach()
        return Grad(grad.to(precision(parameter)).contiguous().view(1, -1), None)
    grad = grad.coalesce()
    if grad.sparse_dim() != 1:
        raise ValueError("a sparse gradient must be sparse in its first axis only, as that of an embedding is")
    rows = grad.indices()[0]
    return Grad(grad.values().to(precision(parameter)).contiguous().view(len(rows), parameter.shape[1:].numel()), rows)


OTHER_ROWS = "the closure touched other rows when called again; it must compute the same loss twice"

MIXED = "a parameter's gradient was sparse in one evaluation and dense in another; choose one"

SMALLEST_SHIFT = 1e-5
"""No shift is smaller; differences of gradients will be divided by it, and squared."""


def squared_lengths(loss: Tensor, grads: Iterable[Grad]) -> list[float]:
    """Of the gradients, in one look, so that a GPU is waited for once. None if they, or the loss, are too large."""
    norms = torch._foreach_norm([grad.values for grad in grads])
    value, *lengths = _together([loss.detach().reshape(()), *norms]).tolist()
    squares = [length * length for length in lengths]
    usable = abs(value) + sum(squares) / SMALLEST_SHIFT**2 < torch.finfo(torch.float32).max
    return squares if usable else []


def _together(numbers: Iterable[Tensor]) -> Tensor:
    """Numbers of any precision and device as one tensor."""
    first, *others = numbers
    return torch.stack([number.to(first.device, torch.float32) for number in (first, *others)])


def expected_squared_lengths(states: list[dict[str, Tensor]], samples: int) -> list[float]:
    """Of mean gradients over so many samples: Σ (ḡ² + σ²/n)."""
    total = _together(torch._foreach_norm([state["grad_sq"] for state in states], 1))
    if samples > 1:
        signal = _together(torch._foreach_norm([state["grad"] for state in states])) ** 2
        total = (total + (samples - 1) * signal) / samples
    return total.tolist()


@functools.cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, dtype=dtype, device=device)


def of_minibatches(grads: list[Grad], shifted: list[Grad] | None) -> Observed:
    """Each minibatch as one sample."""
    if shifted is not None:
        for before, after in zip(grads, shifted, strict=True):
            _check_pair(before, after)
    if len(grads) > 1:
        return _averaged(grads, shifted)
    (grad,) = grads
    values = grad.values
    count = _one(values.dtype, values.device) if grad.rows is None else values.new_ones(len(values))
    source = Gradient(values) if shifted is None else GradientPair(values, shifted[0].values)
    return Observed(source, count, grad.rows)


def _check_pair(before: Grad, after: Grad) -> None:
    if (before.rows is None) != (after.rows is None):
        raise RuntimeError(MIXED)
    if before.rows is not None and not torch.equal(before.rows, after.rows):  # type: ignore[arg-type]
        raise RuntimeError(OTHER_ROWS)
    if before.values.data_ptr() == after.values.data_ptr() and before.values.numel():
        raise RuntimeError(
            "the closure wrote both gradients to the same memory; let backward() make .grad, or clone it"
        )


def _averaged(grads: list[Grad], shifted: list[Grad] | None) -> Observed:
    """Averages over minibatches; of a sparse gradient, over those that touched the row."""
    if len({grad.rows is None for grad in grads}) > 1:
        raise RuntimeError(MIXED)
    first = torch.cat([grad.values for grad in grads])
    diff = torch.zeros_like(first) if shifted is None else first - torch.cat([grad.values for grad in shifted])
    terms = Averages(grad=first, grad_sq=first * first, diff_abs=diff.abs(), diff_sq=diff * diff)
    rows = [grad.rows for grad in grads if grad.rows is not None]
    if not rows:
        count = first.new_full((1,), len(grads))
        return Observed(Averages(*(term.mean(0, keepdim=True) for term in terms)), count, None)
    touched, place = torch.unique(torch.cat(rows), return_inverse=True)
    count = torch.bincount(place, minlength=len(touched)).to(first.dtype)
    sums = (term.new_zeros(len(touched), term.shape[1]).index_add_(0, place, term) for term in terms)
    return Observed(Averages(*(total / count[:, None] for total in sums)), count, touched)


def of_samples(grad: Grad, scale: float, sums: SampleSums | RowSums, samples: int, parameter: Tensor) -> Observed:
    """Every row of the minibatch as a sample; `grad` times `scale` is the sum over them."""
    rows = None
    if isinstance(sums, RowSums):
        rows, sums = sums
    width = parameter.numel() if sums.count is None else parameter.shape[1:].numel()

    def view(tensor: Tensor) -> Tensor:
        return tensor.to(grad.values.dtype).contiguous().view(-1, width)

    total = view(grad.values) * scale
    count = total.new_full((1,), samples) if sums.count is None else sums.count.to(total.dtype).reshape(-1)
    squares = view(sums.grad_sq)
    differences = (torch.zeros_like(squares) if part is None else view(part) for part in (sums.diff_abs, sums.diff_sq))
    divisor = count.clamp(min=1)[:, None]
    return Observed(Averages(*(term / divisor for term in (total, squares, *differences))), count, rows)


def along(evidence: Observed, direction: Tensor, count: Tensor) -> Observed:
    """The same evidence for a step along a weighted sum of the gradients, and the count that belongs to it."""
    averages = evidence.source
    direction = direction.to(averages.grad.dtype).reshape(averages.grad.shape).contiguous()
    return Observed(
        Weighted(**averages._asdict(), direction=direction), count.to(averages.grad.dtype).view(1), evidence.rows
    )
