"""Convolutions as matrix products of unfolded inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

Size = int | Sequence[int]


def pair(size: Size, axes: int) -> tuple[int, int]:
    """A setting for both image axes; a convolution over time is one over an image of height 1."""
    values = (size,) * axes if isinstance(size, int) else tuple(size)
    if len(values) == 1:
        values = values * axes
    return (values[0], values[1]) if axes == 2 else (0, values[0])


def unfolder(
    weight: Tensor, stride: Size, padding: Size | str, dilation: Size, groups: int
) -> Callable[[Tensor], Tensor]:
    """A function from inputs to n × groups × positions × (channels of the group · kernel)."""
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
    """Zeros to put around an image: left, right, top, bottom."""
    if padding == "valid":
        return [0, 0, 0, 0]
    if isinstance(padding, str):
        extra = [gap * (size - 1) for gap, size in zip(spacing, kernel, strict=True)]
        return [extra[1] // 2, extra[1] - extra[1] // 2, extra[0] // 2, extra[0] - extra[0] // 2]
    vertical, horizontal = pair(padding, axes)
    return [horizontal, horizontal, vertical, vertical]
