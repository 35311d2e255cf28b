"""Small workloads, data and optimizers for the tests of `vsgd compare`. Its worker processes import this module."""

from __future__ import annotations

import gzip
import os
import string
from functools import partial

import numpy as np
from torch import nn
from torch.nn import functional as F

from vsgd_bench.compare import data, networks, suites
from vsgd_bench.compare.methods import RATES, Method
from vsgd_bench.compare.opponents import from_package
from vsgd_bench.compare.workloads import Task, Workload


def small(seed, sparse):
    x, y = data.digits()
    return Task(networks.mlp(64, 10), data.shuffled(x[:300], y[:300], seed), F.cross_entropy)


def small_normalized(seed, sparse):
    x, y = data.digits()
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    return Task(model, data.shuffled(x[:300], y[:300], seed), F.cross_entropy)


def crashing(model, setting, budget):
    raise ValueError("no such luck\nsecond line")


def deadly(model, setting, budget):
    os._exit(3)


SMALL = Workload("small", "Small digits", small, 16, 1)
NORMALIZED = Workload("normalized", "Small digits, BatchNorm", small_normalized, 16, 1)
STREAM = Workload("stream", "A stream", small, 2, 1, online=True)
ABSENT = Workload("absent", "Absent data", small, 16, 1, files=("nowhere/to-be.found",))

FINE_TUNED = SMALL._replace(name="fine-tuned", pretraining=SMALL._replace(name="pretraining", epochs=5))

BY_NAME = {method.name: method for method in suites.SMALL.methods}
GRID = BY_NAME["sgd"]._replace(rates=RATES[10:13])
ADAM = Method("adam-default", "Adam 1e-3", partial(from_package, "torch.optim", "Adam"), "its default")
CRASH = Method("crash", "Crash", crashing, "raises")
DEATH = Method("death", "Death", deadly, "takes its process with it")
UNINSTALLED = Method("uninstalled", "Uninstalled", crashing, "", package="no-such-package", module="no_such_module")


def write_data(folder):
    """Write small files in the formats of the data of the large suite."""
    rng = np.random.default_rng(0)
    files = {}
    for part, rows in (("train", 200), ("t10k", 50)):
        images, labels = rng.integers(256, size=(rows, 28, 28)), rng.integers(10, size=rows)
        files[f"fashion-mnist/{part}-images-idx3-ubyte.gz"] = bytes(16) + images.astype(np.uint8).tobytes()
        files[f"fashion-mnist/{part}-labels-idx1-ubyte.gz"] = bytes(8) + labels.astype(np.uint8).tobytes()
    files["shakespeare.txt.gz"] = 60 * (string.ascii_letters + ".\n ").encode()
    for part in ("train", "test"):
        files[f"20newsgroups/{part}.tsv.gz"] = 60 * b"rec.autos\tthe quick brown fox jumps over the lazy dog\n"
    people = [f"{30 + k % 20},Private,{k % 3 - 1},{'<=>'[k % 2 * 2]}50K" for k in range(200)]
    files["adult.csv.gz"] = "\n".join(["age,workclass,score,income", *people]).encode()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(gzip.compress(content))
