"""Small workloads and odd optimizers for the tests of `vsgd compare`: importable by the processes it starts."""

from __future__ import annotations

import os

from torch import nn
from torch.nn import functional as F

from vsgd.bench.compare import data, networks, suites
from vsgd.bench.compare.methods import Method
from vsgd.bench.compare.workloads import Task, Workload


def small(seed, sparse):
    x, y = data.digits()
    return Task(networks.mlp(64, 10), data.shuffled(x[:300], y[:300], seed), F.cross_entropy)


def small_normalized(seed, sparse):
    x, y = data.digits()
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    return Task(model, data.shuffled(x[:300], y[:300], seed), F.cross_entropy)


def crashing(model, setting, updates):
    raise ValueError("no such luck\nsecond line")


def deadly(model, setting, updates):
    os._exit(3)


SMALL = Workload("small", "Small digits", small, 16, 1)
NORMALIZED = Workload("normalized", "Small digits, BatchNorm", small_normalized, 16, 1)
STREAM = Workload("stream", "A stream", small, 2, 1, online=True)
ABSENT = Workload("absent", "Absent data", small, 16, 1, files=("nowhere/to-be.found",))

BY_NAME = {method.name: method for method in suites.SMALL.methods}
GRID = BY_NAME["sgd"]._replace(settings=(0.001, 0.1))
ADAM = BY_NAME["adam-default"]
CRASH = Method("crash", "Crash", crashing, "raises")
DEATH = Method("death", "Death", deadly, "takes its process with it")
UNINSTALLED = Method("uninstalled", "Uninstalled", crashing, "", package="no-such-package", module="no_such_module")
