"""Steps of linear models between measured minibatches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import sparse

from vsgd import COLUMNS, Columns
from vsgd.algorithms import columns
from vsgd.core import Moments
from vsgd.linear import CLASSIFICATION, REGRESSION, Task, Training, as_rows, new_model, train_on
from vsgd.linear.model import CALIBRATION, CURV, GRAD, GRAD_SQ, MEMORY, ROWS, SEEN, THETA
from vsgd.linear.stored_rates import rows_between
from vsgd.linear.training import coefficients

NEVER = Columns(measure_every=10**6)
LOG = CLASSIFICATION["log_loss"]


def passes(X, y, epochs, *, batch_size=4, later=COLUMNS, outputs=1, threads=1, weights=None, **task):
    """The model after each pass. The first one visits the rows for the first time; `later` are the options after it."""
    first = Task(**task)
    model = new_model(X.shape[1] + first.intercept, outputs, first, COLUMNS, 0)
    weights = np.ones(len(y)) if weights is None else weights
    for epoch in range(epochs):
        options = COLUMNS if epoch == 0 else later
        training = Training(first._replace(fresh=epoch == 0), options, batch_size, threads)
        train_on(model, as_rows(X), np.arange(len(y)), y, weights, training)
        yield type(model)(*(array.copy() for array in model))


@pytest.fixture(scope="module")
def text_like():
    """Rare columns of very different scales, one in all rows, and three classes."""
    rng = np.random.default_rng(0)
    X = sparse.random(400, 60, density=0.1, random_state=1, format="csr") @ sparse.diags(10.0 ** rng.uniform(-3, 3, 60))
    y = np.asarray((X > 0) @ rng.standard_normal((60, 3))).argmax(axis=1).astype(float)
    return sparse.hstack([X, 5 + rng.standard_normal((400, 1))]).tocsr(), y


def test_later_passes_measure_one_minibatch_of_eight(text_like):
    X, y = text_like
    before, after = passes(X, np.where(y == 0, 1.0, -1.0), 2, loss=LOG, evidence=True)
    assert 400 / 16 < after.progress[ROWS] - before.progress[ROWS] < 400 / 4
    unmeasured = after.table[:, SEEN, 0] == before.table[:, SEEN, 0]
    assert 0 < unmeasured.sum() < len(unmeasured)
    for field in (GRAD, GRAD_SQ, CURV, MEMORY):
        np.testing.assert_array_equal(after.table[unmeasured, field], before.table[unmeasured, field])
    assert (after.table[unmeasured, THETA] != before.table[unmeasured, THETA]).all()


def test_passes_measure_different_rows(text_like):
    X, y = text_like
    models = list(passes(X, np.where(y == 0, 1.0, -1.0), 6, loss=LOG))
    steps = [np.flatnonzero(b.table[:, SEEN, 0] > a.table[:, SEEN, 0]).tolist() for a, b in pairwise(models)]
    assert len({tuple(found) for found in steps}) > 1


@pytest.mark.parametrize("batch_size", [1, 16])
def test_sparse_and_dense_rows_make_the_same_model(text_like, batch_size):
    X, y = text_like
    task = {"loss": LOG, "one_vs_rest": True, "evidence": True}
    csr, dense = (list(passes(data, y, 3, batch_size=batch_size, outputs=3, **task))[-1] for data in (X, X.toarray()))
    for a, b in zip(csr, dense, strict=True):
        np.testing.assert_array_equal(a, b)


def test_threads_share_the_classes(text_like):
    X, y = text_like
    task = {"loss": CLASSIFICATION["hinge"], "one_vs_rest": True, "evidence": True}
    one, three = (list(passes(X, y, 3, outputs=3, threads=n, **task))[-1] for n in (1, 3))
    for name in ("table", "columns", "sums", "penalty", "progress"):
        np.testing.assert_array_equal(getattr(one, name), getattr(three, name))


@pytest.mark.parametrize("loss", [*CLASSIFICATION, "squared_error", "huber", "quantile"])
def test_the_scale_of_columns_and_loss_does_not_matter(text_like, loss):
    X, labels = text_like
    y = np.where(labels == 0, 1.0, -1.0) if loss in CLASSIFICATION else labels
    scale = 2.0 ** np.random.default_rng(3).integers(-13, 14, X.shape[1])
    task = {"loss": {**CLASSIFICATION, **REGRESSION}[loss], "parameter": 0.3, "natural_unit": loss not in REGRESSION}
    plain, scaled, heavy = (
        list(passes(data, y, 3, weights=weights, **task))[-1].table
        for data, weights in ((X, None), ((X @ sparse.diags(scale)).tocsr(), None), (X, np.full(len(y), 2.0**13)))
    )
    np.testing.assert_array_equal(scaled[:-1, THETA, 0] * scale, plain[:-1, THETA, 0])
    np.testing.assert_array_equal(heavy[:, THETA], plain[:, THETA])


@pytest.mark.parametrize("factor", [1.0, 1e3, 1e6])
def test_a_row_of_enormous_values_does_not_pass_its_optimum(text_like, factor):
    X, y = text_like
    task = Task(REGRESSION["squared_error"], natural_unit=False)
    model = next(passes(X, y, 1, loss=task.loss, natural_unit=False))
    row, target = X[:1] * factor, y[:1] + 100.0

    def residual():
        theta = coefficients(model, task)
        return float((row @ theta[:-1] + theta[-1] - target)[0, 0])

    before = residual()
    train_on(model, as_rows(row), np.arange(1), target, np.ones(1), Training(task._replace(fresh=False), NEVER, 4))
    assert abs(residual()) < abs(before)
    assert residual() * before > -1e-6 * before**2


def test_steps_alone_reduce_the_loss(text_like):
    X, y = text_like
    y = np.where(y == 0, 1.0, -1.0)
    task = Task(LOG)

    def loss(model):
        theta = coefficients(model, task)
        return np.logaddexp(0, -y * (X @ theta[:-1] + theta[-1])[:, 0]).mean()

    models = list(passes(X, y, 4, later=NEVER, loss=LOG))
    assert models[0].progress[ROWS] == models[-1].progress[ROWS]
    assert loss(models[-1]) < 0.9 * loss(models[0])


def test_a_column_that_was_never_measured_does_not_move(text_like):
    X, y = text_like
    model = next(passes(X, y, 1, loss=REGRESSION["squared_error"], natural_unit=False))
    model.table[7, :, 0] = [0, 0, 0, 0, 0, 1, 0, 0]
    task = Task(REGRESSION["squared_error"], natural_unit=False, fresh=False)
    train_on(model, as_rows(X), np.arange(len(y)), y, np.ones(len(y)), Training(task, NEVER, 4))
    assert model.table[7, THETA, 0] == 0


def test_stored_rate_is_between_the_rate_and_that_of_pure_signal():
    mean = Moments(grad=0.5, grad_sq=1.0, curv=2.0, curv_sq=5.0)
    assert columns.stored_rate(mean, 1.0) == pytest.approx(1 / 2.0)
    assert columns.stored_rate(mean, 10.0) == pytest.approx((0.25 + 0.75 * 0.2) / 2.0)
    assert columns.stored_rate(mean, 1e12) == pytest.approx(columns.rate(mean, 1))
    assert columns.stored_rate(Moments(0.0, 0.0, 0.0, 0.0), 1.0) == 0


@pytest.mark.parametrize(
    "change",
    [{"fresh": True}, {"l1": 0.1}, {"l2": 0.1}, {"average": True}, {"softmax": True}, {"loss": 9}, {"loss": 10}],
)
def test_tasks_that_measure_every_minibatch(text_like, change):
    X, y = text_like
    model = next(passes(X, np.where(y == 0, 1.0, -1.0), 1, loss=LOG))
    task = Task(LOG, fresh=False)
    assert rows_between(model, 4, task, COLUMNS) == 28
    assert rows_between(model, 4, task._replace(**change), COLUMNS) == 0
    assert rows_between(model, 4, task, Columns(measure_every=1)) == 0


def test_models_that_overfit_measure_every_minibatch(text_like):
    X, y = text_like
    model = next(passes(X, np.where(y == 0, 1.0, -1.0), 1, loss=LOG, evidence=True))
    model.penalty[CALIBRATION] = 0.99
    assert rows_between(model, 4, Task(LOG, fresh=False, evidence=True), COLUMNS) == 0


def test_dense_tables_measure_every_minibatch():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((50, 4))
    model = next(passes(X, np.where(X[:, 0] > 0, 1.0, -1.0), 1, loss=LOG))
    assert rows_between(model, 4, Task(LOG, fresh=False), COLUMNS) == 0
