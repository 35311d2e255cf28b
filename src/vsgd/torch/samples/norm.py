"""Gradients that are no larger than the activations, and are therefore written out: biases and normalising layers."""

from __future__ import annotations

import torch
from torch import Tensor


def trailing(grad: Tensor, axes: int) -> Tensor:
    """Gradients of parameters that span the last axes: all between those and the samples is added up."""
    middle = tuple(range(1, grad.dim() - axes))
    return grad.sum(middle) if middle else grad


def per_channel(grad: Tensor) -> Tensor:
    """Gradients of parameters that span the channels, the axis after the samples."""
    return grad.flatten(2).sum(2) if grad.dim() > 2 else grad


def normed_by(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Batch normalisation with fixed statistics, as in evaluation, where samples do not mix."""
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return (x - mean.view(shape)) * torch.rsqrt(var + eps).view(shape)
