"""Where the second gradient is taken, and the curvature that it shows. Plain arithmetic, like the rule."""

from __future__ import annotations

from vsgd.options import PAPER, Options
from vsgd.rule import Array, State, bootstrap_weight, noise, share

MULTIPLIER = 0x2545F4914F6CDD1D
"""Odd, with bits well spread: multiplying by it mixes those of a number."""


def shift(state: State, grad: Array, count: Array, options: Options = PAPER) -> Array:
    """δ = ḡ, the typical update distance, pushed away from zero by epsilon on its own side.

    While there are too few samples for an average, this minibatch's gradient joins it first.
    """
    mean = state.mean.grad + bootstrap_weight(state, count, options) * (grad - state.mean.grad)
    return mean + (mean >= 0) * options.epsilon - (mean < 0) * options.epsilon


def column_shift(state: State, count: Array, largest: Array, options: Options) -> Array:
    """δ = √s / the largest |x| of a column, where s is the share of signal: how far one step takes a coordinate.

    A gradient moves it s of the way to its optimum on average, but √s of it as a root mean square, noise included.
    An average over τ samples leaves 1/τ of the noise in doubt, so what is hardly known may go all the way.
    """
    signal = share(count * (state.mean.grad * state.mean.grad), noise(state.mean, options))
    return (signal + (1 - signal) / state.memory) ** 0.5 / largest


def column_curvature(row_curvature: Array, x: Array, largest: Array, others: Array) -> Array:
    """Curvature of one sample in θ_i when the other coordinates of its row move too, all to the same side.

    `row_curvature` is that of the loss in the output, `others` the sum of |x_k| δ_k over the rest of the row. Were all
    shares 1, the steps of a row would add up to no more than the one that is best for it.
    """
    return row_curvature * (x * x + abs(x) * largest * others)


SMALLEST = 1e-3
"""Where the parameters are closer to zero than this, they are shifted as if they were this far."""


def probe_size(typical: Array, options: Options) -> Array:
    """|δ|, a share of the `typical` distance of the parameters of a tensor from zero."""
    return options.tensor_probe * ((typical >= SMALLEST) * typical + (typical < SMALLEST) * SMALLEST)


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


def guessed_curvature(curv: Array, grad: Array, size: Array) -> Array:
    """|ḡ|/|δ| where nobody has seen any curvature, so that a step is no longer than the shift; 0 elsewhere."""
    return (curv == 0) * (abs(grad) / size)


def curvature(grad: Array, shifted_grad: Array, delta: Array) -> Array:
    """h^fd = |(∇_θ − ∇_{θ+δ}) / δ| of one sample (eq. 6)."""
    return abs((grad - shifted_grad) / delta)


def cautious(curvature: Array, grad: Array, delta: Array, options: Options) -> Array:
    """h^fd, or somewhat more: the gradient may yet vanish beyond the shift, where nobody looked.

    A step that the shift says nothing about is then at most 1/caution shifts long.
    """
    return curvature + options.caution * abs(grad / delta)
