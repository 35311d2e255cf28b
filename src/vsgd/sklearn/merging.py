"""Merge estimators that were trained on different rows, and train in rounds on parts of the data."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import is_classifier
from sklearn.utils import check_random_state, shuffle
from sklearn.utils.validation import check_is_fitted

from vsgd.linear.merging import merge as merge_models
from vsgd.linear.model import ROWS
from vsgd.sklearn import fitting
from vsgd.sklearn.fitting import Matrix

if TYPE_CHECKING:
    from vsgd.sklearn.classifier import VSGDClassifier
    from vsgd.sklearn.regressor import VSGDRegressor

Estimator = TypeVar("Estimator", "VSGDClassifier", "VSGDRegressor")

NOT_COMPARED = {
    "early_stopping",
    "max_iter",
    "n_iter_no_change",
    "n_jobs",
    "random_state",
    "shuffle",
    "tol",
    "validation_fraction",
    "verbose",
    "warm_start",
}
"""Parameters in which merged estimators may differ. They only affect where, how long and in which order they train."""

EachPart = Callable[[Callable[[int, Any, Any], Any]], Sequence[Any]]
"""Calls a function of (number, X, y) for each part, and returns the results in the order of the parts."""


def settings_of(estimator: Any) -> dict[str, Any]:
    """Return the properties that merged estimators must share."""
    learned = {
        "number of features": estimator.n_features_in_,
        "feature names": list(getattr(estimator, "feature_names_in_", [])),
        "classes": list(getattr(estimator, "classes_", [])),
    }
    return {**learned, **{name: v for name, v in estimator.get_params(deep=False).items() if name not in NOT_COMPARED}}


def check_alike(kind: type, estimators: Sequence[Any]) -> None:
    """Raise ValueError unless all estimators are fitted and share columns, classes, loss, algorithm and settings."""
    for number, estimator in enumerate(estimators):
        if not isinstance(estimator, kind):
            raise ValueError(f"model {number + 1} is a {type(estimator).__name__}, not a {kind.__name__}")
        check_is_fitted(estimator, "model_")
    first = settings_of(estimators[0])
    for number, estimator in enumerate(estimators[1:], start=2):
        for name, value in settings_of(estimator).items():
            if value != first[name]:
                raise ValueError(
                    f"model {number} cannot be merged with the first, its {name} differ: "
                    f"{value!s:.60} instead of {first[name]!s:.60}"
                )
        if estimator.model_.table.shape != estimators[0].model_.table.shape:
            raise ValueError(f"model {number} cannot be merged with the first: it was trained with other settings")


def merge(kind: type, models: Iterable[Any], base: Any) -> Any:
    """Return a new estimator from several. See `VSGDClassifier.merge`."""
    models = list(models)
    if not models:
        raise ValueError("there is no model to merge")
    check_alike(kind, models if base is None else [*models, base])
    merged = copy.copy(models[0])
    merged.loss_curve_ = []
    model = merge_models([model.model_ for model in models], None if base is None else base.model_)
    fitting.publish(merged, model, merged._training())
    return merged


def distinct_labels(number: int, X: Any, y: Any) -> Any:
    """Return the classes of a part."""
    return np.unique(np.asarray(y))


def all_labels(each_part: EachPart) -> Any:
    """Return the classes of all parts that have rows. The labels of an empty part can have another type."""
    found = [labels for labels in each_part(distinct_labels) if len(labels)]
    if not found:
        raise ValueError("no part has any rows")
    return np.unique(np.concatenate(found))


def learn(number: int, X: Any, y: Any, *, estimator: Any, known: dict[str, Any], seed: tuple[int, int]) -> Any:
    """Return a copy of the estimator after one pass over a part in random order; None if all weights are zero."""
    if len(y) == 0:
        return None
    learner = copy.copy(estimator)
    if hasattr(learner, "model_"):
        learner.loss_curve_ = []
    order = int(np.random.SeedSequence((*seed, number)).generate_state(1)[0])
    learner.partial_fit(*shuffle(X, y, random_state=order), **known)
    return learner if learner.loss_curve_ else None


def mean_loss(learners: Sequence[Any], rows_before: int) -> float:
    """Return the mean loss of all rows of a round, each measured before its update."""
    rows = [learner.model_.progress[ROWS] - rows_before for learner in learners]
    return float(np.average([learner.loss_curve_[-1] for learner in learners], weights=rows))


def fit_rounds(
    estimator: Estimator, each_part: EachPart, *, rounds: int, classes: ArrayLike | None = None
) -> Estimator:
    """Train on all parts in parallel and merge the models, several times.

    Args:
        estimator: a `VSGDClassifier` or `VSGDRegressor`. If it is fitted, training continues from there.
        each_part: runs a function on every part.
        rounds: number of passes over the data. The models are merged after each pass.
        classes: all labels of a classification. Without them, one more pass over the parts collects them.

    Returns:
        A fitted copy of the estimator.

    Raises:
        ValueError: if `rounds` is below 1, or if no part has a row with a positive weight.
    """
    if rounds < 1:
        raise ValueError(f"rounds == {rounds}, must be at least 1")
    seed = int(check_random_state(estimator.random_state).randint(2**31 - 1))
    model = copy.copy(estimator).set_params(random_state=seed)
    known: dict[str, Any] = {}
    if is_classifier(estimator) and not hasattr(model, "model_"):
        known["classes"] = all_labels(each_part) if classes is None else classes
    losses = list(getattr(model, "loss_curve_", []))
    for number in range(rounds):
        base = model if hasattr(model, "model_") else None
        task = functools.partial(learn, estimator=model, known=known, seed=(seed, number))
        learners = [learner for learner in each_part(task) if learner is not None]
        if not learners:
            raise ValueError("no part has any rows with a weight")
        losses.append(mean_loss(learners, 0 if base is None else base.model_.progress[ROWS]))
        model = type(estimator).merge(learners, base=base)
    model.loss_curve_ = losses
    fitted: Estimator = model.set_params(random_state=estimator.random_state)
    return fitted


def fit_parts(
    estimator: Estimator,
    parts: Sequence[tuple[Matrix, ArrayLike]],
    *,
    rounds: int = 3,
    classes: ArrayLike | None = None,
) -> Estimator:
    """Train on parts of the data that are in memory, and merge the models after each pass.

    The result is bit-for-bit that of `vsgd.integrations.dask.fit` and `vsgd.integrations.spark.fit` on the same parts.

    Args:
        estimator: a `VSGDClassifier` or `VSGDRegressor`. If it is fitted, training continues from there.
        parts: pairs (X, y).
        rounds: number of passes over the data.
        classes: all labels of a classification. Without them, one more pass over the parts collects them.

    Returns:
        A fitted copy of the estimator.

    Raises:
        ValueError: if `rounds` is below 1, or if no part has a row with a positive weight.

    >>> from sklearn.datasets import load_breast_cancer
    >>> from vsgd.sklearn import VSGDClassifier
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> parts = [(X[i::4], y[i::4]) for i in range(4)]
    >>> fit_parts(VSGDClassifier(random_state=0), parts).score(X, y) > 0.9
    True
    """

    def each_part(function: Callable[[int, Any, Any], Any]) -> list[Any]:
        return [function(number, X, y) for number, (X, y) in enumerate(parts)]

    return fit_rounds(estimator, each_part, rounds=rounds, classes=classes)
