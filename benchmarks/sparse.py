"""Measure the speed of the kernel for sparse data.

It compares an epoch of `VSGDClassifier` with one of `SGDClassifier`, and prints the time per non-zero element by data
size. Text is 20 Newsgroups if VSGD_DATA names the folder of the data sets, and synthetic otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
from scipy import sparse
from sklearn.linear_model import SGDClassifier

from vsgd.sklearn import VSGDClassifier

WORDS_PER_ROW = 100


def power_law(nonzeros: int, columns: int = 100_000, seed: int = 0) -> sparse.csr_matrix:
    """Return rows of a hundred words. The frequency of the k-th word is proportional to 1/k."""
    rng = np.random.default_rng(seed)
    rows = nonzeros // WORDS_PER_ROW
    indices = (columns ** rng.random(rows * WORDS_PER_ROW)).astype(np.int32) - 1
    indptr = np.arange(rows + 1) * WORDS_PER_ROW
    matrix = sparse.csr_matrix((np.ones(len(indices)), indices, indptr), shape=(rows, columns))
    matrix.sum_duplicates()
    return matrix


def seconds(run: Callable[[], object], times: int, clock: Callable[[], float] = time.process_time) -> float:
    """Return the minimum time of several calls, since other load only adds time. The default is processor time."""
    best = float("inf")
    for _ in range(times):
        start = clock()
        run()
        best = min(best, clock() - start)
    return best


def epochs_of(fits: list[Callable[[int], object]], times: int, few: int = 5) -> list[float]:
    """Return the seconds per epoch of each model. Models alternate, since other load on the machine varies.

    The time is a difference between fits with many and few epochs, so that it excludes work done once per fit.
    """
    best = np.full((len(fits), 2), np.inf)
    for _ in range(times):
        for i, fit in enumerate(fits):
            for j, epochs in enumerate((few, 3 * few)):
                best[i, j] = min(best[i, j], seconds(lambda fit=fit, epochs=epochs: fit(epochs), 1))
    return list((best[:, 1] - best[:, 0]) / (2 * few))


def thread_ratio(X: sparse.csr_matrix, y: np.ndarray, batch_size: int, times: int) -> float:
    """Return the speedup of four epochs by two threads."""

    def fit(jobs: int) -> None:
        VSGDClassifier(max_iter=4, tol=None, batch_size=batch_size, n_jobs=jobs, random_state=0).fit(X, y)

    fit(2)
    one, two = (seconds(lambda jobs=jobs: fit(jobs), times, time.perf_counter) for jobs in (1, 2))
    return one / two


def text() -> tuple[str, sparse.csr_matrix, np.ndarray]:
    if "VSGD_DATA" in os.environ:
        from vsgd_bench.sparse.data import newsgroups

        data = newsgroups(True)
        return "20 Newsgroups tf-idf", data.X, data.y == 0
    X = power_law(1_000_000)
    return "synthetic text", X, np.asarray(X[:, :50].sum(axis=1)).ravel() % 2 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=float, default=1e6, help="maximum number of non-zero elements (default: 1e6)")
    parser.add_argument("--times", type=int, default=3, help="number of repetitions; the minimum is reported")
    arguments = parser.parse_args()

    name, X, y = text()
    start = time.perf_counter()
    VSGDClassifier(max_iter=1, tol=None).fit(X[:100], np.arange(100) % 2)
    print(f"first fit, compilation included: {time.perf_counter() - start:.1f} s")
    sizes = (1, 16, 32)
    theirs, *ours = epochs_of(
        [lambda n: SGDClassifier(loss="log_loss", max_iter=n, tol=None).fit(X, y)]
        + [lambda n, b=b: VSGDClassifier(max_iter=n, tol=None, batch_size=b).fit(X, y) for b in sizes],
        arguments.times,
    )
    for batch_size, mine in zip(sizes, ours, strict=True):
        print(
            f"{name}, batch_size={batch_size}: epoch {mine * 1e3:.1f} ms, {mine / theirs:.1f} × SGDClassifier's"
            f" {theirs * 1e3:.1f} ms"
        )
    for batch_size in (1024, 4096):
        ratio = thread_ratio(X, y, batch_size, arguments.times)
        print(f"{name}, batch_size={batch_size}: {ratio:.2f} times as fast on two threads")
    nonzeros = 10**5
    while nonzeros <= arguments.largest:
        X = power_law(nonzeros)
        y = np.arange(X.shape[0]) % 2
        (mine,) = epochs_of(
            [lambda n, X=X, y=y: VSGDClassifier(max_iter=n, tol=None).fit(X, y)],
            arguments.times,
            few=5 if nonzeros <= 10**6 else 1,
        )
        print(f"{X.nnz:.1e} non-zeros of power-law columns: {mine / X.nnz * 1e9:.0f} ns each", flush=True)
        nonzeros *= 10


if __name__ == "__main__":
    main()
