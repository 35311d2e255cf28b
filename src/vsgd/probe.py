"""Where the second gradient is taken, and the curvature that it shows. Plain arithmetic, like the rule."""

from __future__ import annotations

from vsgd.options import PAPER, Options
from vsgd.rule import Array, State, bootstrap_weight

MULTIPLIER = 0x2545F4914F6CDD1D
"""Odd, with bits well spread: multiplying by it mixes those of a number."""


def shift(state: State, grad: Array, count: Array, options: Options = PAPER) -> Array:
    """δ = ḡ, the typical update distance, pushed away from zero by epsilon on its own side.

    While there are too few samples for an average, this minibatch's gradient joins it first.
    """
    mean = state.mean.grad + bootstrap_weight(state, count, options) * (grad - state.mean.grad)
    return mean + (mean >= 0) * options.epsilon - (mean < 0) * options.epsilon


def column_shift(rms: Array, unit: Array, sign: Array) -> Array:
    """δ = ± unit / RMS, the root mean square of the non-zero values of a column: it moves the output by a unit.

    All columns then disturb the output alike, whatever they are measured in. The signs are drawn at random, so that
    the columns of a row neither all add up nor all cancel.
    """
    return sign * unit / rms


def random_sign(index: Array, seed: Array) -> Array:
    """Is the sign of this coordinate positive? A coin that depends on two whole numbers of 64 bits alone."""
    mixed = (index ^ seed) * MULTIPLIER
    mixed = (mixed ^ (mixed >> 32)) * MULTIPLIER
    return (mixed >> 40) & 1


def tensor_shift(size: Array, coin: Array) -> Array:
    """δ = ± size. Where all coordinates move alike, none drowns the curvature of another in its own.

    With random signs, what the others add to it averages out.
    """
    return (coin == 1) * size - (coin == 0) * size


def curvature(grad: Array, shifted_grad: Array, delta: Array) -> Array:
    """h^fd = |(∇_θ − ∇_{θ+δ}) / δ| of one sample (eq. 6)."""
    return abs((grad - shifted_grad) / delta)


def cautious(curvature: Array, grad: Array, delta: Array, options: Options) -> Array:
    """h^fd, or somewhat more: the gradient may yet vanish beyond the shift, where nobody looked.

    A step that the shift says nothing about is then at most 1/caution shifts long.
    """
    return curvature + options.caution * abs(grad / delta)
