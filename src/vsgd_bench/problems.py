"""The stochastic test problems of section 6, and one that is not separable.

The loss of a sample is a function of θ − ξ with ξ ~ N(0, σ²). The functions are plain arithmetic. They run on arrays
and compiled scalars, and are translated to JavaScript for the page of `vsgd figures`. Expected losses are in closed
form, minus their infimum.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, log_ndtr

from vsgd.core import Values

SHAPES = ("quad", "abs", "rectlin", "gauss")
QUAD, ABS, RECTLIN, GAUSS = range(4)


class Problem(Protocol):
    """The interface of a problem. `offset` is θ − ξ; its last axes are those of the parameter."""

    @property
    def sigma(self) -> float:
        """Standard deviation of ξ."""

    def gradient(self, offset: Values) -> Values:
        """Return the gradient of a sample."""

    def curvature(self, offset: Values) -> Values:
        """Return the absolute diagonal curvature of a sample."""

    def excess_loss(self, offset: Values) -> Values:
        """Return the expected loss at a distance from the optimum, minus its infimum."""


def sample_loss(shape: int, scale: float, offset: Values) -> Values:
    """Return the loss of one sample at a distance from its own optimum."""
    if shape == QUAD:
        return scale * offset**2
    if shape == ABS:
        return scale * abs(offset)
    if shape == RECTLIN:
        return scale * np.maximum(offset, 0)
    return -scale * np.expm1(-(offset**2) / 2)


def gradient(shape: int, scale: float, offset: Values) -> Values:
    """Return the derivative of the sample loss."""
    if shape == QUAD:
        return 2 * scale * offset
    if shape == ABS:
        return scale * np.sign(offset)
    if shape == RECTLIN:
        return scale * (offset > 0)
    return scale * offset * np.exp(-offset * offset / 2)


def curvature(shape: int, scale: float, offset: Values) -> Values:
    """Return the absolute second derivative of the sample loss. It is zero beside the kinks of abs and rectlin."""
    if shape == QUAD:
        return 2 * scale + 0 * offset
    if shape == GAUSS:
        return scale * abs(1 - offset * offset) * np.exp(-offset * offset / 2)
    return 0 * offset


def excess_loss(shape: int, scale: float, sigma: float, offset: Values) -> Values:
    """Return the expectation over ξ minus its infimum. The optimum is at 0; rectlin approaches its infimum only."""
    u = offset / sigma
    if shape == QUAD:
        excess = offset**2
    elif shape == ABS:
        flat = np.sqrt(2 / np.pi) * np.expm1(-(u**2) / 2)
        excess = sigma * (u * erf(u / np.sqrt(2)) + flat)
    elif shape == RECTLIN:
        below = np.maximum(u, -40)  # both terms are zero below −40
        density = np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi)
        excess = sigma * (density + below * np.exp(log_ndtr(below)))
    else:
        widened = 1 + sigma**2
        excess = -np.expm1(-(offset**2) / (2 * widened)) / np.sqrt(widened)
    return scale * np.maximum(excess, 0)


class Elementary(NamedTuple):
    """A one-dimensional problem: one of the four `SHAPES` of loss, the curvature setting A, and the noise σ²."""

    shape: str
    scale: float
    noise: float

    @property
    def sigma(self) -> float:
        return float(np.sqrt(self.noise))

    @property
    def code(self) -> int:
        return SHAPES.index(self.shape)

    def sample_loss(self, offset: Values) -> Values:
        return sample_loss(self.code, self.scale, offset)

    def gradient(self, offset: Values) -> Values:
        return gradient(self.code, self.scale, offset)

    def curvature(self, offset: Values) -> Values:
        return curvature(self.code, self.scale, offset)

    def excess_loss(self, offset: Values) -> Values:
        with np.errstate(over="ignore"):
            return excess_loss(self.code, self.scale, self.sigma, np.asarray(offset, dtype=float))


ELEMENTARY = tuple(
    Elementary(shape, scale, noise) for shape in SHAPES for noise in (10.0, 1.0, 0.1) for scale in (10.0, 1.0, 0.1)
)
"""The 36 columns of Figure 6, in order of decreasing noise."""


class RotatedQuadratic(NamedTuple):
    """½ (θ−ξ)ᵀ H (θ−ξ) with H = Q diag(λ) Qᵀ: a quadratic with coupled coordinates."""

    hessian: NDArray[np.float64]
    noise: float

    @property
    def sigma(self) -> float:
        return float(np.sqrt(self.noise))

    @property
    def dim(self) -> int:
        return len(self.hessian)

    def gradient(self, offset: Values) -> Values:
        return offset @ self.hessian

    def curvature(self, offset: Values) -> Values:
        return np.diag(self.hessian) + 0 * offset

    def excess_loss(self, offset: Values) -> Values:
        return (offset * (offset @ self.hessian)).sum(axis=-1) / 2


def rotated_quadratic(dim: int, condition: float = 100.0, noise: float = 1.0, seed: int = 0) -> RotatedQuadratic:
    """Return a quadratic in a random basis, with eigenvalues from 1/condition to 1, evenly spaced on a log scale."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    eigenvalues = np.logspace(-np.log10(condition), 0, dim)
    return RotatedQuadratic(hessian=(basis * eigenvalues) @ basis.T, noise=noise)
