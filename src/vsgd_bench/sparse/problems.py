"""The problems of the comparison, and the losses of predictions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, log_softmax

from vsgd_bench.sparse.data import Split, adult, newsgroups, split_of, table


class Problem(NamedTuple):
    name: str
    load: Callable[[int], Split]
    """Returns the split of a seed."""
    judge: Callable[[Any, Any], float]
    """Returns the held-out loss of margins and targets."""
    regression: bool = False
    many_classes: bool = False
    """Whether the loss is that of class probabilities, not of binary problems."""
    scaled: bool = False
    fixed_split: bool = False


def log_loss(margins: Any, y: Any) -> float:
    return float(np.mean(np.logaddexp(0, -margins * np.where(y > 0, 1, -1))))


def one_vs_rest_loss(margins: Any, y: Any) -> float:
    """Return the mean log loss of the binary problems, one per class."""
    return log_loss(margins, np.arange(margins.shape[1]) == y[:, None])


def softmax_loss(margins: Any, y: Any) -> float:
    return float(-np.mean(log_softmax(margins, axis=1)[np.arange(len(y)), y]))


def shares_loss(margins: Any, y: Any) -> float:
    """Return the log loss of one-vs-rest probabilities, normalized to a sum of 1."""
    shares = np.clip(expit(margins), 1e-300, None)
    return float(-np.mean(np.log((shares / shares.sum(axis=1, keepdims=True))[np.arange(len(y)), y])))


def class_loss(margins: Any, y: Any) -> float:
    """Return the lower of the softmax loss and the one-vs-rest loss, since margins may be of either kind."""
    return min(softmax_loss(margins, y), shares_loss(margins, y))


def squared_error(predicted: Any, y: Any) -> float:
    return float(np.mean((predicted - y) ** 2))


def problems() -> list[Problem]:
    found = []
    for tfidf, features in ((True, "tf-idf"), (False, "counts")):
        load = functools.partial(lambda seed, tfidf: newsgroups(tfidf), tfidf=tfidf)
        for kind, judge in (("ovr", one_vs_rest_loss), ("class probabilities", class_loss)):
            name = f"20 Newsgroups, {features}, {kind}"
            found.append(Problem(name, load, judge, many_classes=judge is class_loss, scaled=True, fixed_split=True))
    housing = functools.partial(table, "california-housing.csv.gz")
    for scaled, units in ((False, "unscaled"), (True, "scaled")):
        of_adult = functools.partial(split_of, adult, scaled=scaled)
        of_housing = functools.partial(split_of, housing, scaled=scaled)
        found.append(Problem(f"Adult, {units}", of_adult, log_loss, scaled=scaled))
        found.append(Problem(f"California housing, {units}", of_housing, squared_error, True, scaled=scaled))
    return found
