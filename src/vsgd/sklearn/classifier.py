"""Linear classification."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight

from vsgd.algorithms.columns import Columns
from vsgd.algorithms.paper import Paper
from vsgd.linear import CLASSIFICATION, Training
from vsgd.linear.probabilities import WITH_PROBABILITIES, probabilities
from vsgd.sklearn import fitting, merging
from vsgd.sklearn.fitting import Matrix, RandomState


def has_probabilities(estimator: Any) -> bool:
    return estimator.loss in WITH_PROBABILITIES


class VSGDClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Linear classifier trained by stochastic gradient descent without a learning rate (Schaul & LeCun 2013).

    Features need not be scaled. Columns that are non-zero in at least a quarter of the rows are centered by their
    running means. With the default penalty, multiplying a column by a constant does not change the predictions.
    `learning_rate`, `eta0` and `power_t` of `SGDClassifier` raise an error.

    Args:
        loss: "log_loss" (logistic regression), "hinge" (linear support vector machine), "squared_hinge" or
            "modified_huber".
        multi_class: "ovr", one binary problem per class, or "multinomial", softmax, for the log loss only.
        penalty: "auto", "l2", "l1", "elasticnet" or None. "auto" is an L2 penalty in the unit of each column, and its
            weight is estimated during training. The next three have weight `alpha` and depend on the scale of columns.
        alpha: weight of an "l2", "l1" or "elasticnet" penalty.
        l1_ratio: fraction of L1 in the elastic net.
        fit_intercept: whether to learn an intercept. Columns are centered only with an intercept.
        batch_size: samples per update.
        max_iter: maximum number of passes over the data. A `ConvergenceWarning` is issued if it is reached.
        tol: minimum improvement of the mean loss, as a fraction of the loss of the first passes. Training stops if the
            loss improves less. If None, all `max_iter` passes are made.
        shuffle: whether to shuffle the samples before each pass.
        n_iter_no_change: number of passes without improvement after which training stops. Losses are averaged over
            the same number of passes.
        early_stopping: whether to stop by the loss on held-out samples instead of the training loss.
        validation_fraction: fraction of samples that is held out for early stopping.
        class_weight: {class: weight}, or "balanced".
        warm_start: whether `fit` continues from the last fit.
        average: whether to average the coefficients over the updates.
        random_state: seed of the order of samples and of the probes.
        n_jobs: number of threads, among which the classes of "ovr" are distributed. It does not change the result.
        verbose: whether to show a progress bar.
        options: the algorithm and its constants. The default is `vsgd.COLUMNS`; `vsgd.PAPER` is Algorithm 1.

    Attributes:
        coef_: coefficients, classes × features; 1 × features for two classes.
        intercept_: intercepts, one per row of `coef_`.
        rates_: learning rate of each coefficient at the end of training.
        classes_: the labels.
        n_iter_: number of passes over the data.
        loss_curve_: mean loss of each pass. The loss of a sample is measured before its update.

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> VSGDClassifier(random_state=0).fit(X, y).score(X, y) > 0.9
    True
    """

    classes_: NDArray[Any]

    @fitting.refuses_schedules
    def __init__(
        self,
        loss: str = "log_loss",
        *,
        multi_class: str = "ovr",
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
        class_weight: dict[Any, float] | str | None = None,
        warm_start: bool = False,
        average: bool = False,
        random_state: RandomState = None,
        n_jobs: int | None = None,
        verbose: int = 0,
        options: Columns | Paper | None = None,
    ):
        self.loss = loss
        self.multi_class = multi_class
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
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.average = average
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.options = options

    def fit(self, X: Matrix, y: ArrayLike, sample_weight: ArrayLike | None = None) -> VSGDClassifier:
        """Train on all samples, in several passes.

        Args:
            X: samples × features, a dense array or a sparse matrix.
            y: label of each sample.
            sample_weight: weight of each sample; 1 by default.

        Returns:
            The estimator itself.

        Raises:
            ValueError: if the arguments or the parameters of the estimator are invalid. The estimator is unchanged.
        """
        self._check()
        with fitting.all_or_nothing(self):
            warm = self.warm_start and hasattr(self, "model_")
            X, y = fitting.read(self, X, y, numeric=False, reset=not warm)
            check_classification_targets(y)
            classes = np.unique(y)
            if warm and not np.array_equal(classes, self.classes_):
                raise ValueError(f"warm_start with other classes: {classes} instead of {self.classes_}")
            self.classes_ = classes
            fitting.fit_epochs(self, X, *self._samples(X, y, sample_weight), self._outputs(), self._training())
        return self

    def partial_fit(
        self, X: Matrix, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> VSGDClassifier:
        """Train on the samples once, in the given order.

        Args:
            X: samples × features, a dense array or a sparse matrix.
            y: label of each sample.
            classes: all labels that can occur. The first call needs them.
            sample_weight: weight of each sample; 1 by default.

        Returns:
            The estimator itself.

        Raises:
            ValueError: if the arguments or the parameters of the estimator are invalid. The estimator is unchanged.
        """
        self._check()
        if self.class_weight == "balanced":
            raise ValueError('class_weight="balanced" needs all data at once; pass sample_weight to partial_fit')
        with fitting.all_or_nothing(self):
            first = not hasattr(self, "model_")
            X, y = fitting.read(self, X, y, numeric=False, reset=first)
            check_classification_targets(y)
            if first:
                if classes is None:
                    raise ValueError("classes must be passed on the first call to partial_fit")
                self.classes_ = np.unique(classes)
            elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
                raise ValueError(f"classes={classes!r} differ from those of the first call, {self.classes_}")
            unknown = np.setdiff1d(y, self.classes_)
            if len(unknown):
                raise ValueError(f"y has classes that were not announced: {unknown}")
            fitting.fit_once(self, X, *self._samples(X, y, sample_weight), self._outputs(), self._training())
        return self

    def decision_function(self, X: Matrix) -> NDArray[np.float64]:
        """Return the margin of each sample; with more than two classes, samples × classes."""
        margins = fitting.predict_margins(self, X)
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict(self, X: Matrix) -> NDArray[Any]:
        """Return the most likely class of each sample."""
        margins = fitting.predict_margins(self, X)
        best = (margins[:, 0] > 0).astype(int) if margins.shape[1] == 1 else margins.argmax(axis=1)
        labels: NDArray[Any] = self.classes_[best]
        return labels

    @available_if(has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Matrix) -> NDArray[np.float64]:
        """Return the probability of each class, samples × classes. Needs the log loss or the modified Huber loss."""
        return probabilities(fitting.predict_margins(self, X), self.loss, self._softmax())

    @available_if(has_probabilities)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Matrix) -> NDArray[np.float64]:
        """Return the logarithm of `predict_proba`."""
        logarithms: NDArray[np.float64] = np.log(self.predict_proba(X))
        return logarithms

    @classmethod
    def merge(cls, models: Iterable[VSGDClassifier], base: VSGDClassifier | None = None) -> VSGDClassifier:
        """Return one estimator from several that were trained on different samples.

        Each coefficient is a mean, weighted by count and curvature. `partial_fit` can train the result further.

        Args:
            models: fitted estimators with the same features, classes and parameters.
            base: the estimator that all of them continued from, if any. Its samples are counted once.

        Raises:
            ValueError: if the estimators are not fitted or differ in features, classes or parameters.
        """
        merged: VSGDClassifier = merging.merge(cls, models, base)
        return merged

    def sparsify(self) -> VSGDClassifier:
        """Store `coef_` as a sparse matrix."""
        fitting.sparsify(self)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _check(self) -> None:
        fitting.check_parameters(self, CLASSIFICATION)
        if self.multi_class not in ("multinomial", "ovr"):
            raise ValueError(f"multi_class={self.multi_class!r} is neither 'ovr' nor 'multinomial'")
        if self.multi_class == "multinomial" and self.loss != "log_loss":
            raise ValueError(f"multi_class='multinomial' is for the log loss, not for loss={self.loss!r}")
        for weight in self.class_weight.values() if isinstance(self.class_weight, dict) else ():
            if not (isinstance(weight, Real) and 0 <= weight < math.inf):
                raise ValueError(f"class_weight has {weight!r}; weights are finite and not negative")

    def _outputs(self) -> int:
        if len(self.classes_) < 2:
            raise ValueError(f"y has only one class, {self.classes_[0]!r}; a classifier needs at least two classes")
        return 1 if len(self.classes_) == 2 else len(self.classes_)

    def _softmax(self) -> bool:
        return len(self.classes_) > 2 and self.multi_class == "multinomial"

    def _training(self) -> Training:
        return fitting.training_of(
            self,
            loss=CLASSIFICATION[self.loss],
            softmax=self._softmax(),
            one_vs_rest=len(self.classes_) > 2 and not self._softmax(),
        )

    def _samples(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Return targets and weights. Targets are −1 and 1, or with more than two classes the number of the class."""
        labels = np.searchsorted(self.classes_, y)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if self.class_weight is not None:
            weights = weights * compute_class_weight(self.class_weight, classes=self.classes_, y=y)[labels]
        targets = labels if len(self.classes_) > 2 else 2 * labels - 1
        return targets.astype(np.float64), weights
