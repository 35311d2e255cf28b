"""Orthogonal reweighting: eq. 5, its two limits, and the effective count."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import reference

from vsgd import reweight
from vsgd.reweight import effective_count, sample_weights


def in_numpy(array):
    return array


def in_torch(array):
    return pytest.importorskip("torch").from_numpy(array)


def in_jax(array):
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    return jax.numpy.asarray(array)


@pytest.mark.parametrize("library", [in_numpy, in_torch, in_jax])
def test_equals_the_reference(library):
    gradients = np.random.default_rng(0).standard_normal((7, 4))
    weights = sample_weights(library(gradients @ gradients.T))
    np.testing.assert_allclose(np.asarray(weights), reference.orthogonal_weights(gradients.tolist()), rtol=1e-12)


@pytest.mark.parametrize("n", [1, 5, 32])
def test_aligned_gradients_are_averaged_and_orthogonal_ones_summed(n):
    aligned = np.outer(np.linspace(1, 2, n), [1.0, -2.0, 0.5])
    weights = sample_weights(aligned @ aligned.T)
    np.testing.assert_allclose(weights, 1 / n)
    assert effective_count(weights) == pytest.approx(n)
    orthogonal = np.diag(np.linspace(1, 2, n))
    weights = sample_weights(orthogonal @ orthogonal.T)
    np.testing.assert_allclose(weights, 1)
    assert effective_count(weights) == pytest.approx(1)


def test_zero_gradients_are_no_samples():
    gradients = np.array([[1.0, 0.0], [0.0, 0.0], [3.0, 0.0]])
    weights = sample_weights(gradients @ gradients.T)
    np.testing.assert_allclose(weights, [0.5, 0, 0.5])
    assert effective_count(weights) == 2
    assert effective_count(sample_weights(np.zeros((3, 3)))) == 0


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(reweight).failed == 0
