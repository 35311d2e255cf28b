"""Capture layers whose inputs and output gradients are factors of per-sample gradients: a handler per torch function.

A handler takes a `Layout` and the arguments of the function.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vsgd.torch.coordinates import precision
from vsgd.torch.per_sample.terms import Explicit, Lookup, Outer, SampleError, Term

Size = int | Sequence[int]

Layout = Callable[[Tensor], Tensor]
"""Moves the sample axis to the front."""

Build = Callable[[Tensor], Term]
"""Makes a term from the gradient of the function's output."""


class Capture(NamedTuple):
    """The samples of one function call, and how to build the terms of its parameters."""

    samples: int
    builders: list[tuple[Tensor | None, Build]]
    """Parameters, some of which may be missing, and the functions that make their terms."""
    may_be_shared: bool = False
    """Whether all samples may share the input, as they share positions."""


def bound(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    arguments = inspect.signature(function).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.arguments


def trailing(grad: Tensor, axes: int) -> Tensor:
    """Return the sum over the axes between the samples and the last `axes`."""
    middle = tuple(range(1, grad.dim() - axes))
    return grad.sum(middle) if middle else grad


def per_channel(grad: Tensor) -> Tensor:
    """Return gradients of parameters that span the channels, the axis after the samples."""
    return grad.flatten(2).sum(2) if grad.dim() > 2 else grad


def precise(captured: Tensor, param: Tensor) -> Tensor:
    """Return a tensor in the precision of the parameter's sums."""
    return captured.to(precision(param.dtype))


def check_axes(where: str, input: Tensor, axes: int) -> None:
    """Raise SampleError if an input has fewer axes than a layer needs for samples and features."""
    if input.dim() < axes:
        raise SampleError(
            f"{where} was called with an input of shape {tuple(input.shape)}, which has no axis for the samples; "
            "the first axis of every layer's input must be the batch"
        )


# --- linear layers and convolutions ---------------------------------------------------------------------------------


def linear(layout: Layout, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Capture:
    check_axes("linear", input, 2)
    x = layout(input.detach())
    count, positions = x.shape[0], math.prod(x.shape[1:-1])

    def of_weight(grad: Tensor) -> Term:
        inputs = precise(x, weight).reshape(count, 1, positions, x.shape[-1])
        grads = precise(layout(grad), weight).reshape(count, 1, positions, grad.shape[-1])
        return Outer(inputs, grads.transpose(2, 3))

    def of_bias(grad: Tensor) -> Term:
        return Explicit(trailing(precise(layout(grad), weight), 1))

    return Capture(count, [(weight, of_weight), (bias, of_bias)])


def convolution(
    layout: Layout,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Capture:
    check_axes("a convolution", input, weight.dim())
    x = input.detach()

    def of_weight(grad: Tensor) -> Term:
        grads = precise(grad, weight).flatten(2).unflatten(1, (groups, -1))
        return Outer(precise(x, weight), grads, unfolder(weight, stride, padding, dilation, groups))

    return Capture(len(x), [(weight, of_weight), (bias, lambda grad: Explicit(per_channel(precise(grad, weight))))])


def unfolder(
    weight: Tensor, stride: Size, padding: Size | str, dilation: Size, groups: int
) -> Callable[[Tensor], Tensor]:
    """Return a function from inputs to n × groups × positions × (channels of the group · kernel).

    A convolution over time is one over an image of height 1.
    """
    axes = weight.dim() - 2
    kernel, steps, spacing = (pair(size, axes, 1) for size in (weight.shape[2:], stride, dilation))
    if isinstance(padding, str):
        extra = [gap * (size - 1) if padding == "same" else 0 for gap, size in zip(spacing, kernel, strict=True)]
    else:
        extra = [2 * margin for margin in pair(padding, axes, 0)]
    top, left = (each // 2 for each in extra)

    def unfold(x: Tensor) -> Tensor:
        image = x.unsqueeze(2) if axes == 1 else x
        padded = F.pad(image, (left, extra[1] - left, top, extra[0] - top))
        columns = F.unfold(padded, kernel, dilation=spacing, stride=steps)
        return columns.view(len(x), groups, -1, columns.shape[-1]).transpose(2, 3)

    return unfold


def pair(size: Size, axes: int, missing: int) -> tuple[int, int]:
    """Return a setting for both image axes; `missing` is that of the height of a convolution over time."""
    values = (size,) if isinstance(size, int) else tuple(size)
    height, width = (values * 2)[:2] if axes == 2 else (missing, values[0])
    return height, width


# --- embeddings -----------------------------------------------------------------------------------------------------


def embedding(layout: Layout, *args: Any, **kwargs: Any) -> Capture:
    given = bound(F.embedding, args, kwargs)
    weight, index, padding = checked_lookup(given)
    check_axes("embedding", index, 1)

    def of_weight(grad: Tensor) -> Term:
        grads = precise(grad, weight).reshape(-1, grad.shape[-1])
        return without_padding(Lookup(sample_of(index), index.flatten(), grads, given["sparse"]), padding)

    return Capture(len(index), [(weight, of_weight)], may_be_shared=len(index) > 1)


def embedding_bag(layout: Layout, *args: Any, **kwargs: Any) -> Capture:
    given = bound(F.embedding_bag, args, kwargs)
    weight, index, padding = checked_lookup(given)
    offsets, factors, mode = given["offsets"], given["per_sample_weights"], given["mode"]
    if mode == "max":
        raise SampleError("embedding_bag with mode='max' is not supported; use mode='sum' or mode='mean'")
    factors = torch.ones(index.shape, device=index.device) if factors is None else factors.detach()
    if offsets is None:
        count, bag = len(index), sample_of(index)
    else:
        count = len(offsets) - given["include_last_offset"]
        bag = torch.searchsorted(offsets, torch.arange(len(index), device=index.device), right=True) - 1

    def of_weight(grad: Tensor) -> Term:
        # the gradient of a bag goes to all rows in it
        grads = precise(grad, weight)
        parts = factors.flatten()[:, None].to(grads)
        lookup = without_padding(Lookup(bag, index.flatten(), parts, given["sparse"]), padding)
        sizes = torch.bincount(lookup.sample, minlength=len(grads))[lookup.sample][:, None] if mode == "mean" else 1
        return lookup._replace(grads=grads[lookup.sample] * (lookup.grads / sizes))

    return Capture(count, [(weight, of_weight)])


def checked_lookup(given: dict[str, Any]) -> tuple[Tensor, Tensor, int | None]:
    """Return the table, the indices of its rows, and the row that gets no gradient."""
    if given["scale_grad_by_freq"]:
        raise SampleError("scale_grad_by_freq=True makes a sample's gradient depend on the others; turn it off")
    weight, padding = given["weight"], given["padding_idx"]
    return weight, given["input"].detach().long(), None if padding is None else padding % len(weight)


def sample_of(index: Tensor) -> Tensor:
    """Return the sample that each index belongs to; samples are the first axis."""
    return torch.arange(len(index), device=index.device).repeat_interleave(index[:1].numel())


def without_padding(lookup: Lookup, padding: int | None) -> Lookup:
    """Return the lookups without those of the padding row, which gets no gradient."""
    if padding is None:
        return lookup
    keep = lookup.row != padding
    return lookup._replace(sample=lookup.sample[keep], row=lookup.row[keep], grads=lookup.grads[keep])


# --- normalization --------------------------------------------------------------------------------------------------


def norm(function: Callable[..., Tensor]) -> Callable[..., Capture]:
    """Return the handler of a normalization. Without weight and bias, the function returns the factor of the weight.

    Batch normalization has fixed statistics, as in evaluation, where samples do not mix.
    """

    def capture(layout: Layout, *args: Any, **kwargs: Any) -> Capture:
        given = bound(function, args, kwargs)
        x, weight, bias = given.pop("input").detach(), given.pop("weight"), given.pop("bias", None)
        axes = len(given.get("normalized_shape", ()))
        check_axes("a norm", x, axes + 1)
        # copies, since statistics may change before the gradient arrives
        given |= {name: value.detach().clone() for name, value in given.items() if isinstance(value, Tensor)}

        def reduced(grad: Tensor) -> Tensor:
            return trailing(grad, axes) if axes else per_channel(grad)

        def of_weight(grad: Tensor) -> Term:
            inputs = precise(x, weight)
            settings = {name: value.to(inputs) if isinstance(value, Tensor) else value for name, value in given.items()}
            return Explicit(reduced(precise(grad, weight) * function(inputs, **settings)))

        return Capture(len(x), [(weight, of_weight), (bias, lambda grad: Explicit(reduced(precise(grad, bias))))])

    return capture


HANDLERS: dict[Any, Callable[..., Capture]] = {
    F.linear: linear,
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    **{function: norm(function) for function in (F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm)},
}
