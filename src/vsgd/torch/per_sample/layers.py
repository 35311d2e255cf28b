"""Capture layers whose inputs and output gradients are factors of per-sample gradients: a handler per torch function.

A handler takes a `Layout` and the arguments of the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vsgd.torch.per_sample.terms import Explicit, Lookup, Outer, SampleError, Term, sum_dtype

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


def trailing(axes: int) -> Layout:
    """Return a function that sums over the axes between the samples and the last `axes`."""

    def reduce(grad: Tensor) -> Tensor:
        middle = tuple(range(1, grad.dim() - axes))
        return grad.sum(middle) if middle else grad

    return reduce


def per_channel(grad: Tensor) -> Tensor:
    """Return gradients of parameters that span the channels, the axis after the samples."""
    return grad.flatten(2).sum(2) if grad.dim() > 2 else grad


def precise(captured: Tensor, param: Tensor | None) -> Tensor:
    """Return a tensor in the precision of the parameter's sums."""
    return captured if param is None else captured.to(sum_dtype(param.dtype))


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
        return Explicit(trailing(1)(precise(layout(grad), weight)))

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


def embedding(
    layout: Layout,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Capture:
    refuse_frequencies(scale_grad_by_freq)
    check_axes("embedding", input, 1)
    index = input.detach().long()
    padding = None if padding_idx is None else padding_idx % len(weight)

    def of_weight(grad: Tensor) -> Term:
        grads = precise(grad, weight).reshape(-1, grad.shape[-1])
        return without_padding(Lookup(sample_of(index), index.flatten(), grads, sparse), padding)

    return Capture(len(index), [(weight, of_weight)], may_be_shared=len(index) > 1)


def embedding_bag(
    layout: Layout,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Capture:
    refuse_frequencies(scale_grad_by_freq)
    if mode == "max":
        raise SampleError("embedding_bag with mode='max' is not supported; use mode='sum' or mode='mean'")
    index = input.detach().long()
    padding = None if padding_idx is None else padding_idx % len(weight)
    factors = (
        torch.ones(index.shape, device=index.device) if per_sample_weights is None else per_sample_weights.detach()
    )
    if offsets is None:
        count, bag = len(index), sample_of(index)
    else:
        count = len(offsets) - include_last_offset
        bag = torch.searchsorted(offsets, torch.arange(len(index), device=index.device), right=True) - 1

    def of_weight(grad: Tensor) -> Term:
        # the gradient of a bag goes to all rows in it
        grads = precise(grad, weight)
        lookup = without_padding(Lookup(bag, index.flatten(), factors.flatten()[:, None].to(grads), sparse), padding)
        sizes = torch.bincount(lookup.sample, minlength=len(grads))[lookup.sample][:, None] if mode == "mean" else 1
        return lookup._replace(grads=grads[lookup.sample] * (lookup.grads / sizes))

    return Capture(count, [(weight, of_weight)])


def sample_of(index: Tensor) -> Tensor:
    """Return the sample that each index belongs to; samples are the first axis."""
    return torch.arange(len(index), device=index.device).repeat_interleave(index[:1].numel())


def without_padding(lookup: Lookup, padding: int | None) -> Lookup:
    """Return the lookups without those of the padding row, which gets no gradient."""
    if padding is None:
        return lookup
    keep = lookup.row != padding
    return Lookup(lookup.sample[keep], lookup.row[keep], lookup.grads[keep], lookup.sparse)


def refuse_frequencies(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise SampleError("scale_grad_by_freq=True makes a sample's gradient depend on the others; turn it off")


# --- normalization --------------------------------------------------------------------------------------------------


def norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, normed: Layout, reduce: Callable[[Tensor], Tensor]
) -> Capture:
    """Capture a normalization.

    Args:
        input: its input.
        weight: factor on the normalized input.
        bias: offset.
        normed: normalizes an input.
        reduce: sums a gradient of the output over the axes that the parameters do not have.
    """
    x = input.detach()

    def of_weight(grad: Tensor) -> Term:
        return Explicit(reduce(precise(grad, weight) * normed(precise(x, weight))))

    return Capture(len(x), [(weight, of_weight), (bias, lambda grad: Explicit(reduce(precise(grad, bias))))])


def layer_norm(
    layout: Layout,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Capture:
    shape = list(normalized_shape)
    check_axes("a norm", input, len(shape) + 1)
    return norm(input, weight, bias, lambda x: F.layer_norm(x, shape, eps=eps), trailing(len(shape)))


def rms_norm(
    layout: Layout,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Capture:
    shape = list(normalized_shape)
    check_axes("a norm", input, len(shape) + 1)
    return norm(input, weight, None, lambda x: F.rms_norm(x, shape, eps=eps), trailing(len(shape)))


def group_norm(
    layout: Layout,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Capture:
    return norm(input, weight, bias, lambda x: F.group_norm(x, num_groups, eps=eps), per_channel)


def batch_norm(
    layout: Layout,
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Capture:
    """Capture batch normalization with fixed statistics, as in evaluation, where samples do not mix."""
    # copies, since statistics may change before the gradient arrives
    mean, var = running_mean.detach().clone(), running_var.detach().clone()
    return norm(input, weight, bias, lambda x: F.batch_norm(x, mean.to(x), var.to(x), eps=eps), per_channel)


HANDLERS: dict[Any, Callable[..., Capture]] = {
    F.linear: linear,
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
}


if hasattr(F, "rms_norm"):
    HANDLERS[F.rms_norm] = rms_norm
