"""river's interface on top of the estimator."""

from __future__ import annotations

import doctest

import numpy as np
from sklearn.datasets import load_breast_cancer

from vsgd import river
from vsgd.sklearn import VSGDClassifier


def test_equals_partial_fit_row_by_row():
    X, y = load_breast_cancer(return_X_y=True)
    stream = river.LogisticRegression(columns=30, seed=0)
    estimator = VSGDClassifier(batch_size=1, random_state=0)
    assert stream.predict_proba_one({0: 1.0}) == {False: 0.5, True: 0.5}
    for row, target in zip(X[:200], y[:200], strict=True):
        stream.learn_one(dict(enumerate(row.tolist())), bool(target))
        estimator.partial_fit(row[None], [target], classes=[0, 1])
    np.testing.assert_array_equal(stream.model.coef_, estimator.coef_)


def test_names_beyond_the_last_column_share_it():
    stream = river.LogisticRegression(columns=2)
    stream.learn_one({"a": 1.0, "b": 2.0, "c": 3.0}, True)
    assert stream.column_of == {"a": 0, "b": 1, "c": 1}


def test_the_example_in_the_documentation():
    assert doctest.testmod(river).failed == 0
