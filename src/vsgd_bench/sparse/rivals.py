"""The methods of the comparison. Each is trained for five epochs and returns margins of the held-out rows."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, LogisticRegression, SGDClassifier, SGDRegressor

import vsgd
from vsgd.sklearn import VSGDClassifier, VSGDRegressor
from vsgd_bench.sparse.data import Split

EPOCHS = 5
RATES = np.logspace(-4, 2, 13)
RATES_UNSCALED = np.logspace(-12, 0, 13)
ALPHAS = (1e-7, 1e-6, 1e-5, 1e-4)
SCHEDULES = ("constant", "invscaling")

Fit = Callable[[Split, int], Any]


class Rival(NamedTuple):
    name: str
    grid: dict[str, Fit]
    """Functions by configuration. The best one on the first seed is run on all seeds."""
    random: bool = True
    """Whether the result depends on the seed, given the split."""


MARGINS: dict[tuple[Any, ...], Any] = {}


def remembered(parameters: dict[str, Any]) -> Callable[[Fit], Fit]:
    """Return a decorator that caches margins on fixed splits, which are evaluated by two losses."""

    def around(fit: Fit) -> Fit:
        def recall(data: Split, seed: int) -> Any:
            if not data.fixed:
                return fit(data, seed)
            key = (id(data.X), seed, *sorted(parameters.items()))
            if key not in MARGINS:
                MARGINS[key] = fit(data, seed)
            return MARGINS[key]

        return recall

    return around


def mine(regression: bool, **parameters: Any) -> Fit:
    @remembered({"": "vSGD", **parameters})
    def fit(data: Split, seed: int) -> Any:
        settings = {"max_iter": EPOCHS, "tol": None, "random_state": seed, **parameters}
        if regression:
            return VSGDRegressor(**settings).fit(data.X, data.y).predict(data.X_test)
        return VSGDClassifier(**settings).fit(data.X, data.y).decision_function(data.X_test)

    return fit


def sgd(regression: bool, **parameters: Any) -> Fit:
    @remembered(parameters)
    def fit(data: Split, seed: int) -> Any:
        settings = {"max_iter": EPOCHS, "tol": None, "random_state": seed, **parameters}
        model = SGDRegressor(**settings) if regression else SGDClassifier(loss="log_loss", **settings)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                model.fit(data.X, data.y)
            except ValueError:  # overflow: diverged
                classes = 1 if regression else len(np.unique(data.y))
                return np.full((len(data.y_test), classes)[: 1 + (classes > 2)], np.nan)
            return model.predict(data.X_test) if regression else model.decision_function(data.X_test)

    return fit


def sgd_grid(regression: bool, rates: Any) -> dict[str, Fit]:
    return {
        f"{schedule} eta0={rate:.3g} alpha={alpha:g}": sgd(
            regression, learning_rate=schedule, eta0=rate, alpha=alpha, power_t=0.25
        )
        for schedule, rate, alpha in product(SCHEDULES, rates, ALPHAS)
    }


def batch(regression: bool, multinomial: bool) -> Fit:
    """Return least squares, or logistic regression with the defaults of scikit-learn: C = 1, at most 100 iterations."""

    def fit(data: Split, seed: int) -> Any:
        if regression:
            return LinearRegression().fit(data.X, data.y).predict(data.X_test)

        def margins(y: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                return LogisticRegression(max_iter=100).fit(data.X, y).decision_function(data.X_test)

        classes = np.unique(data.y)
        if multinomial or len(classes) == 2:
            return margins(data.y)
        return np.stack([margins(data.y == label) for label in classes], axis=1)

    return fit


def vowpal_wabbit(regression: bool, flags: str) -> Fit:
    """Return Vowpal Wabbit on shuffled files, with five passes. Several classes are one against all."""

    def lines(X: Any, y: Any, classes: int) -> Any:
        X = sparse.csr_matrix(X)
        for i, target in enumerate(y):
            label = target if regression else target + 1 if classes > 2 else 2 * target - 1
            entries = range(X.indptr[i], X.indptr[i + 1])
            yield f"{label} | " + " ".join(f"{X.indices[e]}:{X.data[e]:.9g}" for e in entries) + "\n"

    def fit(data: Split, seed: int) -> Any:
        from vowpalwabbit import Workspace

        classes = 0 if regression else len(np.unique(data.y))
        order = np.random.default_rng(seed).permutation(len(data.y))
        kind = "" if regression else "--loss_function logistic"
        kind += f" --oaa {classes}" if classes > 2 else ""
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            (here / "train").write_text("".join(lines(data.X[order], data.y[order], classes)))
            (here / "test").write_text("".join(lines(data.X_test, data.y_test, classes)))
            Workspace(
                f"-d {here}/train -f {here}/model --cache_file {here}/cache -k --passes {EPOCHS} --holdout_off"
                f" -b 20 --quiet {kind} {flags}"
            ).finish()
            Workspace(f"-t -d {here}/test -i {here}/model -r {here}/raw --quiet").finish()
            raw = [line.split() for line in (here / "raw").read_text().splitlines() if line.strip()]
        if classes > 2:
            return np.array([[float(score.partition(":")[2]) for score in scores[:classes]] for scores in raw])
        return np.array([float(scores[0].rpartition(":")[2]) for scores in raw])

    return fit


def rivals(regression: bool, many_classes: bool, scaled: bool) -> list[Rival]:
    name = "SGDRegressor" if regression else "SGDClassifier"
    rates = RATES if scaled else np.union1d(RATES, RATES_UNSCALED)
    found = [
        Rival("vSGD", {"": mine(regression)}),
        Rival("vSGD, batch_size=1", {"": mine(regression, batch_size=1)}),
        Rival("vSGD, options=PAPER", {"": mine(regression, options=vsgd.PAPER)}),
        Rival(f"{name}, defaults", {"": sgd(regression)}),
        Rival(f"{name}, best of grid", sgd_grid(regression, rates)),
    ]
    if many_classes:
        found.insert(1, Rival("vSGD, multi_class=multinomial", {"": mine(regression, multi_class="multinomial")}))
    if importlib.util.find_spec("vowpalwabbit"):
        found += [
            Rival("Vowpal Wabbit, defaults", {"": vowpal_wabbit(regression, "")}),
            Rival("Vowpal Wabbit --coin", {"": vowpal_wabbit(regression, "--coin")}),
        ]
    return [*found, Rival("batch solver, defaults", {"": batch(regression, many_classes)}, random=False)]
