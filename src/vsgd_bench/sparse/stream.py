"""Elec2, a stream with drift. Each row is predicted before it is learned."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.linear_model import SGDClassifier
from sklearn.preprocessing import StandardScaler

from vsgd.sklearn import VSGDClassifier
from vsgd_bench.sparse.data import table

BURN_IN = 10
"""Number of rows before the first prediction."""


def prequential(model: Any, scaled: bool, X: Any, y: Any) -> float:
    """Return the fraction of correct predictions of a model with `partial_fit`."""
    scaler = StandardScaler()
    right = 0
    for i in range(len(y)):
        row = X[i : i + 1]
        if scaled:
            row = scaler.partial_fit(row).transform(row)
        if i >= BURN_IN:
            right += model.predict(row)[0] == y[i]
        model.partial_fit(row, y[i : i + 1], classes=[0, 1])
    return right / (len(y) - BURN_IN)


def with_river(scaled: bool, X: Any, y: Any) -> float:
    from river import linear_model, preprocessing

    model: Any = linear_model.LogisticRegression()
    if scaled:
        model = preprocessing.StandardScaler() | model
    right = 0
    for i in range(len(y)):
        row = dict(enumerate(X[i].tolist()))
        if i >= BURN_IN:
            right += bool(model.predict_one(row)) == bool(y[i])
        model.learn_one(row, bool(y[i]))
    return right / (len(y) - BURN_IN)


def streams() -> dict[str, Callable[[int], float]]:
    """Return functions that map a seed to an accuracy, by the name of the model."""
    X, y = table("elec2.csv.gz")
    y = y.astype(int)
    found: dict[str, Callable[[int], float]] = {}
    for scaled, note in ((False, ""), (True, ", StandardScaler")):

        def mine(seed: int, scaled: bool = scaled) -> float:
            return prequential(VSGDClassifier(batch_size=1, random_state=seed), scaled, X, y)

        def sgd(seed: int, scaled: bool = scaled) -> float:
            return prequential(SGDClassifier(loss="log_loss", random_state=seed), scaled, X, y)

        def river(seed: int, scaled: bool = scaled) -> float:
            return with_river(scaled, X, y)

        found[f"vSGD{note}"] = mine
        found[f"SGDClassifier{note}"] = sgd
        if importlib.util.find_spec("river"):
            found[f"river LogisticRegression{note}"] = river
    found["previous label"] = lambda seed: float(np.mean(y[BURN_IN:] == y[BURN_IN - 1 : -1]))
    return found


def is_random(name: str) -> bool:
    """Return whether the result depends on the seed. The other models use no random numbers."""
    return name.startswith("vSGD")
