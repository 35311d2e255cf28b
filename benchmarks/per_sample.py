"""What statistics of single samples cost, as ratios measured side by side in one run.

    python benchmarks/per_sample.py

An MLP 784-1024-1024-10 with ReLU, float32. Each way ends with the same sums for every coordinate: of the gradients,
of their squares, and of the absolute and squared changes between two points.
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
LARGEST_WRITTEN_OUT = 128
"""Largest batch whose gradients are written out: a gigabyte for every 70 samples."""


class Problem:
    """A model, a minibatch, and a way to the second point and back."""

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
    """One gradient and one step of SGD."""
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=1e-6)

    def run() -> None:
        problem.backward()
        optimizer.step()

    return run


def recorded(problem: Problem) -> Callable[[], object]:
    """Two recorded gradients and the sums."""
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
    """Gradients of all samples written out by torch.func, at both points."""

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
    """Gradients of all samples written out by the hooks of opacus, at both points."""
    from opacus import GradSampleModule

    # its own copy, as its hooks stay on
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
    """Times, interleaved so that a busy machine is busy for all of them."""
    problem = Problem(batch)
    runs = {name: way(problem) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 1):
        for name, run in runs.items():
            # the fast ones are repeated, to weigh as much as a slow one
            for _ in range(7 if name in ("plain", "recorded") else 1):
                start = time.perf_counter()
                run()
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"Time of one step's statistics, batch {batch}, {torch.get_num_threads()} threads, medians, interleaved")
    print(f"  plain gradient and SGD step              {median['plain'] * 1e3:8.1f} ms")
    print(f"  two recordings and sums                  {median['recorded'] * 1e3:8.1f} ms")
    print(f"  torch.func.vmap(grad), written out       {median['vmap'] * 1e3:8.1f} ms")
    print(f"  opacus, written out                      {median['opacus'] * 1e3:8.1f} ms")
    print(f"  recorded / plain                         {median['recorded'] / median['plain']:8.2f}")
    print(f"  vmap / recorded                          {median['vmap'] / median['recorded']:8.2f}")
    print(f"  opacus / recorded                        {median['opacus'] / median['recorded']:8.2f}")


def peak(way: str, batch: int) -> None:
    """Print how far this process's resident memory rises above that of a model, its gradients and a minibatch."""
    problem = Problem(batch)
    run = WAYS[way](problem)
    run()  # whatever is loaded, compiled or checked at first use
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # start the peak anew
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
            if way in ("plain", "recorded") or batch <= LARGEST_WRITTEN_OUT:
                command = [sys.executable, __file__, way, str(batch)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                risen[way] = int(output) / MEGABYTE
        row = "".join(f"{risen[way]:12.0f}" if way in risen else f"{'-':>12}" for way in WAYS)
        print(f"  {batch:<8}{row}{risen['recorded'] - risen['plain']:16.0f}")
    sums = 3 * sum(p.numel() for p in Problem(1).model.parameters()) * 4 / MEGABYTE
    print(f"  {sums:.0f} MB are the sums themselves; the layers' inputs and output gradients are kept twice")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) > 1:
        peak(sys.argv[1], int(sys.argv[2]))
    else:
        compare(128)
        compare_memory()
