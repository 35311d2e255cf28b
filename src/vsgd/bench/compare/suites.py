"""Which methods run on which workloads."""

from __future__ import annotations

from typing import NamedTuple

from vsgd.bench.compare.methods import Method
from vsgd.bench.compare.opponents import OPPONENTS
from vsgd.bench.compare.ours import AS_PUBLISHED, DEFAULT
from vsgd.bench.compare.workloads import WORKLOADS, Workload


class Suite(NamedTuple):
    workloads: tuple[Workload, ...]
    methods: tuple[Method, ...]
    seeds: int
    """Unless told."""


SMALL = Suite(WORKLOADS, (DEFAULT, AS_PUBLISHED, *OPPONENTS), 5)

QUICK_METHODS = ("vsgd", "vsgd-paper", "sgd", "adamw-cosine", "adam-default", "prodigy", "schedulefree-adamw", "dog")
QUICK_SHARE = 3
"""Quick runs have so many times fewer epochs."""


def quick() -> Suite:
    """The workloads whose data come with scikit-learn, shortened; few methods."""
    workloads = [w._replace(epochs=max(1, w.epochs // QUICK_SHARE)) for w in WORKLOADS if not w.files]
    return Suite(tuple(workloads), tuple(method for method in SMALL.methods if method.name in QUICK_METHODS), 2)
