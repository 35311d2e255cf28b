"""The suites: which methods run on which workloads."""

from __future__ import annotations

from typing import NamedTuple

from vsgd_bench.compare.large import LARGE_WORKLOADS
from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.opponents import (
    ADAMW_COSINE,
    AT_DEFAULTS,
    COCOB,
    LBFGS,
    MUON_COSINE,
    OPPONENTS,
    PRODIGY_COSINE,
    SCHEDULE_FREE_WARM_UP,
    SOAP_COSINE,
)
from vsgd_bench.compare.ours import ABLATIONS, AS_PUBLISHED, DEFAULT
from vsgd_bench.compare.science import SCIENCE_WORKLOADS
from vsgd_bench.compare.stress import stress_workloads
from vsgd_bench.compare.unseen import UNSEEN_WORKLOADS
from vsgd_bench.compare.workloads import WORKLOADS, Workload


class Suite(NamedTuple):
    name: str
    """Name of the file of its runs, and of the folder of its pages."""
    workloads: tuple[Workload, ...]
    methods: tuple[Method, ...]
    seeds: int
    """Default number of seeds."""
    shared: tuple[str, ...] = ()
    """Other suites whose runs this suite uses."""


CORE = (DEFAULT, ADAMW_COSINE, SOAP_COSINE, MUON_COSINE, SCHEDULE_FREE_WARM_UP, PRODIGY_COSINE, COCOB)
"""The methods of every suite."""

SMALL = Suite("small", WORKLOADS, (DEFAULT, AS_PUBLISHED, *OPPONENTS), 5)
LARGE = Suite("large", LARGE_WORKLOADS, CORE, 5)
UNSEEN = Suite("unseen", UNSEEN_WORKLOADS, CORE, 3)
SCIENCE = Suite("science", SCIENCE_WORKLOADS, (*CORE, *AT_DEFAULTS, LBFGS), 3)

ABLATION = Suite(
    "ablations",
    (*WORKLOADS, *UNSEEN_WORKLOADS, *SCIENCE_WORKLOADS),
    ABLATIONS,
    3,
    shared=("small", "unseen", "science"),
)


def stress_suite() -> Suite:
    return Suite("stress", stress_workloads(), (DEFAULT,), 2)


QUICK_METHODS = ("vsgd", "vsgd-paper", "adamw-cosine", "prodigy", "schedulefree-adamw", "dog")
QUICK_SHARE = 3
"""The number of epochs is divided by this in quick runs."""


def quick() -> Suite:
    """Return a suite of short runs on workloads without data files, with few methods and without tuned weight decay."""
    workloads = [w._replace(epochs=max(1, w.epochs // QUICK_SHARE)) for w in WORKLOADS if not w.files]
    methods = [method for method in SMALL.methods if method.name in QUICK_METHODS]
    return Suite("quick", tuple(workloads), tuple(methods), 2)
