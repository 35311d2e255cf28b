"""Compare linear models with reference solvers: unscaled columns, noisy text, exponential links and L1.

The reference solvers are those of scikit-learn behind a StandardScaler. California housing and text need VSGD_DATA, the
folder of the data sets; the rest comes with scikit-learn.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import warnings
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale

from vsgd.sklearn import VSGDClassifier, VSGDRegressor

warnings.simplefilter("ignore")


def bench(module: str) -> Any:
    """Return a module of `vsgd_bench`."""
    package = "vsgd_bench" if importlib.util.find_spec("vsgd_bench") else "vsgd.bench"
    return importlib.import_module(f"{package}.{module}")


def unscaled_against_scaled(name: str, data: tuple[Any, Any], model: Any, reference: Any, seeds: int) -> None:
    """Print cross-validated losses: log loss, or 1 − R²."""
    X, y = data
    classes = hasattr(model, "multi_class")
    scoring, folds_of = ("neg_log_loss", StratifiedKFold) if classes else ("r2", KFold)

    def loss(estimator: Any) -> float:
        scores = [
            cross_val_score(estimator, X, y, cv=folds_of(5, shuffle=True, random_state=seed), scoring=scoring).mean()
            for seed in range(seeds)
        ]
        return float(-np.mean(scores) if classes else 1 - np.mean(scores))

    unscaled, scaled, solver = (
        loss(m) for m in (model, make_pipeline(StandardScaler(), model), make_pipeline(StandardScaler(), reference))
    )
    print(
        f"{name}: loss {unscaled:.4f} unscaled, {scaled:.4f} scaled, {solver:.4f} {type(reference).__name__}; "
        f"unscaled / scaled {unscaled / scaled:.3f}, scaled / solver {scaled / solver:.3f}",
        flush=True,
    )


def exponential_links() -> None:
    X, y = load_diabetes(return_X_y=True, scaled=False)
    for loss in ("poisson", "gamma"):
        print(f"diabetes, loss={loss!r}, unscaled: R² on training rows {VSGDRegressor(loss).fit(X, y).score(X, y):.3f}")


def zeros_of_l1() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    X = scale(X)
    for alpha in (1e-3, 1e-2):
        exact = LogisticRegression(l1_ratio=1, C=1 / (alpha * len(y)), solver="saga", tol=1e-8, max_iter=50_000)
        model = VSGDClassifier(penalty="l1", alpha=alpha, random_state=0).fit(X, y)
        zeros, expected = np.sum(model.coef_ == 0), np.sum(exact.fit(X, y).coef_ == 0)
        print(f"breast cancer, L1, alpha={alpha:g}: {zeros} zeros, {expected} in the exact solution", flush=True)


def noisy_text() -> None:
    """Print losses on 20 Newsgroups with shuffled labels. Two of the twenty groups are positive."""
    data = bench("sparse.data").newsgroups(True)
    rng = np.random.default_rng(0)

    def shuffled(y: Any, fraction: float) -> Any:
        y = y.copy()
        some = rng.random(len(y)) < fraction
        y[some] = rng.permutation(y[some])
        return y

    for fraction in (1.0, 0.9, 0.5):
        y, y_test = shuffled(data.y < 2, fraction), shuffled(data.y_test < 2, fraction)
        prior = log_loss(y_test, np.full(len(y_test), y.mean()))
        losses = [
            log_loss(y_test, VSGDClassifier(penalty=p, random_state=0).fit(data.X, y).predict_proba(data.X_test))
            for p in ("auto", None)
        ]
        print(
            f"20 Newsgroups, {fraction:.0%} of labels shuffled: log loss {losses[0] / prior:.3f} of the class prior's; "
            f"penalty=None {losses[1] / prior:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="repetitions of the cross-validation (default: 3)")
    seeds = parser.parse_args().seeds
    regressor, classifier = VSGDRegressor(random_state=0), VSGDClassifier(random_state=0)
    unscaled_against_scaled("diabetes", load_diabetes(return_X_y=True, scaled=False), regressor, Ridge(), seeds)
    unscaled_against_scaled(
        "breast cancer", load_breast_cancer(return_X_y=True), classifier, LogisticRegression(), seeds
    )
    unscaled_against_scaled("wine", load_wine(return_X_y=True), classifier, LogisticRegression(), seeds)
    exponential_links()
    zeros_of_l1()
    with bench("datasets").skipped_without_data():
        housing = bench("sparse.data").table("california-housing.csv.gz")
        unscaled_against_scaled("California housing", housing, regressor, Ridge(), seeds)
        noisy_text()


if __name__ == "__main__":
    main()
