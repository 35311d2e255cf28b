"""One linear model trained by threads without locks, against one thread: rows a second and held-out loss, in turns.

Timed are the passes, as `fit` makes them. VSGD_DATA names the folder of the data sets.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

import numpy as np

from vsgd.algorithms.columns import COLUMNS
from vsgd.bench.sparse.data import Split, adult, newsgroups, split_of
from vsgd.bench.sparse.problems import log_loss
from vsgd.linear import Task, Training, as_rows, new_model, train_on
from vsgd.linear.losses import LOG
from vsgd.linear.model import THETA


def data_sets() -> Iterator[tuple[str, Split, np.ndarray, np.ndarray]]:
    """Name, data, and which rows and test rows are of the class to find."""
    for name, tfidf in (("tf-idf", True), ("counts", False)):
        data = newsgroups(tfidf)
        yield f"20 Newsgroups, {name}", data, data.y == 0, data.y_test == 0
    data = split_of(adult, 0, scaled=False)
    yield "Adult", data, data.y > 0, data.y_test > 0


def measure(data: Split, y: np.ndarray, y_test: np.ndarray, training: Training, passes: int, seed: int) -> np.ndarray:
    """Seconds of all passes, and the held-out loss after them."""
    rows, targets, weights = as_rows(data.X), np.where(y, 1.0, -1.0), np.ones(len(y))
    model = new_model(data.X.shape[1] + 1, 1, training.task, COLUMNS, seed)
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(y)) for _ in range(passes)]
    start = time.perf_counter()
    for order in orders:
        train_on(model, rows, order, targets, weights, training)
    seconds = time.perf_counter() - start
    theta = model.table[:, THETA, 0]
    return np.array([seconds, log_loss(data.X_test @ theta[:-1] + theta[-1], y_test)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    if "VSGD_DATA" not in os.environ:
        print("hogwild: set VSGD_DATA to the folder of the data sets")
        return
    print(f"| one class against the rest, {arguments.threads} threads | rows a second: times | best | held-out loss |")
    print("|---|---|---|---|")
    for name, data, y, y_test in data_sets():
        for batch_size in (1, 16):
            ways = [Training(Task(LOG), COLUMNS, batch_size, n, hogwild=True) for n in (1, arguments.threads)]
            for way in ways:
                measure(data, y, y_test, way, 1, 0)
            runs = np.array(
                [
                    [measure(data, y, y_test, way, arguments.passes, seed) for way in ways]
                    for seed in range(arguments.times)
                ]
            )
            (one, many), losses = runs[:, :, 0].T, runs[:, :, 1].mean(axis=0)
            print(
                f"| {name}, batch_size={batch_size} | {np.median(one / many):.2f} | {one.min() / many.min():.2f} "
                f"| {100 * (losses[1] / losses[0] - 1):+.1f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
