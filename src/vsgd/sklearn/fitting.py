"""What the classifier and the regressor have in common: parameters to a task, data to a model, model to attributes."""

from __future__ import annotations

import warnings
from itertools import islice
from numbers import Integral, Real
from typing import Any

import numpy as np
from joblib import effective_n_jobs
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state, check_scalar
from sklearn.utils.validation import check_is_fitted, validate_data
from tqdm.auto import tqdm

from vsgd.algorithms.columns import COLUMNS
from vsgd.linear import Task, Training, as_rows, distinct, learning_rates, new_model, train_on
from vsgd.linear.model import FIELDS, THETA
from vsgd.linear.training import Patience, coefficients, mean_loss, mostly_learns, shuffles

PENALTIES = {None: (0.0, 0.0), "l2": (0.0, 1.0), "l1": (1.0, 0.0), "elasticnet": (None, None)}


def check_parameters(estimator: Any, losses: dict[str, int]) -> None:
    """One clear error for a parameter that cannot be."""
    if estimator.loss not in losses:
        raise ValueError(f"loss={estimator.loss!r} is not one of {sorted(losses)}")
    if estimator.penalty not in PENALTIES:
        raise ValueError(f"penalty={estimator.penalty!r} is not one of {list(PENALTIES)}")
    check_scalar(estimator.alpha, "alpha", Real, min_val=0)
    check_scalar(estimator.l1_ratio, "l1_ratio", Real, min_val=0, max_val=1)
    check_scalar(estimator.batch_size, "batch_size", Integral, min_val=1)
    check_scalar(estimator.max_iter, "max_iter", Integral, min_val=1)
    check_scalar(estimator.n_iter_no_change, "n_iter_no_change", Integral, min_val=1)
    check_scalar(
        estimator.validation_fraction, "validation_fraction", Real, min_val=0, max_val=1, include_boundaries="neither"
    )
    if estimator.tol is not None:
        check_scalar(estimator.tol, "tol", Real, min_val=0)


def training_of(estimator: Any, **task: Any) -> Training:
    """The parameters of an estimator as the kernel wants them."""
    l1, l2 = PENALTIES[estimator.penalty]
    if estimator.penalty == "elasticnet":
        l1, l2 = estimator.l1_ratio, 1 - estimator.l1_ratio
    return Training(
        task=Task(
            l1=float(estimator.alpha * l1),
            l2=float(estimator.alpha * l2),
            intercept=bool(estimator.fit_intercept),
            average=bool(estimator.average),
            **task,
        ),
        options=COLUMNS if estimator.options is None else estimator.options,
        batch_size=int(estimator.batch_size),
        threads=effective_n_jobs(estimator.n_jobs),
    )


def read(estimator: Any, X: Any, y: Any, *, numeric: bool, reset: bool) -> Any:
    """Check X and y as scikit-learn does; CSR or dense, float32 or float64."""
    dtype = [np.float64, np.float32]
    return validate_data(estimator, X, y, accept_sparse="csr", dtype=dtype, y_numeric=numeric, reset=reset)


def ensure_model(estimator: Any, outputs: int, training: Training, keep: bool) -> Any:
    """The model to go on with, or a new one."""
    rng = check_random_state(estimator.random_state)
    columns = estimator.n_features_in_ + training.task.intercept
    if not (keep and hasattr(estimator, "model_")):
        seed = int(rng.randint(2**31 - 1))
        estimator.model_ = new_model(columns, outputs, training.task, training.options, seed)
        estimator.loss_curve_ = []
    model = estimator.model_
    if model.table.shape != (columns, FIELDS, outputs):
        raise ValueError("fit_intercept or the number of classes is not what the model was begun with")
    if training.task.average and model.average.shape[0] == 0:
        estimator.model_ = model._replace(average=model.table[:, THETA].copy())
    return rng


def fit_epochs(estimator: Any, X: Any, targets: Any, weights: Any, outputs: int, training: Training) -> None:
    """Many passes over the distinct samples, shuffled each time, until the loss no longer falls."""
    rng = ensure_model(estimator, outputs, training, keep=estimator.warm_start)
    rows = as_rows(X)
    samples = distinct(rows, targets, weights, X.shape[1])
    if len(samples.rows) == 0:
        raise ValueError("every sample_weight is zero: there is nothing to learn from")
    merged = np.zeros(len(targets))
    merged[samples.rows] = samples.weights
    stream = np.random.default_rng(rng.randint(2**31 - 1))
    learn_from, held_out = samples.rows, samples.rows[:0]
    if estimator.early_stopping:
        held = max(1, int(estimator.validation_fraction * len(samples.rows)))
        shuffled = stream.permutation(samples.rows)
        held_out, learn_from = shuffled[:held], shuffled[held:]
        if len(learn_from) == 0:
            raise ValueError("early_stopping leaves no sample to learn from; the data has too few samples")

    patience = Patience(estimator.tol, estimator.n_iter_no_change)
    stopped = estimator.tol is None
    epochs = islice(shuffles(learn_from, stream), estimator.max_iter)
    passes = tqdm(epochs, total=estimator.max_iter, unit="epoch", disable=not estimator.verbose)
    for epoch, order in enumerate(passes, start=1):
        estimator.n_iter_ = epoch
        loss = train_on(estimator.model_, rows, order, targets, merged, training)
        if estimator.early_stopping:
            at = margins(estimator, X[held_out], training)
            loss = mean_loss(at, targets[held_out], merged[held_out], training.task)
        estimator.loss_curve_.append(loss)
        passes.set_postfix(loss=f"{loss:.4g}")
        if mostly_learns(estimator.model_, training.options) and patience.is_over(loss):
            stopped = True
            break
    passes.close()
    publish(estimator, training)
    if not stopped:
        warnings.warn(
            f"The loss still improves after max_iter={estimator.max_iter} epochs; raise it, or set tol=None",
            ConvergenceWarning,
            stacklevel=3,
        )


def fit_once(estimator: Any, X: Any, targets: Any, weights: Any, outputs: int, training: Training) -> None:
    """One pass in the order given: a stream may drift."""
    ensure_model(estimator, outputs, training, keep=True)
    order = np.flatnonzero(weights > 0)
    if len(order):
        estimator.loss_curve_.append(train_on(estimator.model_, as_rows(X), order, targets, weights, training))
    publish(estimator, training)


def margins(estimator: Any, X: Any, training: Training) -> Any:
    theta = coefficients(estimator.model_, training.task)
    features = estimator.n_features_in_
    return np.ascontiguousarray(X @ theta[:features]) + theta[features:].sum(axis=0)


def publish(estimator: Any, training: Training) -> None:
    """Set what a fitted linear model is expected to have."""
    theta = coefficients(estimator.model_, training.task)
    if not np.isfinite(theta).all():
        raise ValueError("the coefficients overflow: values of X, y or sample_weight are too large for float64 squares")
    features = estimator.n_features_in_
    estimator.coef_ = theta[:features].T.copy()
    estimator.intercept_ = theta[features:].sum(axis=0)
    estimator.rates_ = learning_rates(estimator.model_, training.options)[:features].T.copy()


def predict_margins(estimator: Any, X: Any) -> Any:
    """X times coefficients plus intercept, samples × outputs."""
    check_is_fitted(estimator)
    X = validate_data(estimator, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
    product = X @ estimator.coef_.T
    return (product.toarray() if sparse.issparse(product) else product) + estimator.intercept_


def sparsify(estimator: Any) -> Any:
    """Store `coef_` as a sparse matrix; worth it when an L1 penalty has made most of it zero."""
    check_is_fitted(estimator)
    estimator.coef_ = sparse.csr_matrix(estimator.coef_)
    return estimator
