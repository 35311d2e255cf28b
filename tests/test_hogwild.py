"""Threads that change one linear model without locks."""

import _thread
import threading

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.metrics import log_loss

from vsgd import COLUMNS, PAPER
from vsgd.linear import CLASSIFICATION, REGRESSION, Task, Training, as_rows, new_model, train_on
from vsgd.linear.model import BATCHES, ROWS, SEEN, THETA
from vsgd.sklearn import VSGDClassifier, VSGDRegressor

LOG, SQUARED = CLASSIFICATION["log_loss"], REGRESSION["squared_error"]
SAMPLES, COLUMN_COUNT = 4000, 1000


@pytest.fixture(scope="module")
def text():
    """Rows of 20 out of 1,000 columns, some more frequent, and scores that classes and numbers can be learned from."""
    rng = np.random.default_rng(0)
    words = (COLUMN_COUNT * rng.random((2 * SAMPLES, 20)) ** 2).astype(int)
    rows = np.repeat(np.arange(2 * SAMPLES), 20)
    X = sparse.csr_matrix((np.ones(rows.size), (rows, words.reshape(-1))), (2 * SAMPLES, COLUMN_COUNT))
    scores = X @ rng.standard_normal((COLUMN_COUNT, 3)) + rng.standard_normal((2 * SAMPLES, 3))
    return X, np.asfortranarray(scores)


def trained(X, y, threads, task, *, outputs=1, epochs=3, batch_size=16, hogwild=True):
    model = new_model(X.shape[1] + task.intercept, outputs, task, COLUMNS, 0)
    training = Training(task, COLUMNS, batch_size, threads, hogwild)
    rng = np.random.default_rng(1)
    for _ in range(epochs):
        train_on(model, as_rows(X), rng.permutation(len(y)), y, np.ones(len(y)), training)
    return model


def held_out_loss(model, X, y, task):
    theta = model.table[:, THETA]
    margins = X @ theta[:-1] + theta[-1]
    if task.softmax:
        return log_loss(y, np.exp(margins) / np.exp(margins).sum(axis=1, keepdims=True))
    if task.one_vs_rest:
        return np.logaddexp(0, np.where(np.arange(3) == y[:, None], -margins, margins)).mean()
    return np.mean((margins[:, 0] - y) ** 2) if task.loss == SQUARED else np.logaddexp(0, -y * margins[:, 0]).mean()


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize(
    "task",
    [
        Task(LOG),
        Task(LOG, one_vs_rest=True),
        Task(LOG, softmax=True),
        Task(SQUARED, natural_unit=False),
        Task(LOG, l2=1e-3, average=True),
    ],
    ids=["binary", "ovr", "softmax", "regression", "penalty and average"],
)
def test_learns_as_one_thread_does(text, task, threads):
    X, scores = text
    several = task.one_vs_rest or task.softmax
    y = scores.argmax(axis=1).astype(float) if several else scores[:, 0]
    y = np.where(y > 0, 1.0, -1.0) if not several and task.loss == LOG else y
    outputs = 3 if several else 1
    losses = [
        held_out_loss(trained(X[:SAMPLES], y[:SAMPLES], n, task, outputs=outputs), X[SAMPLES:], y[SAMPLES:], task)
        for n in (1, threads)
    ]
    untrained = held_out_loss(new_model(COLUMN_COUNT + 1, outputs, task, COLUMNS, 0), X[SAMPLES:], y[SAMPLES:], task)
    assert losses[0] < 0.8 * untrained
    assert losses[1] < 1.3 * losses[0]


def test_counts_are_those_of_one_thread(text):
    X, scores = text
    y = np.where(scores[:, 0] > 0, 1.0, -1.0)
    one, three = (trained(X, y, threads, Task(LOG)) for threads in (1, 3))
    np.testing.assert_array_equal(one.table[:, SEEN], three.table[:, SEEN])
    assert one.progress[ROWS] == three.progress[ROWS] == 3 * len(y)
    np.testing.assert_allclose(one.curvature[1], three.curvature[1])


@pytest.mark.parametrize("batch_size", [1, 16])
def test_more_threads_than_rows(batch_size):
    model = trained(sparse.eye(3, format="csr"), np.array([1.0, -1.0, 1.0]), 8, Task(LOG), batch_size=batch_size)
    assert np.isfinite(model.table).all()
    assert model.progress[ROWS] == 9
    assert model.progress[BATCHES] == (9 if batch_size == 1 else 3)


def test_one_thread_is_the_default_to_the_bit(text):
    X, scores = text
    model = VSGDRegressor(random_state=0, max_iter=2, tol=None)
    default, alone = (each.fit(X, scores[:, 0]) for each in (model, clone(model).set_params(hogwild=True, n_jobs=1)))
    np.testing.assert_array_equal(default.model_.table, alone.model_.table)


@pytest.mark.parametrize("multi_class", ["ovr", "multinomial"])
def test_estimators(text, multi_class):
    X, scores = text
    y = scores.argmax(axis=1)
    model = VSGDClassifier(multi_class=multi_class, hogwild=True, n_jobs=2, max_iter=3, tol=None, random_state=0)
    assert clone(model).get_params()["hogwild"]
    fitted = model.fit(X[:SAMPLES], y[:SAMPLES])
    assert fitted.score(X[SAMPLES:], y[SAMPLES:]) > 0.7
    seen = fitted.model_.progress[ROWS]
    assert fitted.partial_fit(X[SAMPLES:], y[SAMPLES:]).model_.progress[ROWS] == seen + SAMPLES


@pytest.mark.parametrize("value", [2, "yes", None])
def test_only_true_and_false(value):
    with pytest.raises(TypeError, match="the number of threads is n_jobs"):
        VSGDClassifier(hogwild=value).fit(np.eye(4), [0, 1, 0, 1])


def test_refused_for_the_paper():
    model = VSGDRegressor(hogwild=True, options=PAPER)
    with pytest.raises(ValueError, match=r"hogwild is for vsgd\.COLUMNS"):
        model.fit(np.eye(4), np.arange(4.0))
    assert not hasattr(model, "coef_")


def test_an_error_in_a_thread_leaves_the_estimator_as_it_was(text, monkeypatch):
    X, scores = text
    model = VSGDRegressor(hogwild=True, n_jobs=2, max_iter=2, tol=None, random_state=0).fit(X, scores[:, 0])
    before = model.model_.table.copy()

    def no_memory(*arguments):
        raise MemoryError("no room for a workspace")

    monkeypatch.setattr("vsgd.linear.training.workspace", no_memory)
    with pytest.raises(MemoryError, match="no room"):
        model.partial_fit(X, scores[:, 0])
    np.testing.assert_array_equal(model.model_.table, before)


def test_an_interrupt_leaves_the_estimator_as_it_was(text):
    X, scores = text
    model = VSGDRegressor(hogwild=True, n_jobs=2, max_iter=2, tol=None, random_state=0).fit(X, scores[:, 0])
    before, losses = dict(vars(model)), list(model.loss_curve_)
    table = model.model_.table.copy()
    model.set_params(max_iter=10**6, warm_start=True)
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, scores[:, 0])
    assert all(getattr(model, name) is before[name] for name in ("model_", "coef_", "intercept_", "rates_"))
    assert (model.n_iter_, model.loss_curve_) == (before["n_iter_"], losses)
    np.testing.assert_array_equal(model.model_.table, table)


def test_a_model_that_is_not_finite_is_refused():
    X = sparse.random(200, 50, density=0.1, random_state=0, format="csr") * 1e69
    with pytest.raises(ValueError, match="overflow"):
        VSGDRegressor(hogwild=True, n_jobs=2, penalty="l2", alpha=1e300).fit(X, np.arange(200.0))
