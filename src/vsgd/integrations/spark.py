"""Linear models on a Spark cluster: every partition of a data frame is learned from where it is, and models are merged.

    from vsgd.integrations.spark import fit

    model = fit(VSGDClassifier(), frame.cache(), target="clicked")

Each round is a pass over the data by `mapInPandas`. A model travels to the executors and one per partition comes back.
The result is that of `vsgd.sklearn.fit_parts` on the same partitions, to the bit.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
from pyspark import TaskContext

from vsgd.sklearn.merging import fit_rounds


def run_on_partition(
    function: Callable[[int, Any, Any], Any], target: str, batches: Iterable[pd.DataFrame]
) -> Iterator[pd.DataFrame]:
    """What an executor does with the batches of a partition: one row, its number and what the function returned."""
    frames = list(batches)
    if frames:
        frame = pd.concat(frames, ignore_index=True)
        context: Any = TaskContext.get()
        number = context.partitionId()
        result = function(number, frame.drop(columns=target), frame[target].to_numpy())
        yield pd.DataFrame({"number": [number], "result": [pickle.dumps(result)]})


def fit(estimator: Any, frame: Any, *, target: str, rounds: int = 3, classes: Any = None) -> Any:
    """A fitted copy of a `VSGDClassifier` or `VSGDRegressor`; one that is fitted already goes on from there.

    Args:
        frame: a Spark data frame of numbers, and the target. It is read once a round, so cache it. A partition is a
            part and must fit into the memory of its executor.
        target: name of the column to predict.
        rounds: passes over the data.
        classes: all labels. Without them, one more pass over the data collects them.
    """
    if target not in frame.columns:
        raise ValueError(f"the data frame has no column {target!r}; its columns are {frame.columns}")

    def each_part(function: Callable[[int, Any, Any], Any]) -> Sequence[Any]:
        def learn(batches: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
            return run_on_partition(function, target, batches)

        found = frame.mapInPandas(learn, schema="number long, result binary").collect()
        return [pickle.loads(row.result) for row in sorted(found, key=lambda row: row.number)]

    return fit_rounds(estimator, each_part, rounds=rounds, classes=classes)
