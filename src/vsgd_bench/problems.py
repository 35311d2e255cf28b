"""The stochastic test problems of section 6, and one that is not separable.

A sample is a loss of θ − ξ with ξ ~ N(0, σ²) around an optimum. The functions are plain arithmetic for arrays, for
compiled scalars, and for the page of `vsgd figures`, into which they are translated. Expected losses are closed forms,
given as the excess over their infimum.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.special import erf, log_ndtr

SHAPES = ("quad", "abs", "rectlin", "gauss")
QUAD, ABS, RECTLIN, GAUSS = range(4)


class Problem(Protocol):
    """What a simulation asks of a problem. `offset` is θ − ξ, the last axes being the parameter's."""

    @property
    def sigma(self) -> float:
        """The standard deviation of ξ."""

    def gradient(self, offset: Any) -> Any:
        """The sample gradient."""

    def curvature(self, offset: Any) -> Any:
        """The absolute diagonal curvature of the sample."""

    def excess_loss(self, offset: Any) -> Any:
        """The expected loss at a distance from the optimum, less the least one there is."""


def sample_loss(shape: int, scale: float, offset: Any) -> Any:
    """The loss of one sample at a distance from its own optimum."""
    if shape == QUAD:
        return scale * offset**2
    if shape == ABS:
        return scale * abs(offset)
    if shape == RECTLIN:
        return scale * np.maximum(offset, 0)
    return -scale * np.expm1(-(offset**2) / 2)


def gradient(shape: int, scale: float, offset: Any) -> Any:
    """The derivative of the sample loss."""
    if shape == QUAD:
        return 2 * scale * offset
    if shape == ABS:
        return scale * np.sign(offset)
    if shape == RECTLIN:
        return scale * (offset > 0)
    return scale * offset * np.exp(-offset * offset / 2)


def curvature(shape: int, scale: float, offset: Any) -> Any:
    """The absolute second derivative of the sample loss; the kinks of abs and rectlin do not show in it."""
    if shape == QUAD:
        return 2 * scale + 0 * offset
    if shape == GAUSS:
        return scale * abs(1 - offset * offset) * np.exp(-offset * offset / 2)
    return 0 * offset


def excess_loss(shape: int, scale: float, sigma: float, offset: Any) -> Any:
    """E over ξ, less its infimum. The optimum is at 0; rectlin falls to 0 without ever reaching it."""
    u = offset / sigma
    if shape == QUAD:
        excess = offset**2
    elif shape == ABS:
        flat = np.sqrt(2 / np.pi) * np.expm1(-(u**2) / 2)
        excess = sigma * (u * erf(u / np.sqrt(2)) + flat)
    elif shape == RECTLIN:
        below = np.maximum(u, -40)  # where both terms have long been zero
        density = np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi)
        excess = sigma * (density + below * np.exp(log_ndtr(below)))
    else:
        widened = 1 + sigma**2
        excess = -np.expm1(-(offset**2) / (2 * widened)) / np.sqrt(widened)
    return scale * np.maximum(excess, 0)


class Elementary(NamedTuple):
    """A one-dimensional problem: a loss of one of the four `SHAPES`, its curvature setting A and noise σ²."""

    shape: str
    scale: float
    noise: float

    @property
    def sigma(self) -> float:
        return float(np.sqrt(self.noise))

    @property
    def code(self) -> int:
        return SHAPES.index(self.shape)

    def sample_loss(self, offset: Any) -> Any:
        return sample_loss(self.code, self.scale, offset)

    def gradient(self, offset: Any) -> Any:
        return gradient(self.code, self.scale, offset)

    def curvature(self, offset: Any) -> Any:
        return curvature(self.code, self.scale, offset)

    def excess_loss(self, offset: Any) -> Any:
        with np.errstate(over="ignore"):
            return excess_loss(self.code, self.scale, self.sigma, np.asarray(offset, dtype=float))


ELEMENTARY = tuple(
    Elementary(shape, scale, noise) for shape in SHAPES for noise in (10.0, 1.0, 0.1) for scale in (10.0, 1.0, 0.1)
)
"""The 36 columns of Figure 6, noisy ones first."""


class RotatedQuadratic(NamedTuple):
    """½ (θ−ξ)ᵀ H (θ−ξ) with H = Q diag(λ) Qᵀ: coordinates that pull on each other."""

    hessian: Any
    noise: float

    @property
    def sigma(self) -> float:
        return float(np.sqrt(self.noise))

    @property
    def dim(self) -> int:
        return len(self.hessian)

    def gradient(self, offset: Any) -> Any:
        return offset @ self.hessian

    def curvature(self, offset: Any) -> Any:
        return np.diag(self.hessian) + 0 * offset

    def excess_loss(self, offset: Any) -> Any:
        return (offset * (offset @ self.hessian)).sum(axis=-1) / 2


def rotated_quadratic(dim: int, condition: float = 100.0, noise: float = 1.0, seed: int = 0) -> RotatedQuadratic:
    """Eigenvalues from 1/condition to 1, evenly in log, in a random basis."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    eigenvalues = np.logspace(-np.log10(condition), 0, dim)
    return RotatedQuadratic(hessian=(basis * eigenvalues) @ basis.T, noise=noise)
