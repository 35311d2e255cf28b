"""Spark on two local threads gives bit-for-bit the model of a local merge. Requires Java and pyspark."""

from __future__ import annotations

import os
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes

from vsgd.sklearn import VSGDClassifier, VSGDRegressor, fit_parts

pytest.importorskip("pyspark")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java: apt-get install default-jre-headless"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        session = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.network.timeout", "120s")
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


def parts_of(frame, target):
    """Return the partitions of Spark."""
    found = frame.rdd.glom().collect()
    frames = [pd.DataFrame([row.asDict() for row in rows], columns=frame.columns) for rows in found if rows]
    return [(part.drop(columns=target), part[target].to_numpy()) for part in frames]


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.model_, b.model_, strict=True))


def test_a_classifier_equals_the_local_merge(spark):
    frame = load_breast_cancer(as_frame=True).frame
    distributed = spark.createDataFrame(frame).repartition(3).cache()
    from vsgd.integrations.spark import fit

    found = fit(VSGDClassifier(random_state=0), distributed, target="target", rounds=2)
    assert same(found, fit_parts(VSGDClassifier(random_state=0), parts_of(distributed, "target"), rounds=2))
    assert found.score(frame.drop(columns="target"), frame["target"]) > 0.85


def test_regressor_equals_the_local_merge_and_continues(spark):
    frame = load_diabetes(as_frame=True).frame
    distributed = spark.createDataFrame(frame).repartition(2).cache()
    from vsgd.integrations.spark import fit

    found = fit(VSGDRegressor(random_state=0), distributed, target="target", rounds=1)
    local = fit_parts(VSGDRegressor(random_state=0), parts_of(distributed, "target"), rounds=1)
    assert same(found, local)
    again = fit(found, distributed, target="target", rounds=1)
    assert same(again, fit_parts(local, parts_of(distributed, "target"), rounds=1))
    with pytest.raises(ValueError, match="no column 'goal'"):
        fit(VSGDRegressor(), distributed, target="goal")
