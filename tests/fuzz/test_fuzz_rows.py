"""Sparse matrices with arbitrary arrays become rows that the kernel can process, or raise ValueError."""

from __future__ import annotations

import numpy as np
from fuzzing import cases
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from scipy import sparse

from vsgd import COLUMNS
from vsgd.linear import Task, Training, as_rows, new_model, train_on
from vsgd.linear.losses import LOG

WIDTH = 4
INDEX = st.integers(-2, 8) | st.sampled_from([10**9, -(10**9), 2**31 - 1])
VALUE = st.floats(-5, 5) | st.sampled_from([np.nan, np.inf, 1e200, 5e-324, 0.0])


@st.composite
def broken_matrices(draw):
    """Return a matrix with arrays of any length, type, order and content."""
    rows = draw(st.integers(1, 5))
    matrix = sparse.csr_matrix((rows, WIDTH))
    order = draw(st.sampled_from("<>"))
    size = st.sampled_from([f"{order}i4", f"{order}i8"])
    matrix.indptr = np.array(draw(st.lists(INDEX, min_size=rows + 1, max_size=rows + 1)), draw(size))
    if draw(st.booleans()):
        matrix.indptr = np.sort(np.abs(matrix.indptr) % 9)
        matrix.indptr[0] = 0
    matrix.indices = np.array(draw(st.lists(INDEX, max_size=10)), draw(size))
    with np.errstate(over="ignore"):
        matrix.data = np.array(draw(st.lists(VALUE, max_size=10)), draw(st.sampled_from([f"{order}f4", f"{order}f8"])))
    matrix.has_canonical_format = draw(st.booleans())
    return matrix


@seed(0)
@settings(max_examples=cases(400, 20_000), deadline=None, database=None)
@given(broken_matrices())
def test_any_matrix(matrix):
    samples = matrix.shape[0]
    task = Task(LOG)
    model = new_model(WIDTH + 1, 1, task, COLUMNS, 0)
    try:
        with np.errstate(all="ignore"):
            rows = as_rows(matrix)
            y = np.where(np.arange(samples) % 2, 1.0, -1.0)
            train_on(model, rows, np.arange(samples), y, np.ones(samples), Training(task, COLUMNS))
    except ValueError:
        assert not model.progress.any()
    else:
        assert all(np.isfinite(array).all() for array in model)
        assert model.progress[2] == samples
