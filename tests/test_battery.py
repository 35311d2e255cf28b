"""Tests that every front end of linear models must pass, with every algorithm and precision that it supports."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from command import refuses, succeeds

from vsgd import COLUMNS, NETWORKS, PAPER
from vsgd.files.storage import load
from vsgd.linear import Task, Training, new_model
from vsgd.linear.losses import LOG
from vsgd.river import LogisticRegression
from vsgd.sklearn import VSGDClassifier, VSGDRegressor

X = np.random.default_rng(0).standard_normal((24, 3))
Y = (X.sum(axis=1) > 0).astype(int)


class Estimator:
    """Learn a stream of minibatches by `partial_fit`."""

    def __init__(self, make, folder, algorithm, dtype):
        self.make, self.dtype = make, dtype
        self.model = make(options=algorithm, batch_size=4, random_state=0)

    def learn(self, X):
        classes = {"classes": [0, 1]} if self.make is VSGDClassifier else {}
        self.model.partial_fit(X.astype(self.dtype), Y, **classes)

    def refuses(self, X):
        with pytest.raises(ValueError, match=r"too large|NaN|infinity"):
            self.learn(X)

    def reload(self):
        self.model = pickle.loads(pickle.dumps(self.model))

    def numbers(self):
        return [*self.model.model_, self.model.coef_, self.model.intercept_, self.model.rates_]

    def use(self, algorithm):
        self.model.set_params(options=algorithm)


class Stream(Estimator):
    """Learn one sample at a time by `learn_one`."""

    def __init__(self, folder, algorithm, dtype):
        self.dtype, self.stream = dtype, LogisticRegression(columns=3, seed=0)
        self.use(algorithm)

    @property
    def model(self):
        return self.stream.model

    def learn(self, X):
        for row, target in zip(X.astype(self.dtype), Y, strict=True):
            self.stream.learn_one(dict(enumerate(row)), bool(target))

    def reload(self):
        self.stream = pickle.loads(pickle.dumps(self.stream))


class File:
    """Learn by passes over a file. Each call of `vsgd fit` resumes from a model file."""

    def __init__(self, folder, algorithm, dtype):
        self.data, self.model, self.dtype, self.passes = folder / "d.svm", folder / "m.npz", dtype, 0

    def words(self, X):
        rows = (" ".join(f"{j + 1}:{x!r}" for j, x in enumerate(row)) for row in X.astype(self.dtype).tolist())
        self.data.write_text("".join(f"{y} {row}\n" for y, row in zip(Y, rows, strict=True)))
        resume = ["--resume"] if self.passes else []
        return ["fit", self.data, "--model", self.model, "--passes", self.passes + 1, *resume]

    def learn(self, X):
        succeeds(*self.words(X))
        self.passes += 1

    def refuses(self, X):
        refuses(*self.words(X), saying="line 1")

    def reload(self):
        self.model = self.model.rename(self.model.with_name("moved.npz"))

    def numbers(self):
        return list(load(self.model).model)


def classifier(*given):
    return Estimator(VSGDClassifier, *given)


def regressor(*given):
    return Estimator(VSGDRegressor, *given)


ALGORITHMS = {"columns": COLUMNS, "paper": PAPER}
TAKEN = {classifier: ALGORITHMS, regressor: ALGORITHMS, Stream: ALGORITHMS, File: {"columns": COLUMNS}}
CASES = {
    f"{front_end.__name__.lower()}-{name}-{dtype.__name__}": (front_end, algorithm, dtype)
    for front_end, algorithms in TAKEN.items()
    for name, algorithm in algorithms.items()
    for dtype in (np.float64, np.float32)
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def begin(request, tmp_path_factory):
    """Return a function that creates learners of one kind, each with its own folder."""
    front_end, *kind = request.param
    return lambda: front_end(tmp_path_factory.mktemp("learner"), *kind)


def assert_same(first, second):
    for mine, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_resumes_to_the_bit(begin):
    whole, resumed = begin(), begin()
    for learner in (whole, resumed):
        for part in range(4):
            learner.learn(X)
            if part == 1 and learner is resumed:
                learner.reload()
    assert_same(whole.numbers(), resumed.numbers())


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_a_row_that_is_not_finite_is_refused_and_the_next_is_learned_from(begin, bad):
    """A single invalid row must not end a stream."""
    learner, other = begin(), begin()
    damaged = X.copy()
    damaged[0, 1] = bad
    learner.learn(X)
    other.learn(X)
    with np.errstate(over="ignore"):
        learner.refuses(damaged)
    assert_same(learner.numbers(), other.numbers())
    learner.learn(X)
    other.learn(X)
    assert_same(learner.numbers(), other.numbers())


@pytest.mark.parametrize("scale", [1e-35, 1e-10, 1e10, 1e35])
def test_extreme_scales_of_a_column_leave_everything_finite(begin, scale):
    learner = begin()
    for _ in range(3):
        learner.learn(X * [1.0, scale, 1.0])
    assert all(np.isfinite(array).all() for array in learner.numbers())


@pytest.mark.parametrize("largest", [1e70, 1e-290])
@pytest.mark.parametrize("front_end", TAKEN)
def test_up_to_the_limits_of_float64_all_is_finite(front_end, largest, tmp_path):
    learner = front_end(tmp_path, COLUMNS, np.float64)
    for _ in range(3):
        learner.learn(X * [1.0, largest / X[:, 1].max(), 1.0])
    assert all(np.isfinite(array).all() for array in learner.numbers())


@pytest.mark.parametrize("front_end", [classifier, regressor, Stream])
def test_an_algorithm_of_another_front_end_is_refused(front_end, tmp_path):
    learner = front_end(tmp_path, COLUMNS, np.float64)
    learner.learn(X)
    before = [array.copy() for array in learner.numbers()]
    learner.use(NETWORKS)
    with pytest.raises(TypeError, match=r"vsgd\.Columns or vsgd\.Paper; this is Networks\("):
        learner.learn(X)
    assert_same(learner.numbers(), before)


@pytest.mark.parametrize(
    "make", [lambda task: Training(task, NETWORKS), lambda task: new_model(3, 1, task, NETWORKS, 0)]
)
def test_the_kernel_takes_algorithms_for_linear_models_only(make):
    with pytest.raises(TypeError, match=r"vsgd\.Columns or vsgd\.Paper; this is Networks\("):
        make(Task(LOG))
