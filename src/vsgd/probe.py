"""Where the second gradient is taken, and the curvature that it shows. Plain arithmetic, like the rule."""

from __future__ import annotations

from vsgd.options import PAPER, Options
from vsgd.rule import Array, State, bootstrap_weight


def shift(state: State, grad: Array, count: Array, options: Options = PAPER) -> Array:
    """δ = ḡ, the typical update distance, pushed away from zero by epsilon on its own side.

    While there are too few samples for an average, this minibatch's gradient joins it first.
    """
    mean = state.mean.grad + bootstrap_weight(state, count, options) * (grad - state.mean.grad)
    return mean + (mean >= 0) * options.epsilon - (mean < 0) * options.epsilon


def curvature(grad: Array, shifted_grad: Array, delta: Array) -> Array:
    """h^fd = |(∇_θ − ∇_{θ+δ}) / δ| of one sample (eq. 6)."""
    return abs((grad - shifted_grad) / delta)
