"""Groups of tensors whose coordinates are updated as one array.

The compiler spends about the same time on every elementwise loop, whatever its length, and on every array of another
shape. So all small tensors of one kind are laid out in one array of rows, each tensor in rows of its own, padded with
zeros. A large tensor is a group by itself and keeps its shape, so that its state can be sharded as the tensor is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vsgd.optax.coordinates import Tensor

LANES = 32
"""Coordinates in a row. XLA makes one loop of a sum over at most 32, and several of a longer one."""

MAX_JOINED_SIZE = 1 << 18
"""Larger tensors are groups by themselves."""


class Group(NamedTuple):
    """Tensors of one precision that learn in the same way."""

    tensors: tuple[Tensor, ...]

    @property
    def is_joined(self) -> bool:
        """Return whether the coordinates are laid out in rows; otherwise they have the shape of the only tensor."""
        return len(self.tensors) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array of coordinates."""
        return (sum(self.rows), LANES) if self.is_joined else self.tensors[0].shape

    @property
    def rows(self) -> list[int]:
        """Return the number of rows of each tensor."""
        return [-(-tensor.size // LANES) for tensor in self.tensors]

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of coordinates of each tensor, at least 1."""
        return np.array([max(tensor.size, 1) for tensor in self.tensors], np.float32)

    def join(self, values: Sequence[Array]) -> Array:
        """Return the values of all tensors as one array of coordinates."""
        if not self.is_joined:
            return values[0]
        each = zip(self.tensors, self.rows, values, strict=True)
        padded = [jnp.pad(value.reshape(-1), (0, rows * LANES - tensor.size)) for tensor, rows, value in each]
        return jnp.concatenate([value.reshape(-1, LANES) for value in padded if value.size])

    def split(self, coordinates: Array) -> list[Array]:
        """Return the values of each tensor, in its shape. Inverse of `join`."""
        if not self.is_joined:
            return [coordinates]
        flat = coordinates.reshape(-1)
        starts = [LANES * (end - rows) for rows, end in zip(self.rows, itertools.accumulate(self.rows), strict=True)]
        parts = [flat[start : start + tensor.size] for tensor, start in zip(self.tensors, starts, strict=True)]
        return [part.reshape(tensor.shape) for tensor, part in zip(self.tensors, parts, strict=True)]

    def spread(self, numbers: Array) -> Array:
        """Return one number per tensor in a shape that broadcasts against coordinates; axes in front stay."""
        if not self.is_joined:
            return numbers.reshape(numbers.shape[:-1] + (1,) * len(self.shape))
        return numbers[..., self._tensor_of_row(), None]

    def sums(self, *values: Array) -> Array:
        """Return the sums of each of the values over the coordinates of each tensor, of shape values × tensors."""
        if not self.is_joined:
            return jnp.stack([value.sum() for value in values])[:, None]
        in_rows = jnp.stack([value.sum(-1) for value in values], axis=-1)
        return jax.ops.segment_sum(in_rows, self._tensor_of_row(), len(self.tensors), indices_are_sorted=True).T

    def positions(self) -> Array:
        """Return the number of each coordinate within its tensor, in the order of its values."""
        if not self.is_joined:
            return jnp.arange(self.tensors[0].size, dtype=jnp.uint32).reshape(self.shape)
        first = np.concatenate([np.arange(rows, dtype=np.uint32) * LANES for rows in self.rows])
        return jnp.asarray(first)[:, None] + jnp.arange(LANES, dtype=jnp.uint32)

    def is_padding(self) -> Array:
        """Return where a coordinate belongs to no tensor."""
        return self.positions() >= self.spread(jnp.array([tensor.size for tensor in self.tensors], jnp.uint32))

    def _tensor_of_row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.tensors)), self.rows)


def grouped(tensors: Sequence[Tensor]) -> list[Group]:
    """Return the groups in the order of their first tensors."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        joins = tensor.size <= MAX_JOINED_SIZE
        groups.setdefault((tensor.precision, tensor.decoupled) if joins else tensor.place, []).append(tensor)
    return [Group(tuple(members)) for members in groups.values()]
