"""The coordinate descent at the end of a fit with an L1 penalty, compared with solvers of scikit-learn."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import load_diabetes, load_wine
from sklearn.feature_selection import SelectFromModel
from sklearn.linear_model import ElasticNet, LogisticRegression
from sklearn.preprocessing import scale

from vsgd.algorithms.columns import COLUMNS
from vsgd.linear import CLASSIFICATION, REGRESSION, Task, Training, as_rows, new_model, train_on
from vsgd.linear.refine import refine
from vsgd.linear.training import coefficients, margins_of, mean_loss
from vsgd.sklearn import VSGDClassifier, VSGDRegressor


@pytest.fixture(scope="module")
def wine():
    X, y = load_wine(return_X_y=True)
    return scale(X), y


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("alpha", [1e-3, 1e-2])
def test_zeros_under_l1_are_those_of_the_exact_solution(wine, alpha, average):
    X, y = wine[0], wine[1] == 1
    exact = LogisticRegression(l1_ratio=1, C=1 / (alpha * len(y)), solver="saga", tol=1e-8, max_iter=50_000).fit(X, y)
    model = VSGDClassifier(penalty="l1", alpha=alpha, average=average, random_state=0).fit(X, y)
    assert 0 < np.sum(exact.coef_ == 0) < X.shape[1]
    np.testing.assert_array_equal(model.coef_ == 0, exact.coef_ == 0)
    np.testing.assert_allclose(model.coef_, exact.coef_, atol=0.02)


def test_elastic_net_on_unscaled_columns_ends_at_the_optimum():
    X, y = load_diabetes(return_X_y=True, scaled=False)
    exact = ElasticNet(alpha=1.0, l1_ratio=0.5, tol=1e-10, max_iter=100_000).fit(X, y)
    for data in (X, sparse.csr_matrix(X)):
        model = VSGDRegressor(penalty="elasticnet", alpha=1.0, l1_ratio=0.5, random_state=0).fit(data, y)
        np.testing.assert_allclose(model.coef_.ravel(), exact.coef_, rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(model.intercept_, exact.intercept_, rtol=1e-3)


def test_softmax_ends_at_the_objective_of_the_exact_solution(wine):
    X, y = wine
    alpha = 1e-2
    exact = LogisticRegression(l1_ratio=1, C=1 / (alpha * len(y)), solver="saga", tol=1e-7, max_iter=50_000).fit(X, y)
    model = VSGDClassifier(penalty="l1", alpha=alpha, multi_class="multinomial", random_state=0).fit(X, y)

    def objective(fitted):
        loss = -np.log(fitted.predict_proba(X)[np.arange(len(y)), y]).mean()
        return loss + alpha * np.abs(fitted.coef_).sum()

    assert objective(model) == pytest.approx(objective(exact), rel=1e-4)


@pytest.mark.parametrize("name", [*CLASSIFICATION, *REGRESSION])
def test_the_objective_never_rises(name):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 5))
    y = np.where(X[:, 0] + 0.5 * rng.standard_normal(200) > 0, 1.0, -1.0)
    y = np.exp(X[:, 0]) if name in ("poisson", "gamma") else y
    loss = {**CLASSIFICATION, **REGRESSION}[name]
    task = Task(loss, parameter=0.5, natural_unit=name in CLASSIFICATION, l1=0.01, l2=0.001)
    model, weights = new_model(6, 1, task, COLUMNS, 0), np.ones(200)
    train_on(model, as_rows(X), np.arange(200), y, weights, Training(task, COLUMNS))

    def objective():
        theta = coefficients(model, task)
        penalty = 0.01 * np.abs(theta[:-1]).sum() + 0.0005 * np.square(theta[:-1]).sum()
        return mean_loss(margins_of(X, theta), y, weights, task) + penalty

    before = objective()
    refine(model, sparse.csc_matrix(X), y, weights, task)
    assert objective() < before


def test_tol_none_makes_stochastic_passes_only(wine):
    X, y = wine[0], wine[1] == 1
    one = VSGDClassifier(penalty="l1", alpha=1e-2, tol=None, max_iter=1, random_state=0).fit(X, y)
    assert np.sum(one.coef_ == 0) < np.sum(
        VSGDClassifier(penalty="l1", alpha=1e-2, random_state=0).fit(X, y).coef_ == 0
    )


def test_select_from_model_keeps_the_columns_that_are_not_zero(wine):
    X, y = wine[0], wine[1] == 1
    selector = SelectFromModel(VSGDClassifier(penalty="l1", alpha=1e-2, random_state=0)).fit(X, y)
    np.testing.assert_array_equal(selector.get_support(), selector.estimator_.coef_[0] != 0)
    assert selector.transform(X).shape[1] < X.shape[1]
