"""The paper as scalar Python loops: the reference for all implementations.

It follows the pseudocode, one coordinate at a time, and uses no code of the package.
"""

from __future__ import annotations

import math

EPSILON = 1e-5
BOOTSTRAP = 10


class Coordinate:
    """Algorithm 1 for one θ_i. `observe` takes the non-zero sample gradients of a minibatch."""

    def __init__(self, theta: float, *, finite_differences: bool = True):
        self.theta = theta
        self.finite_differences = finite_differences
        self.tau = 2.0
        self.seen = 0
        self.g = self.v = self.h = self.v_fd = 0.0
        self.eta = 0.0
        self.outliers = 0

    def delta(self, gradients: list[float]) -> float:
        """Return the probe δ_i for this minibatch."""
        g = self.g
        if self.seen < BOOTSTRAP and gradients:
            g = (self.seen * self.g + sum(gradients)) / (self.seen + len(gradients))
        return g + math.copysign(EPSILON, g) if g != 0 else EPSILON

    def observe(self, gradients: list[float], curvatures: list[float]) -> None:
        n = len(gradients)
        if n == 0:
            return
        gradient = sum(gradients) / n
        gradient_sq = sum(g * g for g in gradients) / n
        curvature = sum(curvatures) / n
        curvature_sq = sum(h * h for h in curvatures) / n

        if self.seen < BOOTSTRAP:
            old, new = self.seen / (self.seen + n), n / (self.seen + n)
            self._average(old, new, gradient, gradient_sq, curvature, curvature_sq)
            self.seen += n
            return
        self.seen += n

        if self.finite_differences and (
            self._is_far(gradient, self.g, self.v) or self._is_far(curvature, self.h, self.v_fd)
        ):
            self.tau += 1
            self.outliers += 1
        self._average(1 - 1 / self.tau, 1 / self.tau, gradient, gradient_sq, curvature, curvature_sq)
        if self.finite_differences:
            inverse_curvature = (self.h + EPSILON) / (self.v_fd + EPSILON)
        else:
            inverse_curvature = 1 / (self.h + EPSILON)
        self.eta = inverse_curvature * n * self.g**2 / (self.v + (n - 1) * self.g**2 + EPSILON)
        self.tau = (1 - self.g**2 / (self.v + EPSILON)) * self.tau + 1
        self.theta -= self.eta * gradient

    def _average(self, old: float, new: float, g: float, v: float, h: float, v_fd: float) -> None:
        self.g = old * self.g + new * g
        self.v = old * self.v + new * v
        self.h = old * self.h + new * h
        self.v_fd = old * self.v_fd + new * v_fd

    @staticmethod
    def _is_far(value: float, mean: float, mean_sq: float) -> bool:
        # a thousandth of the root mean square is within rounding error
        rounding = 1e-6 * mean_sq
        return abs(value - mean) > 2 * math.sqrt(abs(mean_sq - mean**2) + rounding)


def sample_gradient(shape: str, scale: float, x: float) -> float:
    if shape == "quad":
        return 2 * scale * x
    if shape == "abs":
        return scale * ((x > 0) - (x < 0))
    if shape == "rectlin":
        return scale if x > 0 else 0.0
    return scale * x * math.exp(-x * x / 2)


def sample_curvature(shape: str, scale: float, x: float) -> float:
    if shape == "quad":
        return 2 * scale
    if shape == "gauss":
        return abs(scale * (1 - x * x) * math.exp(-x * x / 2))
    return 0.0


def run(
    shape: str, scale: float, minibatches: list[list[float]], *, finite_differences: bool = True
) -> list[Coordinate]:
    """Minimize a sample loss of θ − ξ from θ = 1. Each minibatch lists its ξ. Return a snapshot after each."""
    me = Coordinate(1.0, finite_differences=finite_differences)
    history = []
    for samples in minibatches:
        gradients = [sample_gradient(shape, scale, me.theta - xi) for xi in samples]
        if finite_differences:
            delta = me.delta(gradients)
            shifted = [sample_gradient(shape, scale, me.theta + delta - xi) for xi in samples]
            curvatures = [abs((a - b) / delta) for a, b in zip(gradients, shifted, strict=True)]
        else:
            curvatures = [sample_curvature(shape, scale, me.theta - xi) for xi in samples]
        me.observe(gradients, curvatures)
        snapshot = Coordinate(me.theta)
        snapshot.__dict__.update(me.__dict__)
        history.append(snapshot)
    return history


def orthogonal_weights(gradients: list[list[float]]) -> list[float]:
    """Return the weights of eq. 5: one over the sum of absolute cosines with all gradients."""

    def dot(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    def norm(a: list[float]) -> float:
        return math.sqrt(dot(a, a))

    return [1 / sum(abs(dot(a, b)) / (norm(a) * norm(b)) for b in gradients) for a in gradients]
