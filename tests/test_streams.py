"""After invalid rows, interrupts and invalid parameters, a call has either completed or changed nothing."""

from __future__ import annotations

import copy

import joblib
import numpy as np
import pytest
from interrupting import count_lines, run_interrupted

from vsgd import river
from vsgd.sklearn import VSGDClassifier, VSGDRegressor, fitting

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 3))
Y = (X.sum(axis=1) > 0).astype(int)


def begun(model=VSGDClassifier, **parameters):
    extra = {"classes": [0, 1]} if model is VSGDClassifier else {}
    return model(random_state=0, **parameters).partial_fit(X, Y, **extra)


def state(estimator):
    """Return all attributes that fitting sets, as plain values."""
    return copy.deepcopy(vars(estimator))


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name == "model_":
            for mine, theirs in zip(value, after[name], strict=True):
                np.testing.assert_array_equal(mine, theirs)
        else:
            np.testing.assert_array_equal(value, after[name])


class TestABadRow:
    """A row of 1e200 must not end a stream. `test_battery.py` tests such rows for every front end."""

    def test_an_overflow_that_nobody_foresaw(self):
        """Weights, targets and values are within bounds, but their product is not."""
        estimator = begun(VSGDRegressor)
        before = state(estimator)
        with pytest.raises(ValueError, match="too large"):
            estimator.partial_fit(X * 1e69, Y * 1e69, sample_weight=np.full(60, 1e69))
        assert_same(before, state(estimator))

    def test_the_first_call(self):
        estimator = VSGDClassifier(random_state=0)
        with pytest.raises(ValueError, match="too large"):
            estimator.partial_fit(X * 1e200, Y, classes=[0, 1])
        assert_same(state(VSGDClassifier(random_state=0)), state(estimator))
        estimator.partial_fit(X, Y, classes=[0, 1])
        assert_same(state(begun()), state(estimator))

    def test_a_failing_fit_leaves_the_earlier_one(self):
        estimator = VSGDClassifier(random_state=0, max_iter=2, tol=None).fit(X, Y)
        before = state(estimator)
        with pytest.raises(ValueError, match="too large"):
            estimator.fit(np.ones((4, 7)) * 1e200, ["a", "b", "c", "a"])
        assert_same(before, state(estimator))
        assert estimator.predict(X).shape == (60,)

    @pytest.mark.parametrize("bad", [1e200, "much", None])
    def test_learn_one_does_not_take_up_names_of_a_bad_row(self, bad):
        stream = river.LogisticRegression(seed=0)
        stream.learn_one({"x": 1.0}, True)
        with pytest.raises((ValueError, TypeError)):
            stream.learn_one({"new": 1.0, "x": bad}, True)
        assert stream.column_of == {"x": 0}

    @pytest.mark.parametrize("bad", [None, "yes", 2, np.nan])
    def test_a_target_that_is_neither_true_nor_false(self, bad):
        with pytest.raises(ValueError, match="True or False"):
            river.LogisticRegression().learn_one({"x": 1.0}, bad)

    def test_predicting_teaches_no_names(self):
        stream = river.LogisticRegression(seed=0)
        stream.learn_one({"x": 1.0}, True)
        stream.predict_one({"y": 1.0})
        assert stream.column_of == {"x": 0}


class TestInterrupts:
    @pytest.mark.parametrize("average", [False, True])
    def test_attributes_stay_in_step(self, average):
        """After Ctrl-C, `model_` and `coef_` must agree."""
        estimator = begun(average=average)
        lines = count_lines(lambda: begun(average=average))
        interrupted = 0
        for line in range(0, lines, max(1, lines // 300)):
            _, ended = run_interrupted(lambda: estimator.partial_fit(X, Y), {line}.__contains__)
            interrupted += len(ended)
            theta = fitting.coefficients(estimator.model_, estimator._training().task)
            np.testing.assert_array_equal(estimator.coef_, theta[:3].T)
            np.testing.assert_array_equal(estimator.intercept_, theta[3])
            rates = fitting.learning_rates(estimator.model_, fitting.COLUMNS)
            np.testing.assert_array_equal(estimator.rates_, rates[:3].T)
        assert interrupted > 10

    def test_the_model_is_replaced_not_changed(self):
        """Another thread that copies or predicts must see one state."""
        estimator = begun()
        model, table = estimator.model_, estimator.model_.table.copy()
        estimator.partial_fit(X, Y)
        np.testing.assert_array_equal(model.table, table)
        assert not np.array_equal(estimator.model_.table, table)


def test_memory_mapped_model_can_be_trained_further(tmp_path):
    """Models loaded with joblib's mmap_mode must not raise a numba TypingError."""
    joblib.dump(begun(), tmp_path / "m")
    loaded = joblib.load(tmp_path / "m", mmap_mode="r").partial_fit(X, Y)
    np.testing.assert_array_equal(loaded.coef_, begun().partial_fit(X, Y).coef_)


@pytest.mark.parametrize(
    "parameters",
    [
        {"class_weight": {0: -1.0, 1: 1.0}},
        {"class_weight": {0: np.nan, 1: 1.0}},
        {"class_weight": {0: np.inf, 1: 1.0}},
        {"class_weight": {0: "3", 1: 1.0}},
        {"class_weight": "some"},
        {"alpha": np.nan},
        {"alpha": np.inf},
        {"alpha": -1.0},
        {"l1_ratio": np.nan},
        {"tol": np.nan},
        {"validation_fraction": np.nan},
    ],
)
def test_parameters_that_are_not_finite_or_negative(parameters):
    """They must not be interpreted as 0 or ignored."""
    with pytest.raises((ValueError, TypeError), match=next(iter(parameters))):
        VSGDClassifier(**parameters).fit(X, Y)


@pytest.mark.parametrize("parameters", [{"epsilon": np.nan}, {"epsilon": -1}])
def test_epsilon(parameters):
    with pytest.raises(ValueError, match="epsilon"):
        VSGDRegressor("huber", **parameters).fit(X, Y)


def test_threads_are_no_more_than_cores():
    """n_jobs=5000 must not start thousands of threads."""
    assert begun(n_jobs=5000)._training().threads <= joblib.cpu_count()


def test_poisson_means_do_not_overflow():
    X, y = np.array([[1.0], [2.0], [3.0]] * 5), np.array([1, 2, 3] * 5)
    model = VSGDRegressor("poisson", max_iter=3, tol=None, random_state=0).fit(X, y)
    assert np.isfinite(model.predict([[1e60]])).all()
