"""A Dask cluster of two processes gives the model of a local merge, to the bit."""

from __future__ import annotations

import dask
import dask.bag
import dask.dataframe
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from scipy import sparse
from sklearn.datasets import load_diabetes

from vsgd.integrations.dask import fit
from vsgd.sklearn import VSGDClassifier, VSGDRegressor, fit_parts


@pytest.fixture(scope="module")
def client():
    options = {"dashboard_address": None, "host": "127.0.0.1", "silence_logs": 50}
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "300s", "distributed.scheduler.worker-ttl": None}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, **options) as cluster,
        Client(cluster, timeout="300s") as client,
    ):
        yield client


def blocks():
    """Return sparse blocks of three classes, sorted by class, so that no part has all classes."""
    rng = np.random.default_rng(0)
    y = np.sort(rng.integers(0, 3, 240))
    X = sparse.random(240, 20, density=0.3, random_state=0, format="csr")
    X = sparse.csr_matrix(X + sparse.csr_matrix((np.ones(240), (np.arange(240), y)), shape=X.shape))
    return [(X[i : i + 60], np.array(["a", "b", "c"])[y[i : i + 60]]) for i in range(0, 240, 60)]


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.model_, b.model_, strict=True))


def test_delayed_blocks_and_a_bag_of_them(client):
    local = fit_parts(VSGDClassifier(random_state=0), blocks())
    assert np.mean([local.score(X, y) for X, y in blocks()]) > 0.9
    delayed = [dask.delayed(block) for block in blocks()]
    assert same(local, fit(VSGDClassifier(random_state=0), delayed, client=client))
    bag = dask.bag.from_sequence(blocks(), npartitions=4)
    assert same(local, fit(VSGDClassifier(random_state=0), bag, classes=["a", "b", "c"], client=client))


def test_a_data_frame(client):
    X, y = load_diabetes(return_X_y=True, as_frame=True)
    frame = pd.concat([X, y], axis=1)
    parts = [(X[:200], y[:200]), (X[200:300], y[200:300]), (X[300:], y[300:])]
    local = fit_parts(VSGDRegressor(random_state=0), parts, rounds=2)
    distributed = dask.dataframe.from_pandas(frame, npartitions=1).repartition(divisions=[0, 200, 300, 441])
    found = fit(VSGDRegressor(random_state=0), distributed, target="target", rounds=2, client=client)
    assert same(local, found)
    assert list(found.feature_names_in_) == list(X.columns)
    with pytest.raises(ValueError, match="no column 'goal'"):
        fit(VSGDRegressor(), distributed, target="goal", client=client)


def test_an_error_of_a_worker_is_raised_here(client):
    X, y = blocks()[0]
    parts = [dask.delayed((X, y)), dask.delayed((X[:, :5], y))]
    with pytest.raises(ValueError, match="number of features differ"):
        fit(VSGDClassifier(), parts, classes=["a", "b", "c"], client=client)
    with pytest.raises(ValueError, match="classes that were not announced"):
        fit(VSGDClassifier(), [dask.delayed((X, y))], classes=["b", "c"], client=client)
