"""The compiled loop equals the written-out differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vsgd.torch.per_sample.reduce import DEPTH, WIDTH, products, summed_products, tiles
from vsgd.torch.per_sample.terms import Outer


def factors(samples, rows, columns, dtype, zeros=0.5):
    torch.manual_seed(samples + rows + columns)
    made = [torch.randn(samples, size, dtype=dtype) for size in (columns, rows, columns, rows)]
    for k in (1, 3):  # as behind a rectifier
        made[k] = made[k] * (torch.rand(samples, rows) > zeros)
    return made


def written_out(a, b, a2, b2):
    gradients = torch.einsum("no,ni->noi", b, a)
    differences = gradients - torch.einsum("no,ni->noi", b2, a2)
    return gradients.square().sum(0), differences.abs().sum(0), differences.square().sum(0)


@settings(max_examples=20, deadline=None)
@given(samples=st.integers(1, 2 * DEPTH), rows=st.integers(1, 7), columns=st.integers(1, WIDTH + 20))
def test_any_shape(samples, rows, columns):
    made = factors(samples, rows, columns, torch.float64)
    for got, want in zip(summed_products(*made), written_out(*made), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_float32_stays_float32_and_is_accurate_for_close_points(threads):
    a, b, _, _ = factors(130, 33, 2 * WIDTH + 1, torch.float32)
    made = [a, b, a * (1 + 1e-4), b * (1 - 3e-4)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = summed_products(*made)
    finally:
        torch.set_num_threads(before)
    for got, want in zip(found, written_out(*(part.double() for part in made)), strict=True):
        assert got.dtype == torch.float32
        # three products of squares would be off by more than the whole result here
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=0)


def test_equal_points_differ_by_nothing_at_all():
    a, b, _, _ = factors(20, 7, 30, torch.float32)
    grad_sq, diff_abs, diff_sq = summed_products(a, b, a, b)
    assert grad_sq.min() > 0
    assert diff_abs.max() == diff_sq.max() == 0


def test_strided_arguments():
    made = [part[::2, ::3] for part in factors(40, 30, 60, torch.float64)]
    for got, want in zip(summed_products(*made), written_out(*made), strict=True):
        torch.testing.assert_close(got, want)


def test_not_a_number_is_kept():
    a, b, a2, b2 = factors(8, 4, 5, torch.float64, zeros=0)
    b[3, 2] = float("nan")
    assert summed_products(a, b, a2, b2)[0].isnan().any(1).tolist() == [False, False, True, False]


def test_tiles_equal_the_compiled_loop():
    """Tiles are what runs on other devices."""
    a, b, a2, b2 = factors(20, 7, 30, torch.float64)
    terms = [[Outer(x[:, None, None], y[:, None, :, None])] for x, y in ((a, b), (a2, b2))]
    for got, want in zip(tiles(torch.empty(7, 30, dtype=torch.float64), terms, 20), products(terms), strict=True):
        torch.testing.assert_close(got, want)
