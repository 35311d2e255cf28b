"""All common checks of scikit-learn, including the equivalence of weights and repetitions."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from vsgd.sklearn import VSGDClassifier, VSGDRegressor


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks([VSGDClassifier(), VSGDRegressor()])
def test_common_check(estimator, check):
    check(estimator)
