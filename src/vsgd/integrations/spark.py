"""Linear models on a Spark cluster: every executor trains on its partitions, and the models are merged.

    from vsgd.integrations.spark import fit

    model = fit(VSGDClassifier(), frame.cache(), target="clicked")

Each round is a pass over the data by `mapInPandas`. It sends a model to the executors and receives one per partition.
The result is bit-for-bit that of `vsgd.sklearn.fit_parts` on the same partitions.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
from numpy.typing import ArrayLike
from pyspark import TaskContext
from pyspark.sql import DataFrame

from vsgd.sklearn.merging import Estimator, fit_rounds


def run_on_partition(
    function: Callable[[int, Any, Any], Any], target: str, batches: Iterable[pd.DataFrame]
) -> Iterator[pd.DataFrame]:
    """Call the function on a partition, and yield one row: its number and the pickled result. Runs on an executor."""
    frames = list(batches)
    if frames:
        frame = pd.concat(frames, ignore_index=True)
        context: Any = TaskContext.get()
        number = context.partitionId()
        result = function(number, frame.drop(columns=target), frame[target].to_numpy())
        yield pd.DataFrame({"number": [number], "result": [pickle.dumps(result)]})


def fit(
    estimator: Estimator, frame: DataFrame, *, target: str, rounds: int = 3, classes: ArrayLike | None = None
) -> Estimator:
    """Train a linear model on the partitions of a Spark data frame.

        model = fit(VSGDClassifier(), frame.cache(), target="clicked")

    Args:
        estimator: a `VSGDClassifier` or `VSGDRegressor`. If it is fitted, training continues from there.
        frame: a Spark data frame of numbers and the target. It is read once per round, so cache it. Each partition
            must fit into the memory of its executor.
        target: name of the column to predict.
        rounds: number of passes over the data.
        classes: all labels. Without them, one more pass over the data collects them.

    Returns:
        A fitted copy of the estimator.

    Raises:
        ValueError: if the data frame has no column `target`, or no rows.
    """
    if target not in frame.columns:
        raise ValueError(f"the data frame has no column {target!r}; its columns are {frame.columns}")

    def each_part(function: Callable[[int, Any, Any], Any]) -> Sequence[Any]:
        def learn(batches: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
            return run_on_partition(function, target, batches)

        found = frame.mapInPandas(learn, schema="number long, result binary").collect()
        return [pickle.loads(row.result) for row in sorted(found, key=lambda row: row.number)]

    return fit_rounds(estimator, each_part, rounds=rounds, classes=classes)
