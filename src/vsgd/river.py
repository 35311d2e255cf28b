"""The method behind river's interface: one sample at a time, features by name. river itself is not needed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from scipy import sparse

from vsgd.sklearn import VSGDClassifier


class LogisticRegression:
    """Binary classification of a stream; features are dictionaries, and may appear when they like.

    >>> model = LogisticRegression()
    >>> for i in range(200):
    ...     model.learn_one({"x": float(i % 7 - 3)}, i % 7 > 3)
    >>> model.predict_one({"x": 2.0}), model.predict_one({"x": -2.0})
    (True, False)
    """

    def __init__(self, columns: int = 2**10, seed: int | None = None):
        self.columns = columns
        self.model = VSGDClassifier(batch_size=1, random_state=seed)
        self.column_of: dict[Hashable, int] = {}

    def _row(self, x: dict[Hashable, float]) -> Any:
        """A new name takes the next column; once there are none left, it shares the last."""
        columns = [self.column_of.setdefault(name, min(len(self.column_of), self.columns - 1)) for name in x]
        values = np.array(list(x.values()), float)
        row = sparse.csr_matrix((values, np.array(columns, np.int32), [0, len(columns)]), shape=(1, self.columns))
        row.sum_duplicates()
        return row

    def learn_one(self, x: dict[Hashable, float], y: bool) -> None:
        self.model.partial_fit(self._row(x), [bool(y)], classes=[False, True])

    def predict_proba_one(self, x: dict[Hashable, float]) -> dict[bool, float]:
        if not hasattr(self.model, "coef_"):
            return {False: 0.5, True: 0.5}
        below, above = self.model.predict_proba(self._row(x))[0].tolist()
        return {False: below, True: above}

    def predict_one(self, x: dict[Hashable, float]) -> bool:
        return self.predict_proba_one(x)[True] > 0.5
