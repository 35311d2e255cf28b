"""Functions shared by classifier and regressor: check parameters, train a model, set the attributes."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from numbers import Integral, Real
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from joblib import cpu_count, effective_n_jobs
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state, check_scalar
from sklearn.utils.validation import check_is_fitted, validate_data
from tqdm.auto import tqdm

from vsgd.algorithms.columns import COLUMNS, Columns
from vsgd.linear import Model, Task, Training, as_rows, distinct, learning_rates, new_model, train_on
from vsgd.linear.model import FIELDS, ROWS, THETA, aligned_zeros
from vsgd.linear.penalties import PENALTIES, penalty_weights
from vsgd.linear.refine import refine
from vsgd.linear.training import Patience, coefficients, margins_of, mean_loss, mostly_learns, orders

cores = functools.cache(cpu_count)

Matrix: TypeAlias = ArrayLike | sparse.sparray | sparse.spmatrix
"""Samples × features, dense or sparse."""

RandomState: TypeAlias = int | np.random.RandomState | None
"""A seed, a generator, or None for the global generator of NumPy."""


@contextlib.contextmanager
def all_or_nothing(estimator: Any) -> Iterator[None]:
    """Restore the attributes of an estimator if training fails or is interrupted.

    Training replaces the model and never changes it in place, so it is enough to restore the attributes.
    """
    before, losses = dict(vars(estimator)), getattr(estimator, "loss_curve_", [])
    passes = len(losses)
    try:
        yield
    except BaseException:
        del losses[passes:]
        estimator.__dict__ = before
        raise


NOT_NEEDED = ("learning_rate", "eta0", "power_t")
Init = TypeVar("Init", bound=Callable[..., None])


def refuses_schedules(init: Init) -> Init:
    """Decorate a constructor to raise TypeError for arguments of learning rates, with the reason."""

    @functools.wraps(init)
    def checked(self: Any, *arguments: Any, **keywords: Any) -> None:
        for name in NOT_NEEDED:
            if name in keywords:
                raise TypeError(
                    f"{type(self).__name__} has no argument {name!r}: it estimates the learning rate of each "
                    f"coefficient from the data, and needs neither an initial rate nor a schedule. Remove {name!r}; "
                    f"after fitting, `rates_` has the rates."
                )
        init(self, *arguments, **keywords)

    return cast(Init, checked)


def check_real(estimator: Any, name: str, **bounds: Any) -> None:
    """Raise ValueError or TypeError unless a parameter is a finite number within bounds."""
    value = check_scalar(getattr(estimator, name), name, Real, **bounds)
    if not math.isfinite(value):
        raise ValueError(f"{name} == {value}, must be finite")


def check_parameters(estimator: Any, losses: dict[str, int]) -> None:
    """Raise ValueError or TypeError if a parameter of an estimator is invalid."""
    if estimator.loss not in losses:
        raise ValueError(f"loss={estimator.loss!r} is not one of {sorted(losses)}")
    if estimator.penalty not in PENALTIES:
        raise ValueError(f"penalty={estimator.penalty!r} is not one of {list(PENALTIES)}")
    check_real(estimator, "alpha", min_val=0)
    check_real(estimator, "l1_ratio", min_val=0, max_val=1)
    check_scalar(estimator.batch_size, "batch_size", Integral, min_val=1)
    check_scalar(estimator.max_iter, "max_iter", Integral, min_val=1)
    check_scalar(estimator.n_iter_no_change, "n_iter_no_change", Integral, min_val=1)
    check_real(estimator, "validation_fraction", min_val=0, max_val=1, include_boundaries="neither")
    if estimator.tol is not None:
        check_real(estimator, "tol", min_val=0)


def training_of(estimator: Any, **task: Any) -> Training:
    """Return the parameters of an estimator as a `Training`."""
    l1, l2 = penalty_weights(estimator.penalty, estimator.alpha, estimator.l1_ratio)
    options = COLUMNS if estimator.options is None else estimator.options
    return Training(
        task=Task(
            l1=l1,
            l2=l2,
            evidence=estimator.penalty == "auto" and isinstance(options, Columns),
            intercept=bool(estimator.fit_intercept),
            average=bool(estimator.average),
            **task,
        ),
        options=options,
        batch_size=int(estimator.batch_size),
        threads=min(effective_n_jobs(estimator.n_jobs), cores()),
    )


def read(estimator: Any, X: Any, y: Any, *, numeric: bool, reset: bool) -> Any:
    """Return X and y, validated by scikit-learn. X is CSR or dense, float32 or float64."""
    dtype = [np.float64, np.float32]
    return validate_data(estimator, X, y, accept_sparse="csr", dtype=dtype, y_numeric=numeric, reset=reset)


def copied(model: Model) -> Model:
    """Return a copy of a model in aligned memory."""
    table = aligned_zeros(model.table.shape)
    table[...] = model.table
    return Model(table, *(np.array(array) for array in model[1:]))


def model_to_train(estimator: Any, outputs: int, training: Training, keep: bool) -> tuple[Model, Any]:
    """Return the model to train, a copy of the fitted one if `keep` or a new one, and a random generator."""
    rng = check_random_state(estimator.random_state)
    columns = estimator.n_features_in_ + training.task.intercept
    if not (keep and hasattr(estimator, "model_")):
        estimator.loss_curve_ = []
        return new_model(columns, outputs, training.task, training.options, int(rng.randint(2**31 - 1))), rng
    model = copied(estimator.model_)
    if model.table.shape != (columns, FIELDS, outputs):
        raise ValueError("fit_intercept or the number of classes has changed since the first fit")
    if training.task.average != (model.average.shape[0] > 0):
        average = model.table[:, THETA].copy() if training.task.average else model.average[:0]
        model = model._replace(average=average)
    return model, rng


def has_optimum(estimator: Any, training: Training) -> bool:
    """Return whether `fit` ends at the optimum: with an L1 penalty, unless the arguments stop it earlier."""
    ends_early = estimator.tol is None or estimator.early_stopping
    return training.task.l1 > 0 and isinstance(training.options, Columns) and not ends_early


def fit_epochs(estimator: Any, X: Any, targets: Any, weights: Any, outputs: int, training: Training) -> None:
    """Train in several passes over the distinct samples, until the loss no longer decreases."""
    model, rng = model_to_train(estimator, outputs, training, keep=estimator.warm_start)
    rows = as_rows(X)
    samples = distinct(rows, targets, weights, X.shape[1])
    if len(samples.rows) == 0:
        raise ValueError("every sample_weight is zero; at least one must be positive")
    merged = np.zeros(len(targets))
    merged[samples.rows] = samples.weights
    stream = np.random.default_rng(rng.randint(2**31 - 1))
    learn_from, held_out = samples.rows, samples.rows[:0]
    if estimator.early_stopping:
        held = max(1, int(estimator.validation_fraction * len(samples.rows)))
        shuffled = stream.permutation(samples.rows)
        held_out, learn_from = shuffled[:held], shuffled[held:]
        if len(learn_from) == 0:
            raise ValueError("early_stopping leaves no sample for training; pass more samples")

    fresh = model.progress[ROWS] == 0
    patience = Patience(estimator.tol, estimator.n_iter_no_change)
    stopped = estimator.tol is None
    epochs = islice(orders(learn_from, stream, estimator.shuffle), estimator.max_iter)
    passes = tqdm(epochs, total=estimator.max_iter, unit="epoch", disable=not estimator.verbose)
    for epoch, order in enumerate(passes, start=1):
        estimator.n_iter_ = epoch
        task = training.task._replace(fresh=fresh and epoch == 1, data_rows=len(learn_from))
        loss = train_on(model, rows, order, targets, merged, replace(training, task=task), is_checked=epoch > 1)
        if estimator.early_stopping:
            at = margins_of(X[held_out], coefficients(model, training.task))
            loss = mean_loss(at, targets[held_out], merged[held_out], training.task)
        estimator.loss_curve_.append(loss)
        passes.set_postfix(loss=f"{loss:.4g}")
        if mostly_learns(model, training.options) and patience.is_over(loss):
            stopped = True
            break
    passes.close()
    if has_optimum(estimator, training) and stopped:
        refine(model, sparse.csc_matrix(X[learn_from]), targets[learn_from], merged[learn_from], training.task)
    publish(estimator, model, training)
    if not stopped:
        warnings.warn(
            f"The loss still decreases after max_iter={estimator.max_iter} passes. Increase max_iter, or set tol=None.",
            ConvergenceWarning,
            stacklevel=3,
        )


def fit_once(estimator: Any, X: Any, targets: Any, weights: Any, outputs: int, training: Training) -> None:
    """Train in one pass in the given order, since a stream may drift."""
    model, _ = model_to_train(estimator, outputs, training, keep=True)
    order = np.flatnonzero(weights > 0)
    if len(order):
        estimator.loss_curve_.append(train_on(model, as_rows(X), order, targets, weights, training))
    publish(estimator, model, training)


def publish(estimator: Any, model: Model, training: Training) -> None:
    """Set the attributes of a fitted estimator.

    Raises:
        ValueError: if a number of the model is not finite.
    """
    if not all(np.isfinite(array).all() for array in model):
        raise ValueError("the coefficients overflow: values of X, y or sample_weight are too large for float64 squares")
    theta = coefficients(model, training.task)
    features = estimator.n_features_in_
    estimator.model_ = model
    estimator.coef_ = theta[:features].T.copy()
    estimator.intercept_ = theta[features:].sum(axis=0)
    estimator.rates_ = learning_rates(model, training.options)[:features].T.copy()


def predict_margins(estimator: Any, X: Matrix) -> NDArray[np.float64]:
    """Return X times coefficients plus intercept, samples × outputs."""
    check_is_fitted(estimator, "coef_")
    X = validate_data(estimator, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
    product = X @ estimator.coef_.T
    margins: NDArray[np.float64] = (product.toarray() if sparse.issparse(product) else product) + estimator.intercept_
    return margins


def sparsify(estimator: Any) -> Any:
    """Store `coef_` as a sparse matrix, which saves memory if most coefficients are zero."""
    check_is_fitted(estimator)
    estimator.coef_ = sparse.csr_matrix(estimator.coef_)
    return estimator
