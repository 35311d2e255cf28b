"""Linear regression."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import _check_sample_weight

from vsgd.algorithms.columns import Columns
from vsgd.algorithms.paper import Paper
from vsgd.linear import REGRESSION, Training
from vsgd.linear.losses import EXPONENTIAL_LINK, LARGEST_LOG_MEAN
from vsgd.sklearn import fitting, merging
from vsgd.sklearn.fitting import Matrix, RandomState


class VSGDRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Linear regression trained by stochastic gradient descent without a learning rate (Schaul & LeCun 2013).

    Features and target need not be scaled. `sklearn.multioutput` supports several targets.

    Args:
        loss: "squared_error", "absolute_error", "huber", "epsilon_insensitive", "quantile", "poisson" (counts) or
            "gamma" (positive numbers). The last two model the logarithm of the mean.
        epsilon: residual above which the Huber loss is linear, or below which the loss "epsilon_insensitive" is zero.
        quantile: the quantile that the loss "quantile" estimates.

    The other parameters and the attributes are those of `VSGDClassifier`.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> VSGDRegressor(random_state=0).fit(X, y).score(X, y) > 0.4
    True
    """

    @fitting.refuses_schedules
    def __init__(
        self,
        loss: str = "squared_error",
        *,
        epsilon: float = 0.1,
        quantile: float = 0.5,
        penalty: str | None = "auto",
        alpha: float = 1e-4,
        l1_ratio: float = 0.15,
        fit_intercept: bool = True,
        batch_size: int = 16,
        max_iter: int = 1000,
        tol: float | None = 1e-3,
        shuffle: bool = True,
        n_iter_no_change: int = 5,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        warm_start: bool = False,
        average: bool = False,
        random_state: RandomState = None,
        n_jobs: int | None = None,
        verbose: int = 0,
        options: Columns | Paper | None = None,
    ):
        self.loss = loss
        self.epsilon = epsilon
        self.quantile = quantile
        self.penalty = penalty
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.shuffle = shuffle
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.warm_start = warm_start
        self.average = average
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.options = options

    def fit(self, X: Matrix, y: ArrayLike, sample_weight: ArrayLike | None = None) -> VSGDRegressor:
        """Train on all samples, in several passes.

        Args:
            X: samples × features, a dense array or a sparse matrix.
            y: target of each sample.
            sample_weight: weight of each sample; 1 by default.

        Returns:
            The estimator itself.

        Raises:
            ValueError: if the arguments or the parameters of the estimator are invalid. The estimator is unchanged.
        """
        self._check()
        with fitting.all_or_nothing(self):
            X, y = fitting.read(self, X, y, numeric=True, reset=not (self.warm_start and hasattr(self, "model_")))
            fitting.fit_epochs(self, X, *self._samples(X, y, sample_weight), 1, self._training())
        return self

    def partial_fit(self, X: Matrix, y: ArrayLike, sample_weight: ArrayLike | None = None) -> VSGDRegressor:
        """Train on the samples once, in the given order. Arguments as in `fit`."""
        self._check()
        with fitting.all_or_nothing(self):
            X, y = fitting.read(self, X, y, numeric=True, reset=not hasattr(self, "model_"))
            fitting.fit_once(self, X, *self._samples(X, y, sample_weight), 1, self._training())
        return self

    def predict(self, X: Matrix) -> NDArray[Any]:
        """Return the prediction for each sample; with the Poisson and Gamma losses, the mean."""
        margins = fitting.predict_margins(self, X)[:, 0]
        return np.exp(np.minimum(margins, LARGEST_LOG_MEAN)) if self.loss in EXPONENTIAL_LINK else margins

    @classmethod
    def merge(cls, models: Iterable[VSGDRegressor], base: VSGDRegressor | None = None) -> VSGDRegressor:
        """Return one estimator from several that were trained on different samples.

        Each coefficient is a mean, weighted by count and curvature. `partial_fit` can train the result further.

        Args:
            models: fitted estimators with the same features and parameters.
            base: the estimator that all of them continued from, if any. Its samples are counted once.

        Raises:
            ValueError: if the estimators are not fitted or differ in features or parameters.
        """
        merged: VSGDRegressor = merging.merge(cls, models, base)
        return merged

    def sparsify(self) -> VSGDRegressor:
        """Store `coef_` as a sparse matrix."""
        fitting.sparsify(self)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _check(self) -> None:
        fitting.check_parameters(self, REGRESSION)
        if self.loss == "quantile" and not 0 < self.quantile < 1:
            raise ValueError(f"quantile={self.quantile!r} is not between 0 and 1")
        if self.loss in ("huber", "epsilon_insensitive") and not self.epsilon >= 0:
            raise ValueError(f"epsilon={self.epsilon!r} is negative")

    def _training(self) -> Training:
        return fitting.training_of(
            self,
            loss=REGRESSION[self.loss],
            parameter=float(self.quantile if self.loss == "quantile" else self.epsilon),
            natural_unit=self.loss in EXPONENTIAL_LINK,
        )

    def _samples(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Any]:
        targets = np.asarray(y, dtype=np.float64)
        if self.loss == "poisson" and (targets < 0).any():
            raise ValueError("the Poisson loss is for counts; y has negative values")
        if self.loss == "gamma" and (targets <= 0).any():
            raise ValueError("the Gamma loss is for positive numbers; y has values that are not positive")
        return targets, _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
