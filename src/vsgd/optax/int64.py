"""Whole numbers of 64 bits as pairs of 32, which is all that JAX has by default.

They have the operators that `networks.random_bit` and `strategy.probe_seed` use, so that signs are those of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

WORD = (1 << 32) - 1


@dataclass(frozen=True)
class Int64:
    """A signed number that wraps around."""

    high: Array
    low: Array

    @staticmethod
    def of(value: Array | int | Int64) -> Int64:
        """Convert a Python int of any size, or an array of numbers that are not negative."""
        if isinstance(value, Int64):
            return value
        if isinstance(value, int):
            return Int64(jnp.uint32((value >> 32) & WORD), jnp.uint32(value & WORD))
        return Int64(jnp.zeros_like(value, jnp.uint32), value.astype(jnp.uint32))

    @staticmethod
    def array(values: Sequence[int]) -> Int64:
        """Return an array of Python ints of any size."""
        return Int64(
            jnp.array([(value >> 32) & WORD for value in values], jnp.uint32),
            jnp.array([value & WORD for value in values], jnp.uint32),
        )

    def __add__(self, other: int | Int64) -> Int64:
        other = Int64.of(other)
        low = self.low + other.low
        return Int64(self.high + other.high + (low < other.low), low)

    def __mul__(self, other: int | Int64) -> Int64:
        other = Int64.of(other)
        low = self.low * other.low
        high = _high_word(self.low, other.low) + self.high * other.low + self.low * other.high
        return Int64(high, low)

    def __xor__(self, other: int | Int64) -> Int64:
        other = Int64.of(other)
        return Int64(self.high ^ other.high, self.low ^ other.low)

    def __and__(self, other: int | Int64) -> Int64:
        other = Int64.of(other)
        return Int64(self.high & other.high, self.low & other.low)

    def __rshift__(self, bits: int) -> Int64:
        """Shift by 32 bits or more. The sign does not change."""
        signed = self.high.astype(jnp.int32)
        return Int64((signed >> 31).astype(jnp.uint32), (signed >> (bits - 32)).astype(jnp.uint32))


def _high_word(a: Array, b: Array) -> Array:
    """Return the upper 32 bits of a product of two words, from products of their halves."""
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a_high * b_low + (a_low * b_low >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)
