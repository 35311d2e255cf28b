"""Merge model files that were trained on different rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vsgd.errors import UserError
from vsgd.files.storage import Trained
from vsgd.linear.merging import merge as merge_models
from vsgd.linear.model import ROWS


def settings_of(trained: Trained) -> dict[str, Any]:
    """Return the properties that merged models must share."""
    schema = trained.schema
    return {
        "format": schema.format,
        "target": schema.target,
        "number columns": schema.numbers,
        "date columns": schema.dates,
        "category columns": schema.categories,
        "text columns": schema.texts,
        "hash bits": schema.hash_bits,
        "columns": schema.columns,
        "classes": trained.classes,
        "loss": trained.loss,
        "batch size": trained.batch_size,
        "chunk rows": trained.chunk_rows,
        "penalty": trained.penalty,
        "alpha": trained.alpha,
        "l1 ratio": trained.l1_ratio,
    }


def check_alike(paths: Sequence[Path], models: Sequence[Trained]) -> None:
    """Raise UserError unless all models share columns, classes, loss and settings."""
    first = settings_of(models[0])
    for path, trained in zip(paths[1:], models[1:], strict=True):
        for name, value in settings_of(trained).items():
            if value != first[name]:
                raise UserError(
                    f"{path} cannot be merged with {paths[0]}, its {name} differ: "
                    f"{value!s:.60} instead of {first[name]!s:.60}"
                )


def mean_of_missing(models: Sequence[Trained], base: Trained | None) -> list[float]:
    """Return the replacements of missing numbers: means of those of the models, weighted by their rows."""
    before = 0 if base is None else base.model.progress[ROWS]
    rows = np.array([trained.model.progress[ROWS] - before for trained in models], float)
    means = np.array([trained.schema.means for trained in models])
    if (means == means[0]).all() or rows.sum() == 0:
        return models[0].schema.means
    return [float(mean) for mean in rows / rows.sum() @ means]


def merge(models: Sequence[Trained], base: Trained | None = None) -> Trained:
    """Return one model from several. `vsgd fit --resume` continues after its last pass."""
    merged = merge_models([trained.model for trained in models], None if base is None else base.model)
    return models[0]._replace(
        model=merged,
        schema=models[0].schema._replace(means=mean_of_missing(models, base)),
        passes=max(trained.passes for trained in models),
        rows=sum(trained.rows for trained in models),
    )
