"""Merge linear models that were trained on different rows. Each coordinate is weighted by count and curvature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vsgd.linear.model import (
    BATCHES,
    CENTER,
    COLUMN_MAX,
    COUNT,
    CURV,
    CURV_SQ,
    FRESH_ROWS,
    GRAD,
    GRAD_SQ,
    MAX,
    MEMORY,
    MIN,
    RECENT_CURVATURE,
    RECENT_SLOPE_SQ,
    ROWS,
    SCALE_SQ,
    SEEN,
    SUM,
    SUM_SQ,
    THETA,
    Model,
    aligned_zeros,
)

STATISTICS = (GRAD, GRAD_SQ, CURV, CURV_SQ, MEMORY)


def untrained(model: Model) -> Model:
    """Return an untrained model of the same shape."""
    return Model(aligned_zeros(model.table.shape), *(np.zeros_like(array) for array in model[1:]))


def mean_over(weights: list[Any], values: list[Any]) -> Any:
    """Return the weighted mean of each coordinate; where all weights are zero, nothing changed and all are equal."""
    total = sum(weights)
    weighted = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return np.where(total > 0, weighted / np.where(total > 0, total, 1), values[0])


def merge_columns(models: Sequence[Model], origin: Model) -> Any:
    """Return the merged column statistics. Centers and mean squares are weighted by the number of new rows."""
    merged = origin.columns.copy()
    parts = [model.columns for model in models]
    for field in (SUM, SUM_SQ, COUNT):
        merged[:, field] += sum(part[:, field] - origin.columns[:, field] for part in parts)
    for field, nearest, none in ((MIN, np.min, np.inf), (MAX, np.max, -np.inf)):
        found = nearest([np.where(part[:, COUNT] > 0, part[:, field], none) for part in parts], axis=0)
        merged[:, field] = np.where(np.isfinite(found), found, 0)
    rows = [float(model.progress[FRESH_ROWS] - origin.progress[FRESH_ROWS]) for model in models]
    for field in (CENTER, SCALE_SQ):
        merged[:, field] = mean_over(rows, [part[:, field] for part in parts])
    return merged


def check_ancestor(models: Sequence[Model], base: Model) -> None:
    """Raise ValueError unless all models continued the training of the base."""
    for number, model in enumerate(models, start=1):
        if (model.table[:, SEEN] < base.table[:, SEEN]).any() or (model.progress[1:] < base.progress[1:]).any():
            raise ValueError(f"model {number} has seen fewer samples than the base, so it did not continue from it")


def merge(models: Sequence[Model], base: Model | None = None) -> Model:
    """Return one model from several models of different rows. It can be trained further.

    Near its optimum, the loss of n samples is a parabola of curvature n·h. The base, θ₀, was trained on n₀ samples.
    Model k continued from it with d_k more samples. It represents a parabola of curvature P_k = n₀ h + d_k h_k around
    θ_k. The sum over the models, with each sample counted once, has curvature P = n₀ h + Σ d_k h_k and its minimum at

        θ = θ₀ + Σ_k P_k / P · (θ_k − θ₀).

    Without a common base, n₀ = 0, and this is a mean weighted by d_k h_k. Only ratios of curvatures of one coordinate
    matter, so the result does not depend on the scale of a column. Statistics of gradients are means weighted by d_k.
    Centers are merged like the intercept. The intercept is then corrected for the centers of the merged model.

    Args:
        models: models of one shape and task, each trained on different rows. They are not changed.
        base: the model that all of them continued from, if any.

    Raises:
        ValueError: if a model did not continue from the base.
    """
    origin = untrained(models[0]) if base is None else base
    check_ancestor(models, origin)
    tables = [model.table for model in models]
    seen = origin.table[:, SEEN]
    new = [table[:, SEEN] - seen for table in tables]
    before = seen * mean_over(new, [table[:, CURV] for table in tables])
    added = [d * table[:, CURV] for d, table in zip(new, tables, strict=True)]
    total = before + sum(added)
    weights = [np.where(total > 0, (before + a) / np.where(total > 0, total, 1), 1 / len(models)) for a in added]

    def combined(start: Any, ends: list[Any]) -> Any:
        return start + sum(weight * (end - start) for weight, end in zip(weights, ends, strict=True))

    table = aligned_zeros(origin.table.shape)
    table[:, THETA] = combined(origin.table[:, THETA], [table[:, THETA] for table in tables])
    for field in STATISTICS:
        table[:, field] = mean_over(new, [table[:, field] for table in tables])
    table[:, SEEN] = seen + sum(new)
    table[:, COLUMN_MAX] = np.max([table[:, COLUMN_MAX] for table in tables], axis=0)
    average = models[0].average.copy()
    if average.size:
        average = combined(origin.average, [model.average for model in models])
    columns = merge_columns(models, origin)
    if columns[:, CENTER].any():
        for k in range(table.shape[2]):
            centers = origin.columns[:, CENTER].copy()
            for weight, model in zip(weights, models, strict=True):
                centers += weight[-1, k] * (model.columns[:, CENTER] - origin.columns[:, CENTER])
            moved = columns[:, CENTER] - centers
            table[-1, THETA, k] += moved @ table[:, THETA, k]
            if average.size:
                average[-1, k] += moved @ average[:, k]
    batches = [float(model.progress[BATCHES] - origin.progress[BATCHES]) for model in models]
    progress = models[0].progress.copy()
    for field in (BATCHES, ROWS, FRESH_ROWS):
        progress[field] = origin.progress[field] + sum(
            model.progress[field] - origin.progress[field] for model in models
        )
    sums = origin.sums + sum(model.sums - origin.sums for model in models)
    for field in (RECENT_CURVATURE, RECENT_SLOPE_SQ):
        sums[field] = mean_over(batches, [model.sums[field] for model in models])
    return Model(
        table=table,
        average=average,
        columns=columns,
        sums=sums,
        penalty=mean_over(batches, [model.penalty for model in models]),
        residual=mean_over(batches, [model.residual for model in models]),
        progress=progress,
    )
