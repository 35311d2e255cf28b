"""Closed forms of expected losses, compared with means over samples."""

from __future__ import annotations

import numpy as np
import pytest

from vsgd_bench.problems import ELEMENTARY, Elementary, rotated_quadratic

SHAPES = ("quad", "abs", "rectlin", "gauss")


def test_there_are_36():
    assert len(set(ELEMENTARY)) == 36


@pytest.mark.parametrize("noise", [0.1, 10.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_expected_loss_is_the_mean_of_sample_losses(shape, noise):
    problem = Elementary(shape, 2.0, noise)
    xi = np.sqrt(noise) * np.random.default_rng(0).standard_normal(400_000)
    for theta in (-2.0, 0.3, 1.0):
        here, there = problem.sample_loss(theta - xi), problem.sample_loss(0.0 - xi)
        difference = here - there
        error = difference.std() / np.sqrt(len(xi))
        expected = problem.excess_loss(theta) - problem.excess_loss(0.0)
        assert abs(difference.mean() - expected) < 4 * error


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_and_curvature_are_derivatives(shape):
    problem = Elementary(shape, 3.0, 1.0)
    x = np.linspace(-2.5, 2.6, 41)
    step = 1e-5
    slope = (problem.sample_loss(x + step) - problem.sample_loss(x - step)) / (2 * step)
    np.testing.assert_allclose(problem.gradient(x), slope, atol=1e-8)
    bend = (problem.gradient(x + step) - problem.gradient(x - step)) / (2 * step)
    np.testing.assert_allclose(problem.curvature(x), abs(bend), atol=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_excess_loss_is_never_negative_nor_undefined(shape):
    problem = Elementary(shape, 1.0, 0.1)
    theta = np.array([-np.inf, -1e200, -1e3, -5.0, -1e-9, 0.0, 1e-9, 1.0, 1e200, np.inf])
    loss = problem.excess_loss(theta)
    assert (loss >= 0).all()
    if shape == "rectlin":
        assert (np.diff(loss[:-2]) >= 0).all()
    else:
        assert loss[5] == 0


def test_rotated_quadratic_is_what_it_says():
    problem = rotated_quadratic(dim=6, condition=50.0, noise=2.0)
    eigenvalues = np.linalg.eigvalsh(problem.hessian)
    assert eigenvalues[-1] / eigenvalues[0] == pytest.approx(50)
    off_diagonal = problem.hessian - np.diag(np.diag(problem.hessian))
    assert np.abs(off_diagonal).max() > 0.05
    theta = np.random.default_rng(0).standard_normal((3, 6))
    np.testing.assert_allclose(problem.excess_loss(theta), [t @ problem.hessian @ t / 2 for t in theta])
    np.testing.assert_allclose(problem.gradient(theta), theta @ problem.hessian)
