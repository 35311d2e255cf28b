"""Arrays of every kind are accepted, converted or rejected before the compiled kernel runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import sparse

from vsgd import COLUMNS
from vsgd.linear import Task, Training, as_rows, new_model, train_on
from vsgd.linear.losses import LOG
from vsgd.sklearn import VSGDClassifier, VSGDRegressor

RNG = np.random.default_rng(0)
X = sparse.random(60, 5, density=0.5, random_state=1, format="csr")
Y = (np.arange(60) % 2).astype(float)


def fitted(X, model=VSGDClassifier, y=Y):
    return model(max_iter=2, tol=None, random_state=0).fit(X, y).coef_


def variant(matrix, data=None, indices=None, indptr=None):
    """Return the matrix with other arrays, without checks."""
    new = matrix.copy()
    new.data, new.indices, new.indptr = (
        given if given is not None else old
        for given, old in ((data, new.data), (indices, new.indices), (indptr, new.indptr))
    )
    return new


def strided(array):
    return np.repeat(array, 2)[::2]


def misaligned(array):
    room = np.zeros(array.nbytes + 1, np.uint8)
    out = room[1:].view(array.dtype) if array.itemsize == 1 else np.frombuffer(room, array.dtype, len(array), 1)
    out[:] = array
    return out


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


class TestMatricesThatAreTaken:
    """Big-endian indices after a native fit must be converted."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda a: a.astype(a.dtype.newbyteorder(">")),
            lambda a: a.astype("i8") if a.dtype.kind == "i" else a,
            strided,
            misaligned,
            read_only,
        ],
        ids=["big-endian", "int64", "strided", "misaligned", "read-only"],
    )
    @pytest.mark.parametrize("part", ["data", "indices", "indptr"])
    def test_csr(self, change, part):
        changed = variant(X, **{part: change(getattr(X, part))})
        if part == "indices":
            np.testing.assert_array_equal(fitted(changed), fitted(X))
        rows, other = as_rows(X), as_rows(changed)
        for mine, theirs in zip(rows, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert theirs.dtype.isnative

    def test_a_flag_that_lies(self):
        """Duplicate entries are added, also if the matrix claims to have none."""
        twice = sparse.csr_matrix((np.ones(4), [0, 0, 2, 1], [0, 2, 4]), shape=(2, 3))
        twice.has_canonical_format = True
        rows = as_rows(twice)
        assert (rows.data.tolist(), rows.indices.tolist(), rows.length.tolist()) == ([2, 1, 1], [0, 1, 2], [1, 2])

    def test_files_in_memory(self, tmp_path):
        dense = X.toarray()
        np.save(tmp_path / "x.npy", dense)
        np.testing.assert_array_equal(fitted(np.load(tmp_path / "x.npy", mmap_mode="r")), fitted(dense))

    def test_dense_of_every_layout(self):
        dense = X.toarray()
        for other in (np.asfortranarray(dense), dense.astype(">f8"), np.repeat(dense, 2, axis=0)[::2]):
            np.testing.assert_array_equal(fitted(other), fitted(dense))
            assert as_rows(other).data.dtype.isnative


class TestMatricesThatAreRefused:
    @pytest.mark.parametrize("bad", [10**9, -1, -(10**9), 5])
    def test_an_index_outside(self, bad):
        indices = X.indices.copy()
        indices[7] = bad
        for use in (fitted, as_rows):
            with pytest.raises(ValueError, match="column indices"):
                use(variant(X, indices=indices))

    @pytest.mark.parametrize("at", [0, 3, -1])
    @pytest.mark.parametrize("bad", [10**6, -5])
    def test_starts_that_go_backwards_or_outside(self, at, bad):
        indptr = X.indptr.copy()
        indptr[at] = bad
        with pytest.raises(ValueError, match=r"rows|length|index pointer"):
            as_rows(variant(X, indptr=indptr))

    @pytest.mark.parametrize("value", [1e71, 1e160, 1e200, -1e300])
    def test_values_whose_squares_overflow(self, value):
        dense = X.toarray()
        dense[3, 2] = value
        with pytest.raises(ValueError, match="too large"):
            fitted(dense)
        y = Y.copy()
        y[5] = value
        with pytest.raises(ValueError, match="too large"):
            fitted(X, VSGDRegressor, y)

    @pytest.mark.parametrize("value", [5e-324, 1e-310, 1e-305, -1e-301])
    def test_values_whose_inverse_overflows_count_as_zero(self, value):
        """They must not be rejected as too large."""
        dense, zero = X.toarray(), X.toarray()
        dense[:, 2], zero[:, 2] = value, 0
        np.testing.assert_array_equal(fitted(dense), fitted(zero))

    @pytest.mark.parametrize("largest", [1e70, 1e-40])
    @pytest.mark.parametrize("model", [VSGDClassifier, VSGDRegressor])
    def test_the_scale_of_a_column_does_not_matter_within_the_limits(self, model, largest):
        dense, scale = X.toarray(), largest / X.max()
        np.testing.assert_allclose(fitted(dense * scale, model) * scale, fitted(dense, model), rtol=1e-9)


class TestTrainOn:
    """Arrays of the wrong size raise an error that names them."""

    def given(self):
        task = Task(LOG)
        model = new_model(6, 1, task, COLUMNS, 0)
        return [model, as_rows(X), np.arange(60), 2 * Y - 1, np.ones(60), Training(task, COLUMNS)]

    def refused(self, arguments, match):
        before = [array.copy() for array in arguments[0]]
        with pytest.raises(ValueError, match=match):
            train_on(*arguments)
        for mine, theirs in zip(before, arguments[0], strict=True):
            np.testing.assert_array_equal(mine, theirs)

    @pytest.mark.parametrize(
        ("key", "change"),
        [
            ("table", lambda a: a[:2]),
            ("table", lambda a: a[:, :3]),
            ("table", lambda a: a[:, :, :0]),
            ("table", lambda a: a.astype(">f8")),
            ("table", lambda a: a.astype("f4")),
            ("table", lambda a: a[::-1]),
            ("table", lambda a: a.reshape(-1)),
            ("table", read_only),
            ("sums", lambda a: a[:1]),
            ("columns", lambda a: a[:1]),
            ("penalty", lambda a: a[:1]),
            ("residual", lambda a: a[:0]),
            ("progress", lambda a: a[:1]),
            ("progress", lambda a: a.astype(float)),
            ("average", lambda a: np.zeros((6, 1))),
            ("average", lambda a: None),
        ],
    )
    def test_a_model_that_does_not_fit_together(self, key, change):
        arguments = self.given()
        arguments[0] = arguments[0]._replace(**{key: change(getattr(arguments[0], key))})
        with pytest.raises(ValueError, match=f"{key}|column indices"):
            train_on(*arguments)

    @pytest.mark.parametrize(
        ("name", "change", "match"),
        [
            ("indices", lambda a: a + 1, "column indices"),
            ("indices", lambda a: a.astype(">i4"), "indices"),
            ("data", lambda a: a[:-1], "rows"),
            ("data", lambda a: a.astype(">f8"), "data"),
            ("length", lambda a: a + 1, "rows"),
            ("length", lambda a: -a, "length"),
            ("length", lambda a: a.astype("i4"), "length"),
            ("data_start", lambda a: a - 1, "rows"),
            ("index_start", lambda a: a[:-1], "index_start"),
        ],
    )
    def test_rows(self, name, change, match):
        arguments = self.given()
        arguments[1] = arguments[1]._replace(**{name: change(getattr(arguments[1], name))})
        self.refused(arguments, match)

    @pytest.mark.parametrize(
        ("at", "change", "match"),
        [
            (2, lambda a: a + 1, "order"),
            (2, lambda a: a.astype("i4"), "order"),
            (3, lambda a: a[:-1], "targets"),
            (3, lambda a: a.astype(int), "targets"),
            (3, lambda a: a * np.nan, "y"),
            (4, lambda a: a[::-1], "weights"),
            (4, lambda a: a * np.inf, "weights"),
            (5, lambda t: dataclasses.replace(t, batch_size=0), "minibatch"),
            (5, lambda t: dataclasses.replace(t, task=t.task._replace(softmax=True)), "classes"),
        ],
    )
    def test_the_rest(self, at, change, match):
        arguments = self.given()
        arguments[at] = change(arguments[at])
        self.refused(arguments, match)
