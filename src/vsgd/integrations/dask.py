"""Linear models on a Dask cluster: every worker trains on its parts of the data, and the models are merged.

    from vsgd.integrations.dask import fit

    model = fit(VSGDClassifier(), frame, target="clicked")

Each round is a pass over the data. It sends a model to the workers and receives one per part. Rows are not moved. The
result is bit-for-bit that of `vsgd.sklearn.fit_parts` on the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import distributed
import numpy as np
from dask.delayed import delayed
from numpy.typing import ArrayLike
from scipy import sparse

from vsgd.sklearn.merging import Estimator, fit_rounds


def stacked(blocks: Iterable[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the blocks of a partition as one pair (X, y)."""
    rows, targets = zip(*blocks, strict=True)
    X = sparse.vstack(rows, format="csr") if sparse.issparse(rows[0]) else np.concatenate(rows)
    return X, np.concatenate(targets)


def without(frame: Any, target: str) -> tuple[Any, Any]:
    """Return the features and the target of a partition of a data frame."""
    return frame.drop(columns=target), frame[target].to_numpy()


def parts_of(data: Any, target: str | None) -> list[Any]:
    """Return a delayed pair (X, y) for each part."""
    if target is not None:
        if target not in data.columns:
            raise ValueError(f"the data frame has no column {target!r}; its columns are {list(data.columns)}")
        return [delayed(without)(part, target) for part in data.to_delayed()]
    if hasattr(data, "to_delayed"):
        return [delayed(stacked)(part) for part in data.to_delayed()]
    return list(data)


def apply(function: Callable[[int, Any, Any], Any], number: int, part: tuple[Any, Any]) -> Any:
    """Call the function on a part. Runs on a worker."""
    return function(number, *part)


def fit(
    estimator: Estimator,
    data: Any,
    *,
    target: str | None = None,
    rounds: int = 3,
    classes: ArrayLike | None = None,
    client: distributed.Client | None = None,
) -> Estimator:
    """Train a linear model on the parts of a Dask collection.

        model = fit(VSGDClassifier(), frame, target="clicked")

    Args:
        estimator: a `VSGDClassifier` or `VSGDRegressor`. If it is fitted, training continues from there.
        data: a `dask.dataframe` that contains the target, a `dask.bag` of pairs (X, y) with X in CSR format or dense,
            or a list of `dask.delayed` pairs. Each partition is a part. All parts must fit into the memory of the
            workers.
        target: name of the column to predict, for a data frame.
        rounds: number of passes over the data.
        classes: all labels. Without them, one more pass over the targets collects them.
        client: client of the cluster; the current one by default.

    Returns:
        A fitted copy of the estimator.

    Raises:
        ValueError: if the data frame has no column `target`, or if no part has rows.
    """
    client = client or distributed.default_client()
    parts: Sequence[Any] = client.compute(parts_of(data, target))

    def each_part(function: Callable[[int, Any, Any], Any]) -> Sequence[Any]:
        task = client.scatter(function, broadcast=True, hash=False)
        return list(client.gather([client.submit(apply, task, i, part, pure=False) for i, part in enumerate(parts)]))

    return fit_rounds(estimator, each_part, rounds=rounds, classes=classes)
