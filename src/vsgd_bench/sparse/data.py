"""The data sets of the comparison."""

from __future__ import annotations

import csv
import functools
import gzip
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from vsgd_bench.datasets import locate


class Split(NamedTuple):
    """Training rows and held-out rows."""

    X: Any
    y: Any
    X_test: Any
    y_test: Any
    fixed: bool = False
    """Whether it is the same for every seed. It is then cached in memory."""


def open_text(name: str) -> Any:
    return gzip.open(locate(name), "rt")


@functools.cache
def newsgroups(tfidf: bool) -> Split:
    """Return Usenet posts by group, as word counts or tf-idf, with the published split."""
    texts, labels = [], []
    for part in ("train", "test"):
        lines = [line.rstrip("\n").partition("\t") for line in open_text(f"20newsgroups/{part}.tsv.gz")]
        labels.append([label for label, _, _ in lines])
        texts.append([text for _, _, text in lines])
    words = CountVectorizer(dtype=np.float64)
    X, X_test = words.fit_transform(texts[0]), words.transform(texts[1])
    if tfidf:
        weights = TfidfTransformer().fit(X)
        X, X_test = weights.transform(X), weights.transform(X_test)
    groups, y = np.unique(labels[0], return_inverse=True)
    return Split(X, y, X_test, np.searchsorted(groups, labels[1]), fixed=True)


@functools.cache
def adult() -> tuple[Any, Any]:
    """Return census data and whether a person earns more than 50,000 $. Numbers are unscaled, categories one-hot."""
    people = list(csv.DictReader(open_text("adult.csv.gz")))
    numbers = ["age", "fnlwgt", "educational-num", "capital-gain", "capital-loss", "hours-per-week"]
    categories = [name for name in people[0] if name not in [*numbers, "income"]]
    numeric = sparse.csr_matrix(np.array([[float(p[name]) for name in numbers] for p in people]))
    one_hot = OneHotEncoder().fit_transform(np.array([[p[name] for name in categories] for p in people]))
    return sparse.hstack([numeric, one_hot]).tocsr(), np.array([p["income"].strip() == ">50K" for p in people]) * 1


def table(name: str) -> tuple[Any, Any]:
    """Return the columns of a CSV file of numbers; the last one is the target."""
    values = np.loadtxt(open_text(name), delimiter=",", skiprows=1)
    return values[:, :-1], values[:, -1]


def split_of(load: Callable[[], tuple[Any, Any]], seed: int, scaled: bool) -> Split:
    X, y = load()
    X, X_test, y, y_test = train_test_split(X, y, random_state=seed)
    if scaled:
        scaler = StandardScaler(with_mean=not sparse.issparse(X)).fit(X)
        X, X_test = scaler.transform(X), scaler.transform(X_test)
    return Split(X, y, X_test, y_test)
