"""The estimators on real data, in pipelines, with weights, on streams, and with invalid input."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.feature_selection import SelectFromModel
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    QuantileRegressor,
    Ridge,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.metrics import log_loss, mean_poisson_deviance
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score, train_test_split
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale

import vsgd
from vsgd.sklearn import VSGDClassifier, VSGDRegressor, classifier, regressor


@pytest.fixture(scope="module")
def cancer():
    """Thirty unscaled columns, from thousandths to thousands."""
    return train_test_split(*load_breast_cancer(return_X_y=True), random_state=0)


@pytest.mark.parametrize("loss", ["log_loss", "hinge", "squared_hinge", "modified_huber"])
@pytest.mark.parametrize("batch_size", [1, 32])
def test_unscaled_columns_beat_sgd_with_its_defaults(cancer, loss, batch_size):
    X, X_test, y, y_test = cancer
    mine = VSGDClassifier(loss, batch_size=batch_size, max_iter=20, tol=None, random_state=0).fit(X, y)
    theirs = SGDClassifier(loss=loss, max_iter=20, tol=None, random_state=0).fit(X, y)
    assert mine.score(X_test, y_test) > max(0.9, theirs.score(X_test, y_test))


@pytest.mark.parametrize("multi_class", ["multinomial", "ovr"])
def test_many_classes(multi_class):
    X, X_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    model = VSGDClassifier(multi_class=multi_class, max_iter=10, tol=None, random_state=0).fit(X, y)
    assert model.score(X_test, y_test) > 0.93
    assert model.coef_.shape == model.rates_.shape == (10, 64)
    np.testing.assert_allclose(model.predict_proba(X_test).sum(axis=1), 1)


def test_scaling_columns_by_any_constant_changes_predictions_by_rounding_only(cancer):
    X, X_test, y, _ = cancer
    units = 10.0 ** np.random.default_rng(0).uniform(-4, 4, X.shape[1])
    model = VSGDClassifier(max_iter=5, tol=None, random_state=0)
    plain = clone(model).fit(X, y).decision_function(X_test)
    scaled = clone(model).fit(X * units, y, sample_weight=np.full(len(y), 1e3)).decision_function(X_test * units)
    np.testing.assert_allclose(scaled, plain, rtol=1e-6)


@pytest.mark.parametrize("loss", ["squared_error", "absolute_error", "huber", "epsilon_insensitive", "quantile"])
def test_regression_on_any_scale_of_the_target(loss):
    X, y = load_diabetes(return_X_y=True)
    for unit in (1e-3, 1.0, 1e3):
        model = VSGDRegressor(loss, epsilon=10 * unit, max_iter=60, tol=None, random_state=0).fit(X, y * unit)
        assert model.score(X, y * unit) > 0.42


@pytest.mark.parametrize("loss", ["poisson", "gamma"])
def test_exponential_links_on_unscaled_columns(loss):
    X, y = load_diabetes(return_X_y=True, scaled=False)
    model = VSGDRegressor(loss, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.47
    assert np.abs(model.predict(X).mean() / y.mean() - 1) < 0.05


def noisy_text(seed):
    """Rows of words that are independent of the target; one row in eleven is positive."""
    rng = np.random.default_rng(seed)
    X = sparse.csr_matrix((np.ones(120_000), (3000 ** rng.random(120_000)).astype(int) - 1, np.arange(0, 120_001, 40)))
    X.sum_duplicates()
    return X, (rng.random(3000) < 0.09).astype(int)


def test_the_default_penalty_hardly_fits_noise():
    (X, y), (X_test, y_test) = noisy_text(0), noisy_text(1)
    prior = log_loss(y_test, np.full(len(y_test), y.mean()))
    columns = min(X.shape[1], X_test.shape[1])
    auto, none = (
        log_loss(y_test, model.fit(X[:, :columns], y).predict_proba(X_test[:, :columns]))
        for model in (VSGDClassifier(random_state=0), VSGDClassifier(penalty=None, random_state=0))
    )
    assert auto < 1.02 * prior < none


def test_the_default_penalty_does_not_depend_on_units(cancer):
    X, X_test, y, _ = cancer
    units = 2.0 ** np.random.default_rng(0).integers(-13, 14, X.shape[1])
    model = VSGDClassifier(max_iter=5, tol=None, random_state=0)
    plain, scaled = clone(model).fit(X, y), clone(model).fit(X * units, y)
    np.testing.assert_array_equal(plain.decision_function(X_test), scaled.decision_function(X_test * units))
    assert plain.model_.penalty[0, 0] > 0


def test_unscaled_columns_are_as_good_as_scaled_ones():
    X, y = load_diabetes(return_X_y=True, scaled=False)
    folds = KFold(5, shuffle=True, random_state=0)
    unscaled, scaled, ridge = (
        cross_val_score(model, X, y, cv=folds).mean()
        for model in (
            VSGDRegressor(random_state=0),
            make_pipeline(StandardScaler(), VSGDRegressor(random_state=0)),
            make_pipeline(StandardScaler(), Ridge()),
        )
    )
    assert unscaled > 0.98 * scaled
    assert scaled > 0.98 * ridge


def test_l1_has_about_as_many_zeros_as_the_exact_solution():
    X, y = load_breast_cancer(return_X_y=True)
    alpha = 1e-2
    X = scale(X)
    model = VSGDClassifier(penalty="l1", alpha=alpha, max_iter=400, tol=None, random_state=0).fit(X, y)
    exact = LogisticRegression(l1_ratio=1, C=1 / (alpha * len(y)), solver="saga", tol=1e-6, max_iter=20_000).fit(X, y)
    zeros, expected = np.sum(model.coef_ == 0), np.sum(exact.coef_ == 0)
    assert abs(zeros - expected) <= 0.2 * expected
    selected = SelectFromModel(model, prefit=True, threshold=1e-12).transform(X)
    assert selected.shape[1] == 30 - zeros


@pytest.mark.parametrize("estimator", [VSGDClassifier, VSGDRegressor])
@pytest.mark.parametrize("name", ["learning_rate", "eta0", "power_t"])
def test_arguments_of_a_schedule_are_refused_with_a_reason(estimator, name):
    with pytest.raises(TypeError, match=f"no argument '{name}': it estimates the learning rate of each coefficient"):
        estimator(**{name: 1})


def test_sgd_arguments_are_accepted():
    """Return the parameters except those of losses that the classifier does not have, and of schedules."""
    theirs = set(SGDClassifier().get_params()) - {"epsilon", "learning_rate", "eta0", "power_t"}
    assert theirs <= set(VSGDClassifier().get_params())
    theirs = set(SGDRegressor().get_params()) - {"learning_rate", "eta0", "power_t"}
    assert theirs <= set(VSGDRegressor().get_params())


def test_quantiles():
    X, y = load_diabetes(return_X_y=True)
    model = VSGDRegressor("quantile", quantile=0.9, max_iter=100, tol=None, average=True, random_state=0).fit(X, y)
    assert np.mean(y < model.predict(X)) == pytest.approx(0.9, abs=0.03)
    best = QuantileRegressor(quantile=0.9, alpha=0).fit(X, y)

    def pinball(m):
        return np.mean(np.maximum(0.9 * (y - m.predict(X)), -0.1 * (y - m.predict(X))))

    assert pinball(model) < 1.05 * pinball(best)


def test_poisson_counts():
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 2, (2000, 3))
    y = rng.poisson(np.exp(X @ [0.5, -0.3, 0.8] + 0.2))
    model = VSGDRegressor("poisson", batch_size=1, max_iter=20, tol=None, random_state=0).fit(X, y)
    np.testing.assert_allclose(model.coef_, [[0.5, -0.3, 0.8]], atol=0.15)
    truth = mean_poisson_deviance(y, np.exp(X @ [0.5, -0.3, 0.8] + 0.2))
    assert mean_poisson_deviance(y, model.predict(X)) < 1.02 * truth


def test_the_paper_to_the_letter_is_an_option(cancer):
    X, _, y, _ = cancer
    paper = VSGDClassifier(options=vsgd.PAPER, max_iter=3, tol=None, random_state=0).fit(X, y)
    assert not np.allclose(paper.coef_, VSGDClassifier(max_iter=3, tol=None, random_state=0).fit(X, y).coef_)


def test_in_a_pipeline_and_a_grid_search():
    texts = ["good great fine", "great good", "fine great", "bad awful poor", "awful bad", "poor bad"] * 20
    labels = ["+", "+", "+", "-", "-", "-"] * 20
    search = GridSearchCV(
        make_pipeline(CountVectorizer(), VSGDClassifier(random_state=0)),
        {"vsgdclassifier__penalty": [None, "l2"]},
        cv=3,
    )
    assert search.fit(texts, labels).score(["good fine", "awful poor"], ["+", "-"]) == 1


def test_cross_validation():
    X, y = load_breast_cancer(return_X_y=True)
    assert cross_val_score(VSGDClassifier(random_state=0), X, y).mean() > 0.9


@pytest.mark.parametrize("module", [classifier, regressor])
def test_the_examples_in_the_documentation(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_several_targets_through_the_wrapper():
    X, y = load_diabetes(return_X_y=True)
    model = MultiOutputRegressor(VSGDRegressor(random_state=0, max_iter=20, tol=None)).fit(X, np.stack([y, -y], axis=1))
    assert model.predict(X).shape == (len(y), 2)


def test_a_seed_makes_it_repeatable_and_threads_do_not_matter():
    X, y = load_digits(return_X_y=True)
    fits = [
        VSGDClassifier("hinge", random_state=seed, n_jobs=jobs, max_iter=2, tol=None).fit(X, y).coef_
        for seed, jobs in [(1, 1), (1, 2), (1, 7), (2, 1)]
    ]
    np.testing.assert_array_equal(fits[0], fits[1])
    np.testing.assert_array_equal(fits[0], fits[2])
    assert not np.array_equal(fits[0], fits[3])


def test_class_weights_are_sample_weights(cancer):
    X, _, y, _ = cancer
    model = VSGDClassifier(max_iter=3, tol=None, random_state=0)
    by_class = clone(model).set_params(class_weight={0: 3.0, 1: 1.0}).fit(X, y)
    by_sample = clone(model).fit(X, y, sample_weight=np.where(y == 0, 3.0, 1.0))
    np.testing.assert_array_equal(by_class.coef_, by_sample.coef_)


def test_warm_start_continues(cancer):
    X, _, y, _ = cancer
    model = VSGDClassifier(max_iter=2, tol=None, warm_start=True, random_state=0).fit(X, y)
    first = model.loss_curve_[0]
    assert len(model.fit(X, y).loss_curve_) == 4
    assert model.loss_curve_[2] < first


def test_early_stopping_looks_at_held_out_samples(cancer):
    X, _, y, _ = cancer
    model = VSGDClassifier(early_stopping=True, random_state=0).fit(X, y)
    assert model.n_iter_ < 100
    assert model.loss_curve_[-1] < 0.3


def test_held_out_samples_do_not_depend_on_the_order_of_rows(cancer):
    X, _, y, _ = cancer
    model = VSGDClassifier(early_stopping=True, random_state=0)
    there, back = (clone(model).fit(X[::step], y[::step]).coef_ for step in (1, -1))
    np.testing.assert_allclose(there, back, rtol=1e-9)


def test_averaging_may_begin_later(cancer):
    X, _, y, _ = cancer
    model = VSGDClassifier(max_iter=2, tol=None, warm_start=True, random_state=0).fit(X, y)
    model.set_params(average=True).fit(X, y)
    assert model.score(X, y) > 0.9
    assert not np.array_equal(model.coef_[0], model.model_.table[:-1, 0, 0])


def test_warns_if_not_converged(cancer):
    X, _, y, _ = cancer
    with pytest.warns(ConvergenceWarning, match="max_iter=2"):
        VSGDClassifier(max_iter=2).fit(X, y)


def test_verbose_shows_a_bar(cancer, capsys):
    X, _, y, _ = cancer
    VSGDClassifier(max_iter=2, tol=None, verbose=1).fit(X, y)
    assert "loss=" in capsys.readouterr().err


def test_l1_makes_coefficients_zero_and_sparse():
    X, y = load_digits(return_X_y=True)
    plain = VSGDClassifier(penalty=None, max_iter=10, tol=None, random_state=0).fit(X, y)
    model = VSGDClassifier(penalty="l1", alpha=0.1, max_iter=10, tol=None, random_state=0).fit(X, y)
    assert np.mean(model.coef_ == 0) > 5 * np.mean(plain.coef_ == 0), "only columns that are always zero have none"
    dense = model.predict(X)
    assert sparse.issparse(model.sparsify().coef_)
    np.testing.assert_array_equal(model.predict(X), dense)
    np.testing.assert_array_equal(model.predict(sparse.csr_matrix(X)), dense)


def test_l2_settles_where_the_batch_solver_does(cancer):
    X, _, y, _ = cancer
    X = scale(X)
    model = VSGDClassifier(penalty="l2", alpha=0.01, max_iter=100, tol=None, random_state=0).fit(X, y)
    batch = LogisticRegression(C=1 / (0.01 * len(y)), max_iter=10000).fit(X, y)

    def objective(m):
        return log_loss(y, m.predict_proba(X)) + 0.005 * np.sum(m.coef_**2)

    assert objective(model) < 1.02 * objective(batch)


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_enormous_leverage_have_their_say(seed):
    """Squared error: three rows determine the coefficient of a column, although the other rows differ."""
    rng = np.random.default_rng(seed)
    crowd = np.exp(0.3 * rng.standard_normal(4000))
    crowd[rng.choice(4000, 3, replace=False)] = [30, 100, 300]
    X = np.column_stack([rng.standard_normal((4000, 3)), crowd])
    y = X[:, 0] - np.minimum(2 * crowd, 3) + 0.5 * rng.standard_normal(4000)
    model = VSGDRegressor(max_iter=5, tol=None, random_state=seed).fit(X, y)
    best = LinearRegression().fit(X, y)
    assert np.mean((model.predict(X) - y) ** 2) < 1.05 * np.mean((best.predict(X) - y) ** 2)


class TestStream:
    def test_rates_rise_again_after_a_change(self):
        rng = np.random.default_rng(0)
        X = rng.standard_normal((6000, 3))
        truth = np.where(np.arange(6000)[:, None] < 4000, [1.0, -1.0, 0.5], [-1.0, 1.0, 0.5])
        y = (X * truth).sum(axis=1) + 0.3 * rng.standard_normal(6000)
        model, rates = VSGDRegressor(random_state=0, batch_size=1), []
        for start in range(0, 6000, 10):
            model.partial_fit(X[start : start + 10], y[start : start + 10])
            rates.append(model.rates_[0, 0])
        assert max(rates[400:410]) > 10 * np.median(rates[300:400])
        np.testing.assert_allclose(model.coef_, [[-1, 1, 0.5]], atol=0.15)

    def test_a_column_of_rounding_errors_may_become_a_number(self):
        """The output of a running StandardScaler for a constant column that begins to vary."""
        rng = np.random.default_rng(0)
        X = rng.standard_normal((3000, 2))
        y = (X.sum(axis=1) > 0) * 1
        X[:1500, 1] *= 1e-16
        model = VSGDClassifier(batch_size=1, random_state=0).partial_fit(X[:2000], y[:2000], classes=[0, 1])
        assert model.score(X[2000:], y[2000:]) > 0.95

    def test_learns_in_the_order_given(self):
        X, y = load_breast_cancer(return_X_y=True)
        at_once = VSGDClassifier(random_state=0, batch_size=10).partial_fit(X[:500], y[:500], classes=[0, 1])
        in_parts = VSGDClassifier(random_state=0, batch_size=10)
        for start in range(0, 500, 50):
            in_parts.partial_fit(X[start : start + 50], y[start : start + 50], classes=[0, 1])
        np.testing.assert_array_equal(at_once.coef_, in_parts.coef_)

    def test_sgd_has_the_same_methods(self):
        wanted = {"fit", "partial_fit", "predict", "score", "sparsify"}
        for mine, theirs in [(VSGDClassifier, SGDClassifier), (VSGDRegressor, SGDRegressor)]:
            assert wanted <= set(dir(mine)) & set(dir(theirs))


class TestBadInput:
    X, y = load_iris(return_X_y=True)

    @pytest.mark.parametrize(
        "parameter",
        [
            {"loss": "l0"},
            {"penalty": "l3"},
            {"alpha": -1.0},
            {"batch_size": 0},
            {"max_iter": 0},
            {"tol": -1.0},
            {"multi_class": "some"},
            {"multi_class": "multinomial", "loss": "hinge"},
            {"l1_ratio": 2.0},
            {"validation_fraction": 1.0},
        ],
    )
    def test_parameters(self, parameter):
        with pytest.raises(ValueError, match=next(iter(parameter))):
            VSGDClassifier(**parameter).fit(self.X, self.y)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_not_finite(self, bad):
        X = self.X.copy()
        X[3, 1] = bad
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            VSGDClassifier().fit(X, self.y)
        y = self.X[:, 0].copy()
        y[5] = bad
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            VSGDRegressor().fit(self.X, y)

    def test_other_features(self):
        model = VSGDClassifier().partial_fit(self.X, self.y, classes=[0, 1, 2])
        with pytest.raises(ValueError, match="features"):
            model.partial_fit(self.X[:, :2], self.y)

    def test_an_intercept_that_comes_late(self):
        model = VSGDClassifier(fit_intercept=False).partial_fit(self.X, self.y, classes=[0, 1, 2])
        with pytest.raises(ValueError, match="fit_intercept"):
            model.set_params(fit_intercept=True).partial_fit(self.X, self.y)

    def test_one_class(self):
        with pytest.raises(ValueError, match="one class"):
            VSGDClassifier().fit(self.X, np.zeros(150))

    def test_classes_of_a_stream(self):
        with pytest.raises(ValueError, match="first call"):
            VSGDClassifier().partial_fit(self.X, self.y)
        with pytest.raises(ValueError, match="not announced"):
            VSGDClassifier().partial_fit(self.X, self.y, classes=[0, 1])

    def test_counts_below_zero(self):
        with pytest.raises(ValueError, match="negative"):
            VSGDRegressor("poisson").fit(self.X, self.y - 1)

    def test_numbers_too_large(self):
        with pytest.raises(ValueError, match="too large"):
            VSGDRegressor(max_iter=5, tol=None).fit(self.X * 1e200, self.y)
