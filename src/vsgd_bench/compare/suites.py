"""Which methods run on which workloads."""

from __future__ import annotations

from typing import NamedTuple

from vsgd_bench.compare.large import LARGE_WORKLOADS
from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.opponents import (
    ADAMW_COSINE,
    COCOB,
    HALF_DECADES,
    MUON_COSINE,
    OPPONENTS,
    PRODIGY_COSINE,
    SCHEDULE_FREE_WARM_UP,
    SOAP_COSINE,
)
from vsgd_bench.compare.ours import AS_PUBLISHED, DEFAULT
from vsgd_bench.compare.unseen import UNSEEN_WORKLOADS
from vsgd_bench.compare.workloads import WORKLOADS, Workload


class Suite(NamedTuple):
    workloads: tuple[Workload, ...]
    methods: tuple[Method, ...]
    seeds: int
    """Unless told."""


SMALL = Suite(WORKLOADS, (DEFAULT, AS_PUBLISHED, *OPPONENTS), 5)

LARGE_RATES = HALF_DECADES[1:5]
LARGE = Suite(
    LARGE_WORKLOADS,
    (
        DEFAULT,
        *(method._replace(settings=LARGE_RATES) for method in (ADAMW_COSINE, SOAP_COSINE, MUON_COSINE)),
        SCHEDULE_FREE_WARM_UP,
        PRODIGY_COSINE,
        COCOB,
    ),
    3,
)

UNSEEN = Suite(
    UNSEEN_WORKLOADS,
    (DEFAULT, ADAMW_COSINE, SOAP_COSINE, MUON_COSINE, SCHEDULE_FREE_WARM_UP, PRODIGY_COSINE, COCOB),
    3,
)

QUICK_METHODS = ("vsgd", "vsgd-paper", "sgd", "adamw-cosine", "adam-default", "prodigy", "schedulefree-adamw", "dog")
QUICK_SHARE = 3
"""Quick runs have so many times fewer epochs."""


def quick() -> Suite:
    """The workloads whose data come with scikit-learn, shortened; few methods."""
    workloads = [w._replace(epochs=max(1, w.epochs // QUICK_SHARE)) for w in WORKLOADS if not w.files]
    return Suite(tuple(workloads), tuple(method for method in SMALL.methods if method.name in QUICK_METHODS), 2)
