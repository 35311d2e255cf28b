"""Layers whose inputs and output gradients give the gradients of single samples: one handler per torch function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vsgd.torch.per_sample.terms import Explicit, Lookup, Outer, SampleError, Term, sum_dtype


def trailing(grad: Tensor, axes: int) -> Tensor:
    """Return gradients of parameters that span the last axes: sums over the axes between these and the samples."""
    middle = tuple(range(1, grad.dim() - axes))
    return grad.sum(middle) if middle else grad


def per_channel(grad: Tensor) -> Tensor:
    """Return gradients of parameters that span the channels, the axis after the samples."""
    return grad.flatten(2).sum(2) if grad.dim() > 2 else grad


def normed_by(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return batch normalization with fixed statistics, as in evaluation, where samples do not mix."""
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return (x - mean.view(shape)) * torch.rsqrt(var + eps).view(shape)


Size = int | Sequence[int]


def pair(size: Size, axes: int) -> tuple[int, int]:
    """Return a setting for both image axes. A convolution over time is one over an image of height 1."""
    values = (size,) * axes if isinstance(size, int) else tuple(size)
    if len(values) == 1:
        values = values * axes
    return (values[0], values[1]) if axes == 2 else (0, values[0])


def unfolder(
    weight: Tensor, stride: Size, padding: Size | str, dilation: Size, groups: int
) -> Callable[[Tensor], Tensor]:
    """Return a function from inputs to n × groups × positions × (channels of the group · kernel)."""
    axes = weight.dim() - 2
    kernel = pair(weight.shape[2:], axes)
    steps, spacing = pair(stride, axes), pair(dilation, axes)
    if axes == 1:
        kernel, steps, spacing = (1, kernel[1]), (1, steps[1]), (1, spacing[1])
    margins = margins_of(padding, kernel, spacing, axes)

    def unfold(x: Tensor) -> Tensor:
        image = x.unsqueeze(2) if axes == 1 else x
        columns = F.unfold(F.pad(image, margins), kernel, dilation=spacing, stride=steps)
        return columns.view(len(x), groups, -1, columns.shape[-1]).transpose(2, 3)

    return unfold


def margins_of(padding: Size | str, kernel: tuple[int, int], spacing: tuple[int, int], axes: int) -> list[int]:
    """Return the numbers of zeros around an image: left, right, top, bottom."""
    if padding == "valid":
        return [0, 0, 0, 0]
    if isinstance(padding, str):
        extra = [gap * (size - 1) for gap, size in zip(spacing, kernel, strict=True)]
        return [extra[1] // 2, extra[1] - extra[1] // 2, extra[0] // 2, extra[0] - extra[0] // 2]
    vertical, horizontal = pair(padding, axes)
    return [horizontal, horizontal, vertical, vertical]


def tokens(index: Tensor, grad: Tensor, padding: int | None, sparse: bool) -> Lookup:
    """Return the lookups of an embedding: index n × …, grad n × … × columns."""
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
    """Return the lookups of bags: each bag is a sample, and its gradient goes to all rows in it."""
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
    """Return the lookups without those of the padding row, which gets no gradient."""
    if padding is None:
        return lookup
    keep = lookup.row != padding
    return Lookup(lookup.sample[keep], lookup.row[keep], lookup.grads[keep], lookup.sparse)


Layout = Callable[[Tensor], Tensor]
"""Brings the axis of the samples to the front."""


Build = Callable[[Tensor], Term]
"""Makes a term of the gradient of the function's output."""


class Capture(NamedTuple):
    """What to keep of one function call."""

    samples: int
    builders: list[tuple[Tensor | None, Build]]
    """The parameters, some of which may be missing, and how their terms come about."""
    may_be_shared: bool = False
    """Whether all samples may share the input, as they do positions."""


def linear(layout: Layout, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Capture:
    if input.dim() < 2:
        raise no_samples("linear", input)
    x = layout(input.detach())
    count, positions = x.shape[0], math.prod(x.shape[1:-1])

    def of_weight(grad: Tensor) -> Term:
        inputs = precise(x, weight).reshape(count, 1, positions, x.shape[-1])
        grads = precise(layout(grad), weight).reshape(count, 1, positions, grad.shape[-1])
        return Outer(inputs, grads.transpose(2, 3))

    return Capture(
        count, [(weight, of_weight), (bias, lambda grad: Explicit(trailing(precise(layout(grad), weight), 1)))]
    )


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
    if input.dim() < weight.dim():
        raise no_samples("a convolution", input)
    x = input.detach()

    def of_weight(grad: Tensor) -> Term:
        grads = precise(grad, weight).flatten(2).unflatten(1, (groups, -1))
        return Outer(precise(x, weight), grads, unfolder(weight, stride, padding, dilation, groups))

    return Capture(len(x), [(weight, of_weight), (bias, lambda grad: Explicit(per_channel(precise(grad, weight))))])


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
    if input.dim() < 1:
        raise no_samples("embedding", input)
    index = input.detach().long()
    padding = None if padding_idx is None else padding_idx % len(weight)

    def of_weight(grad: Tensor) -> Term:
        return tokens(index, precise(grad, weight), padding, sparse)

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
    weights = None if per_sample_weights is None else per_sample_weights.detach()

    def of_weight(grad: Tensor) -> Term:
        return bags(index, offsets, weights, precise(grad, weight), mode == "mean", padding, sparse)

    count = len(input) if offsets is None else len(offsets) - include_last_offset
    return Capture(count, [(weight, of_weight)])


def layer_norm(
    layout: Layout,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Capture:
    shape = list(normalized_shape)
    return trailing_norm(input, shape, weight, bias, lambda x: F.layer_norm(x, shape, eps=eps))


def rms_norm(
    layout: Layout,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Capture:
    shape = list(normalized_shape)
    return trailing_norm(input, shape, weight, None, lambda x: F.rms_norm(x, shape, eps=eps))


def trailing_norm(
    input: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, normed: Callable[[Tensor], Tensor]
) -> Capture:
    """Capture a norm whose parameters span the last axes."""
    if input.dim() <= len(shape):
        raise no_samples("a norm", input)
    x, axes = input.detach(), len(shape)

    def of_weight(grad: Tensor) -> Term:
        return Explicit(trailing(precise(grad, weight) * normed(precise(x, weight)), axes))

    return Capture(len(x), [(weight, of_weight), (bias, lambda grad: Explicit(trailing(precise(grad, bias), axes)))])


def group_norm(
    layout: Layout,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Capture:
    return channel_norm(input, weight, bias, lambda x: F.group_norm(x, num_groups, eps=eps))


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
    # statistics are copied as they may go on changing before the gradient arrives
    mean, var = running_mean.detach().clone(), running_var.detach().clone()
    return channel_norm(input, weight, bias, lambda x: normed_by(x, mean, var, eps))


def channel_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, normed: Callable[[Tensor], Tensor]
) -> Capture:
    """Capture a norm whose parameters span the channels."""
    x = input.detach()

    def of_weight(grad: Tensor) -> Term:
        return Explicit(per_channel(precise(grad, weight) * normed(precise(x, weight))))

    return Capture(len(x), [(weight, of_weight), (bias, lambda grad: Explicit(per_channel(precise(grad, bias))))])


def precise(captured: Tensor, param: Tensor | None) -> Tensor:
    """Return a tensor in the precision of the parameter's sums."""
    return captured if param is None else captured.to(sum_dtype(param.dtype))


def no_samples(where: str, input: Tensor) -> SampleError:
    return SampleError(
        f"{where} was called with an input of shape {tuple(input.shape)}, which has no axis for the samples; "
        "the first axis of every layer's input must be the batch"
    )


def refuse_frequencies(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise SampleError("scale_grad_by_freq=True makes a sample's gradient depend on the others; turn it off")


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
