"""The kernel for sparse rows equals the scalar reference, sparse equals dense, and threads do not change results."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from vsgd import COLUMNS, PAPER
from vsgd.algorithms import columns
from vsgd.jit import compiled, reached, register
from vsgd.linear import (
    REGRESSION,
    Task,
    Training,
    as_rows,
    distinct,
    kernel,
    learning_rates,
    new_model,
    train_on,
)
from vsgd.linear.centering import move_centers
from vsgd.linear.evidence import estimate_penalty
from vsgd.linear.losses import CLASSIFICATION, SQUARED, slope, value
from vsgd.linear.minibatch import workspace
from vsgd.linear.model import CENTER, COLUMN_MAX, CURV, MEMORY, SEEN, SUM, THETA
from vsgd.linear.training import COLUMN_PASS, PAPER_PASS, Patience, coefficients

COLUMNS_OF_X = 4


@st.composite
def csr_matrices(draw):
    """Small matrices with empty rows, stored zeros, unsorted and repeated entries."""
    samples = draw(st.integers(15, 40))
    number = st.floats(-3, 3, width=32).map(lambda x: round(x, 2))
    rows = draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, COLUMNS_OF_X - 1), number), max_size=6),
            min_size=samples,
            max_size=samples,
        )
    )
    indptr = np.cumsum([0] + [len(row) for row in rows])
    indices = np.array([column for row in rows for column, _ in row], dtype=draw(st.sampled_from(["i4", "i8"])))
    data = np.array([x for row in rows for _, x in row], dtype=draw(st.sampled_from(["f4", "f8"])))
    return sparse.csr_matrix((data, indices, indptr), shape=(samples, COLUMNS_OF_X))


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def scalar_loops(X, y, batch_size: int, epochs: int, loss: int) -> list[reference.Coordinate]:
    """Train on the rows of a dense matrix with one `reference.Coordinate` per column and one for the intercept."""
    coordinates = [reference.Coordinate(0.0) for _ in range(X.shape[1] + 1)]
    rows = [[*map(float, row), 1.0] for row in X]
    for _ in range(epochs):
        for start in range(0, len(rows), batch_size):
            batch = list(zip(rows[start : start + batch_size], y[start : start + batch_size], strict=True))
            theta = [c.theta for c in coordinates]
            at = [slope(loss, 0.0, dot(row, theta), t) for row, t in batch]
            grads = [
                [g * row[j] for g, (row, _) in zip(at, batch, strict=True) if row[j] != 0]
                for j in range(len(coordinates))
            ]
            deltas = [c.delta(g) if g else 0.0 for c, g in zip(coordinates, grads, strict=True)]
            moved = [a + b for a, b in zip(theta, deltas, strict=True)]
            there = [slope(loss, 0.0, dot(row, moved), t) for row, t in batch]
            for j, coordinate in enumerate(coordinates):
                curvatures = [
                    abs((a - b) * row[j] / deltas[j])
                    for a, b, (row, _) in zip(at, there, batch, strict=True)
                    if row[j] != 0
                ]
                coordinate.observe(grads[j], curvatures)
    return coordinates


def trained(X, y, *, batch_size=32, epochs=1, options=COLUMNS, outputs=1, threads=1, weights=None, seed=0, **task):
    training = Training(Task(**task), options, batch_size, threads)
    model = new_model(X.shape[1] + training.task.intercept, outputs, training.task, options, seed)
    weights = np.ones(len(y)) if weights is None else weights
    rows, order = as_rows(X), np.arange(len(y))
    for _ in range(epochs):
        train_on(model, rows, order, y, weights, training)
    return model


@settings(max_examples=60, deadline=None)
@given(csr_matrices(), st.sampled_from([1, 3, 32]), st.sampled_from(["log_loss", "hinge", "squared_error"]))
def test_equals_the_reference_on_random_matrices(X, batch_size, name):
    loss = {**CLASSIFICATION, **REGRESSION}[name]
    y = np.where(np.arange(X.shape[0]) % 3 == 0, 1.0, -1.0)
    expected = scalar_loops(X.toarray().astype(float), y.tolist(), batch_size, 3, loss)
    model = trained(X, y, batch_size=batch_size, epochs=3, options=PAPER, loss=loss)
    for field, name in ((THETA, "theta"), (MEMORY, "tau"), (SEEN, "seen")):
        wanted = [getattr(coordinate, name) for coordinate in expected]
        np.testing.assert_allclose(model.table[:, field, 0], wanted, rtol=1e-6, atol=1e-9)


@pytest.fixture(scope="module")
def text_like():
    """Power-law columns of very different scales, and three classes."""
    rng = np.random.default_rng(0)
    X = sparse.random(400, 60, density=0.1, random_state=1, format="csr") @ sparse.diags(10.0 ** rng.uniform(-3, 3, 60))
    y = np.asarray((X > 0) @ rng.standard_normal((60, 3))).argmax(axis=1).astype(float)
    return X.tocsr(), y


@pytest.mark.parametrize("options", [PAPER, COLUMNS], ids=["paper", "columns"])
@pytest.mark.parametrize("task", [{"softmax": True}, {"one_vs_rest": True}], ids=["softmax", "ovr"])
def test_sparse_and_dense_rows_make_the_same_model(text_like, options, task):
    X, y = text_like
    models = [
        trained(data, y, epochs=3, options=options, outputs=3, loss=CLASSIFICATION["log_loss"], **task)
        for data in (X, X.toarray(), np.asfortranarray(X.toarray()))
    ]
    assert np.abs(models[0].table[:, THETA]).max() > 0
    for other in models[1:]:
        np.testing.assert_array_equal(models[0].table, other.table)


def half_full(seed=0):
    """Columns far from zero, in about half of the rows or in all of them, and binary targets."""
    rng = np.random.default_rng(seed)
    X = (rng.standard_normal((300, 6)) + 20) * 10.0 ** np.arange(-3, 3)
    y = np.where((X / 10.0 ** np.arange(-3, 3) - 20) @ [1, -1, 2, 0.5, 0, 1] + rng.standard_normal(300) > 0, 1.0, -1.0)
    X[:, :3] *= rng.random((300, 3)) < 0.5
    return X, y


def margins(model, X, task):
    theta = coefficients(model, task)
    return X @ theta[:-1] + theta[-1]


@pytest.mark.parametrize("batch_size", [1, 16])
def test_sparse_and_dense_rows_are_centered_alike(batch_size):
    X, y = half_full()
    dense, csr = (
        trained(data, y, batch_size=batch_size, epochs=2, loss=CLASSIFICATION["log_loss"], evidence=True)
        for data in (X, sparse.csr_matrix(X))
    )
    assert (dense.columns[:-1, CENTER] != 0).all()
    for a, b in zip(dense, csr, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rare_columns_have_no_center_and_stay_sparse(text_like):
    X, y = text_like
    model = trained(X, np.where(y == 0, 1.0, -1.0), loss=CLASSIFICATION["log_loss"])
    assert (model.columns[:-1, CENTER] == 0).all()
    np.testing.assert_array_equal(model.table[:-1, SEEN, 0], np.asarray((X != 0).sum(axis=0)).ravel())


@pytest.mark.parametrize("loss", ["log_loss", "hinge", "squared_error"])
def test_adding_a_constant_to_columns_changes_predictions_by_rounding_only(loss):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((500, 4))
    y = np.where(X @ [1, -1, 0.5, 0] + rng.standard_normal(500) > 0, 1.0, -1.0)
    task = Task({**CLASSIFICATION, **REGRESSION}[loss], natural_unit=loss in CLASSIFICATION)
    offsets = np.array([0.0, 1e3, -1e5, 1e6])
    at, shifted = (
        margins(trained(data, y, epochs=3, loss=task.loss, natural_unit=task.natural_unit), data, task)
        for data in (X + 10, X + 10 + offsets)
    )
    np.testing.assert_allclose(shifted, at, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("average", [False, True])
def test_moving_centers_changes_no_prediction(average):
    X, y = half_full()
    task = Task(CLASSIFICATION["log_loss"], average=average, center=True)
    model = trained(X, y, epochs=2, loss=task.loss, average=average)
    before, centers = margins(model, X, task), model.columns[:, CENTER].copy()
    model.columns[:-1, SUM] *= 1.5
    move_centers(model, task)
    assert (model.columns[:-1, CENTER] != centers[:-1]).all()
    np.testing.assert_allclose(margins(model, X, task), before, rtol=1e-9)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_constant_column_is_left_to_the_intercept(batch_size):
    X, y = half_full()
    constant = np.column_stack([X, np.full(len(y), 0.1)])
    without, with_it = (
        trained(data, y, batch_size=batch_size, epochs=3, loss=CLASSIFICATION["log_loss"]) for data in (X, constant)
    )
    assert with_it.table[6, THETA, 0] == 0
    np.testing.assert_allclose(with_it.table[:6, THETA], without.table[:6, THETA], rtol=1e-9)


def test_threads_share_the_classes(text_like):
    X, y = text_like
    one, three = (
        trained(X, y, epochs=2, outputs=3, threads=n, loss=CLASSIFICATION["hinge"], one_vs_rest=True, evidence=True)
        for n in (1, 3)
    )
    np.testing.assert_array_equal(one.table, three.table)
    np.testing.assert_array_equal(one.sums, three.sums)
    np.testing.assert_array_equal(one.penalty, three.penalty)


@pytest.mark.parametrize("options", [PAPER, COLUMNS], ids=["paper", "columns"])
def test_learning_rates_are_those_of_the_algorithm(text_like, options):
    """A column without samples has rate 0; the others have the rate of one more sample."""
    X, y = text_like
    X = sparse.hstack([X, sparse.csr_matrix((X.shape[0], 1))]).tocsr()
    model = trained(X, np.where(y == 0, 1.0, -1.0), options=options, loss=CLASSIFICATION["log_loss"])
    rates = learning_rates(model, options)[:, 0]
    _, grad, grad_sq, curv, curv_sq, _, seen, _ = model.table[:, :, 0].T
    fraction = grad**2 / (abs(grad_sq - grad**2) + grad**2 + options.epsilon)
    wanted = fraction * (curv + 1e-5) / (curv_sq + 1e-5) if options is PAPER else fraction / (curv + options.epsilon)
    np.testing.assert_allclose(rates, np.where(seen >= (10 if options is PAPER else 1), wanted, 0), rtol=1e-9)
    assert rates[-2] == 0 < rates[:-2].max()


def measure_nothing(batch, slots, model, targets, weights, task, config, work):
    return 0.0


def packed_divisions(dispatcher) -> int:
    (code,) = dispatcher.inspect_asm().values()
    return code.count("divpd")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="counts instructions of this processor")
def test_several_coordinates_are_updated_at_a_time(text_like):
    """The divisions of an update, of a mean and of the penalty are vectorized."""
    X, y = text_like
    rows, task = as_rows(X), Task(CLASSIFICATION["log_loss"])
    model, work = new_model(X.shape[1] + 1, 1, task, COLUMNS, 0), workspace(rows, X.shape[1] + 1, 1, 32)
    penalize = compiled(kernel.penalize_by_evidence)
    penalize(0, model, task, work)
    register(measure_nothing)
    train = compiled(kernel.pass_with(measure_nothing, columns.update))
    train(model, rows, np.arange(len(y)), y, np.ones(len(y)), 32, task, COLUMNS, work)
    assert packed_divisions(penalize) > 0
    assert packed_divisions(train) >= packed_divisions(penalize) + 5


def test_a_column_without_entries_is_left_alone(text_like):
    X, y = text_like
    X = X.copy()
    X.data[X.indices == 7] = 0
    model = trained(X, y, outputs=3, loss=CLASSIFICATION["log_loss"], softmax=True)
    assert model.table[7, SEEN].tolist() == [0, 0, 0]
    assert model.table[7, THETA].tolist() == [0, 0, 0]


@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize("loss", [*CLASSIFICATION, *REGRESSION])
def test_the_scale_of_columns_and_loss_does_not_matter(text_like, loss, batch_size):
    """Powers of two do not change rounding, so only the units may change."""
    X, labels = text_like
    y = np.where(labels == 0, 1.0, -1.0) if loss in CLASSIFICATION else labels + 1
    scale = 2.0 ** np.random.default_rng(3).integers(-13, 14, X.shape[1])
    task = {"loss": {**CLASSIFICATION, **REGRESSION}[loss], "parameter": 0.3, "natural_unit": loss not in REGRESSION}
    plain = trained(X, y, batch_size=batch_size, epochs=3, **task)
    scaled = trained((X @ sparse.diags(scale)).tocsr(), y, batch_size=batch_size, epochs=3, **task)
    heavy = trained(X, y, batch_size=batch_size, epochs=3, weights=np.full(len(y), 2.0**13), **task)
    assert np.isfinite(plain.table).all()
    assert np.abs(plain.table[:-1, THETA]).max() > 0
    np.testing.assert_array_equal(scaled.table[:-1, THETA, 0] * scale, plain.table[:-1, THETA, 0])
    np.testing.assert_array_equal(heavy.table[:, THETA], plain.table[:, THETA])


def test_the_scale_of_a_column_matters_to_the_paper(text_like):
    X, labels = text_like
    y = np.where(labels == 0, 1.0, -1.0)
    plain, scaled = (trained(X * c, y, options=PAPER, epochs=3, loss=0) for c in (1.0, 1024.0))
    assert not np.allclose(scaled.table[:-1, THETA] * 1024, plain.table[:-1, THETA], rtol=0.1)


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 3)), min_size=1, max_size=9))
def test_the_first_steps_of_a_row_do_not_pass_its_optimum(entries):
    """Newton's step of a row is Σ x² / h with every coordinate going all the way."""
    row = [(x, abs(x) * (1 + excess)) for x, excess in entries]
    fresh = columns.init(0.0, COLUMNS)
    reach = [abs(x) * columns.probe(fresh, 1, largest, COLUMNS) for x, largest in row]
    total = sum(
        x * x / columns.column_curvature(1.0, x, largest, sum(reach) - own)
        for (x, largest), own in zip(row, reach, strict=True)
    )
    assert total <= 1 + 1e-9


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 3.0], [3.0, 1.0]])
def test_no_row_is_taken_to_be_much_flatter_than_the_others(weights):
    """The first row is classified with confidence, so it has almost no curvature. Rows share no columns."""
    task = Task(CLASSIFICATION["log_loss"], intercept=False)
    model = new_model(2, 1, task, COLUMNS, 0)
    model.table[0, THETA], model.table[0, COLUMN_MAX] = 20.0, 1.0
    train_on(model, as_rows(np.eye(2)), np.arange(2), np.ones(2), np.array(weights), Training(task, COLUMNS))
    floored, own = model.table[:, CURV, 0]
    assert own > 0.1
    np.testing.assert_allclose(floored, COLUMNS.row_curvature_floor * weights[0] * own / sum(weights), rtol=1e-6)


@pytest.mark.parametrize("loss", [*CLASSIFICATION.values(), *REGRESSION.values()])
@pytest.mark.parametrize("target", [-1.0, 1.0])
def test_slopes_are_the_derivatives_of_the_losses(loss, target):
    for margin in np.linspace(-2.95, 2.95, 60):
        numeric = (value(loss, 0.3, margin + 1e-6, target) - value(loss, 0.3, margin - 1e-6, target)) / 2e-6
        assert slope(loss, 0.3, margin, target) == pytest.approx(numeric, abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(csr_matrices(), st.randoms(use_true_random=False))
def test_weights_are_multiplicities_in_any_order(X, random):
    X = sparse.csr_matrix(X.toarray())
    y = (np.arange(X.shape[0]) % 2).astype(float)
    weights = np.array([float(random.randint(0, 3)) for _ in y])
    repeats = [i for i, w in enumerate(weights) for _ in range(int(w))]
    random.shuffle(repeats)
    weighted = distinct(as_rows(X), y, weights, COLUMNS_OF_X)
    repeated = distinct(as_rows(X.toarray()[repeats]), y[repeats], np.ones(len(repeats)), COLUMNS_OF_X)
    np.testing.assert_array_equal(weighted.weights, repeated.weights)
    np.testing.assert_array_equal(X.toarray()[weighted.rows], X.toarray()[repeats][repeated.rows])
    np.testing.assert_array_equal(y[weighted.rows], y[repeats][repeated.rows])


class TestPatience:
    def test_training_continues_while_a_noisy_loss_falls(self):
        rng = np.random.default_rng(0)
        patience = Patience(tol=1e-3, patience=5)
        losses = 1 + np.exp(-np.arange(60) / 30) + 0.01 * rng.standard_normal(60)
        assert not any(patience.is_over(loss) for loss in losses)

    def test_a_noisy_loss_that_no_longer_falls_ends(self):
        rng = np.random.default_rng(0)
        patience = Patience(tol=1e-3, patience=5)
        assert any(patience.is_over(1 + 0.01 * rng.standard_normal()) for _ in range(60))

    def test_no_tolerance_never_ends(self):
        patience = Patience(tol=None, patience=1)
        assert not any(patience.is_over(1.0) for _ in range(10))


class TestPenalty:
    """The optimum has a closed form: least squares on rows with one non-zero element each."""

    rng = np.random.default_rng(0)
    columns = rng.choice(5, 3000, p=[0.5, 0.3, 0.1, 0.08, 0.02])
    X = sparse.csr_matrix((rng.uniform(0.5, 2, 3000), (np.arange(3000), columns)), shape=(3000, 5))
    y = np.asarray(X @ np.array([1.0, -2.0, 0.5, 0.05, 3.0])) + 0.1 * rng.standard_normal(3000)

    def optimum(self, l1, l2):
        xx = np.asarray(self.X.multiply(self.X).mean(axis=0)).ravel()
        xy = np.asarray(self.X.T @ self.y) / len(self.y)
        return np.sign(xy) * np.maximum(np.abs(xy) - l1, 0) / (xx + l2)

    @pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.0, 0.05), (0.02, 0.0), (0.02, 0.05)])
    def test_settles_at_the_optimum_however_rare_the_column(self, l1, l2):
        model = trained(self.X, self.y, epochs=30, loss=SQUARED, l1=l1, l2=l2, intercept=False)
        np.testing.assert_allclose(model.table[:, THETA, 0], self.optimum(l1, l2), atol=0.03)
        if l1:
            assert model.table[3, THETA, 0] == 0


def test_no_sum_of_a_pass_may_be_reordered_by_the_compiler():
    """Otherwise two processes with different machine code would not agree to the bit."""
    for run in (COLUMN_PASS, PAPER_PASS, estimate_penalty):
        assert [each.__name__ for each in reached(run) if hasattr(each, "jit_options")] == []


FIXED_PENALTY = {"l1": 0.01, "l2": 0.01, "average": True}


@pytest.mark.parametrize(
    ("options", "task"),
    [(PAPER, FIXED_PENALTY), (COLUMNS, FIXED_PENALTY), (COLUMNS, {"evidence": True})],
    ids=["paper", "columns", "estimated penalty"],
)
def test_result_does_not_depend_on_initial_content_of_buffers(monkeypatch, options, task):
    X, y = half_full()
    before = trained(X, y, epochs=2, options=options, loss=CLASSIFICATION["log_loss"], **task)
    empty, filled = np.empty, []

    def empty_with_junk(shape, dtype=float):
        array = empty(shape, dtype)
        array.fill(np.nan if array.dtype.kind == "f" else 1)
        filled.append(array)
        return array

    monkeypatch.setattr(np, "empty", empty_with_junk)
    after = trained(X, y, epochs=2, options=options, loss=CLASSIFICATION["log_loss"], **task)
    assert len(filled) > 10
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
