"""Estimators that learned from different rows become one; and rounds of learning from all parts and merging."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.utils import check_random_state, shuffle
from sklearn.utils.validation import check_is_fitted

from vsgd.linear.merging import merge as merge_models
from vsgd.linear.model import ROWS
from vsgd.sklearn import fitting

FREE = {
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
"""Parameters in which merged estimators may differ: where, how long and in which order they learn."""

EachPart = Callable[[Callable[[int, Any, Any], Any]], Sequence[Any]]
"""Calls a function of (number, X, y) for each part, wherever it is, and returns the results in order of the parts."""


def settings_of(estimator: Any) -> dict[str, Any]:
    """What estimators must have in common to be merged."""
    learned = {
        "number of features": estimator.n_features_in_,
        "feature names": list(getattr(estimator, "feature_names_in_", [])),
        "classes": list(getattr(estimator, "classes_", [])),
    }
    return {**learned, **{name: v for name, v in estimator.get_params(deep=False).items() if name not in FREE}}


def check_alike(kind: type, estimators: Sequence[Any]) -> None:
    """Refuse estimators that are not fitted, or not for the same columns, classes, loss, algorithm and settings."""
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
            raise ValueError(f"model {number} cannot be merged with the first: it was begun with other settings")


def merge(kind: type, models: Iterable[Any], base: Any) -> Any:
    """A new estimator that knows what all of them know."""
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
    """The classes of a part."""
    return np.unique(np.asarray(y))


def all_labels(each_part: EachPart) -> Any:
    """The classes of all parts; those of an empty part would have a type of their own."""
    found = [labels for labels in each_part(distinct_labels) if len(labels)]
    if not found:
        raise ValueError("no part has any rows")
    return np.unique(np.concatenate(found))


def learn(number: int, X: Any, y: Any, *, estimator: Any, known: dict[str, Any], seed: tuple[int, int]) -> Any:
    """A copy of the estimator after one pass over a part, in random order; None if no row of the part counts."""
    if len(y) == 0:
        return None
    learner = copy.copy(estimator)
    if hasattr(learner, "model_"):
        learner.loss_curve_ = []
    order = int(np.random.SeedSequence((*seed, number)).generate_state(1)[0])
    learner.partial_fit(*shuffle(X, y, random_state=order), **known)
    return learner if learner.loss_curve_ else None


def mean_loss(learners: Sequence[Any], rows_before: int) -> float:
    """The loss of all rows of a round, each before it was learned from."""
    rows = [learner.model_.progress[ROWS] - rows_before for learner in learners]
    return float(np.average([learner.loss_curve_[-1] for learner in learners], weights=rows))


def fit_rounds(estimator: Any, each_part: EachPart, *, rounds: int, classes: Any = None) -> Any:
    """Learn from all parts at the same time and merge, several times.

    A copy of the estimator is returned. If it has been fitted already, it goes on from there.

    Args:
        each_part: runs a function on every part.
        rounds: passes over the data; the parts are merged after each.
        classes: all labels of a classification. Without them, one more pass over the parts collects them.
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
    return model.set_params(random_state=estimator.random_state)


def fit_parts(estimator: Any, parts: Sequence[tuple[Any, Any]], *, rounds: int = 3, classes: Any = None) -> Any:
    """`fit_rounds` on parts (X, y) in memory, one after the other: what a cluster gives, to the bit.

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
