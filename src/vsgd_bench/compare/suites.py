"""Which methods run on which workloads."""

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
    """Of the file of its runs, and of the folder of its pages."""
    workloads: tuple[Workload, ...]
    methods: tuple[Method, ...]
    seeds: int
    """Unless the command line says otherwise."""
    shared: tuple[str, ...] = ()
    """Suites whose runs this one uses as well."""


CORE = (DEFAULT, ADAMW_COSINE, SOAP_COSINE, MUON_COSINE, SCHEDULE_FREE_WARM_UP, PRODIGY_COSINE, COCOB)
"""The methods of every suite."""

SMALL = Suite("small", WORKLOADS, (DEFAULT, AS_PUBLISHED, *OPPONENTS), 5)
LARGE = Suite("large", LARGE_WORKLOADS, CORE, 5)
UNSEEN = Suite("unseen", UNSEEN_WORKLOADS, CORE, 3)
SCIENCE = Suite("science", SCIENCE_WORKLOADS, (*CORE, *AT_DEFAULTS, LBFGS), 3)

ABLATION = Suite("ablations", WORKLOADS, ABLATIONS, 3, shared=("small",))


def stress_suite() -> Suite:
    return Suite("stress", stress_workloads(), (DEFAULT,), 2)


QUICK_METHODS = ("vsgd", "vsgd-paper", "adamw-cosine", "prodigy", "schedulefree-adamw", "dog")
QUICK_SHARE = 3
"""Quick runs have this many times fewer epochs."""


def quick() -> Suite:
    """The workloads whose data come with scikit-learn, shortened; few methods, and no weight decay to tune."""
    workloads = [w._replace(epochs=max(1, w.epochs // QUICK_SHARE)) for w in WORKLOADS if not w.files]
    methods = [method for method in SMALL.methods if method.name in QUICK_METHODS]
    return Suite("quick", tuple(workloads), tuple(methods), 2)
