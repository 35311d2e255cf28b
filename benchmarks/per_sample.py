"""Measure the cost of per-sample statistics, as ratios between methods that alternate in one process.

    python benchmarks/per_sample.py

The network is an MLP 784-1024-1024-10 with ReLU in float32. Each method returns the same sums for every coordinate: of
the gradients, of their squares, and of the absolute and squared differences between two points.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from vsgd.torch.per_sample import Recorder

REPEATS = 3
MEGABYTE = 2**20
MAX_STORED_BATCH = 128
"""Largest batch whose per-sample gradients are stored, which takes one gigabyte per 70 samples."""


class Problem:
    """A model and a minibatch. `shift` moves the weights to the second point and back."""

    def __init__(self, batch: int):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        self.x, self.y = torch.randn(batch, 784), torch.randint(10, (batch,))
        self.shifts = [0.01 * torch.randn_like(p) for p in self.model.parameters()]

    def backward(self) -> None:
        self.model.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()

    @torch.no_grad()
    def shift(self, sign: int) -> None:
        for param, shift in zip(self.model.parameters(), self.shifts, strict=True):
            param.add_(shift, alpha=sign)


def plain(problem: Problem) -> Callable[[], object]:
    """Return a function that takes one step of SGD."""
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=1e-6)

    def run() -> None:
        problem.backward()
        optimizer.step()

    return run


def recorded(problem: Problem) -> Callable[[], object]:
    """Return a function that records two gradients and computes the sums."""
    recorder = Recorder(problem.model)

    def run() -> object:
        with recorder.record() as here:
            problem.backward()
        problem.shift(1)
        with recorder.record() as there:
            problem.backward()
        problem.shift(-1)
        return recorder.sums(here, there)

    return run


def expanded_sums(here: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    diff = (here - there).abs()
    return here.sum(0), here.square().sum(0), diff.sum(0), diff.square().sum(0)


def by_vmap(problem: Problem) -> Callable[[], object]:
    """Return a function that stores the per-sample gradients of torch.func at both points."""

    def sample_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(problem.model, params, (x[None],)), y[None])

    expand = vmap(grad(sample_loss), in_dims=(None, 0, 0))

    def run() -> object:
        params = {name: p.detach() for name, p in problem.model.named_parameters()}
        here = expand(params, problem.x, problem.y)
        problem.shift(1)
        there = expand(params, problem.x, problem.y)
        problem.shift(-1)
        return {name: expanded_sums(here[name], there[name]) for name in here}

    return run


def by_opacus(problem: Problem) -> Callable[[], object]:
    """Return a function that stores the per-sample gradients of opacus at both points."""
    from opacus import GradSampleModule

    # a copy, since the hooks are not removed
    own = Problem(len(problem.x))
    module = GradSampleModule(own.model, loss_reduction="mean")

    def gradients() -> list[Tensor]:
        module.zero_grad()
        F.cross_entropy(module(own.x), own.y).backward()
        return [p.grad_sample for p in own.model.parameters()]

    def run() -> object:
        here = gradients()
        own.shift(1)
        there = gradients()
        own.shift(-1)
        return [expanded_sums(a, b) for a, b in zip(here, there, strict=True)]

    return run


WAYS = {"plain": plain, "recorded": recorded, "vmap": by_vmap, "opacus": by_opacus}


def compare(batch: int) -> None:
    """Print times. The methods alternate, so that other load on the machine affects all of them."""
    problem = Problem(batch)
    runs = {name: way(problem) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 1):
        for name, run in runs.items():
            # fast methods are repeated, so that all take a similar time
            for _ in range(7 if name in ("plain", "recorded") else 1):
                start = time.perf_counter()
                run()
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"Time of one step's statistics, batch {batch}, {torch.get_num_threads()} threads, medians, interleaved")
    print(f"  plain gradient and SGD step              {median['plain'] * 1e3:8.1f} ms")
    print(f"  two recordings and sums                  {median['recorded'] * 1e3:8.1f} ms")
    print(f"  torch.func.vmap(grad), stored            {median['vmap'] * 1e3:8.1f} ms")
    print(f"  opacus, stored                           {median['opacus'] * 1e3:8.1f} ms")
    print(f"  recorded / plain                         {median['recorded'] / median['plain']:8.2f}")
    print(f"  vmap / recorded                          {median['vmap'] / median['recorded']:8.2f}")
    print(f"  opacus / recorded                        {median['opacus'] / median['recorded']:8.2f}")


def peak(way: str, batch: int) -> None:
    """Print the peak resident memory of this process minus that of a model, its gradients and a minibatch."""
    problem = Problem(batch)
    run = WAYS[way](problem)
    run()  # the first call loads, compiles and checks
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak
    before = resident("VmRSS")
    result = run()
    print(resident("VmHWM") - before)
    del result


def resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def compare_memory() -> None:
    print("Peak resident memory above that of the model, its gradients and a minibatch, one process each, in MB")
    print("  batch   " + "".join(f"{way:>12}" for way in WAYS) + "    recorded − plain")
    for batch in (64, 128, 256, 512):
        risen = {}
        for way in WAYS:
            if way in ("plain", "recorded") or batch <= MAX_STORED_BATCH:
                command = [sys.executable, __file__, way, str(batch)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                risen[way] = int(output) / MEGABYTE
        row = "".join(f"{risen[way]:12.0f}" if way in risen else f"{'-':>12}" for way in WAYS)
        print(f"  {batch:<8}{row}{risen['recorded'] - risen['plain']:16.0f}")
    sums = 3 * sum(p.numel() for p in Problem(1).model.parameters()) * 4 / MEGABYTE
    print(f"  {sums:.0f} MB are the sums themselves; inputs and output gradients of the layers are stored twice")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) > 1:
        peak(sys.argv[1], int(sys.argv[2]))
    else:
        compare(128)
        compare_memory()
