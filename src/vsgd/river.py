"""A classifier with river's interface: one sample at a time, features by name. river itself is not needed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from vsgd.errors import needs_extra

with needs_extra("vsgd.river", "sklearn"):
    import numpy as np
    from scipy import sparse

    from vsgd.sklearn import VSGDClassifier


class LogisticRegression:
    """Classify a stream into two classes. Features are dictionaries, and new names may appear at any time.

    Args:
        columns: maximum number of feature names. Further names share the last column.
        seed: seed of the probes.

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

    def _row(self, x: dict[Hashable, float]) -> tuple[Any, dict[Hashable, int]]:
        """Return a row, and the columns of its new names: the next free ones, or the last if none is free."""
        new: dict[Hashable, int] = {}
        for name in x:
            if name not in self.column_of:
                new[name] = min(len(self.column_of) + len(new), self.columns - 1)
        columns = [new[name] if name in new else self.column_of[name] for name in x]
        values = np.array([float(value) for value in x.values()])
        row = sparse.csr_matrix((values, np.array(columns, np.int32), [0, len(columns)]), shape=(1, self.columns))
        row.sum_duplicates()
        return row, new

    def learn_one(self, x: dict[Hashable, float], y: bool) -> None:
        """Learn from one sample.

        Args:
            x: the features by name. Missing names are zero.
            y: the class.

        Raises:
            ValueError: if `y` is not a boolean or a value is not finite. The model is then unchanged.
        """
        if y not in (False, True):
            raise ValueError(f"y={y!r} is not True or False")
        row, new = self._row(x)
        self.model.partial_fit(row, [bool(y)], classes=[False, True])
        self.column_of.update(new)

    def predict_proba_one(self, x: dict[Hashable, float]) -> dict[bool, float]:
        """Return the probability of each class; 0.5 before the first sample."""
        if not hasattr(self.model, "coef_"):
            return {False: 0.5, True: 0.5}
        row, _ = self._row(x)
        below, above = self.model.predict_proba(row)[0].tolist()
        return {False: below, True: above}

    def predict_one(self, x: dict[Hashable, float]) -> bool:
        """Return the more likely class."""
        return self.predict_proba_one(x)[True] > 0.5
