"""Draw Figure 1 of the paper for real gradients: the gain of larger minibatches by sparsity.

After one pass of training, the fraction p of samples with a non-zero gradient is measured for each coordinate. The
closed form of Figure 1 then gives the gain per sample in minibatches of n. The noise level is given, not measured,
because the mean gradient of most coordinates is too small at that point. VSGD_DATA names the folder of the data sets.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vsgd.torch import VSGD
from vsgd_bench.compare.workloads import Task, fashion_mlp, movielens_factors
from vsgd_bench.datasets import skipped_without_data
from vsgd_bench.gain import counted, relative_gain

SIZES = np.unique(np.logspace(0, 3, 25).astype(int))
NOISES = (1.0, 100.0)
"""σ² of non-zero gradients, in units of their squared mean."""
COORDINATES = 300


class Sums(NamedTuple):
    """Number, sum and sum of squares of the non-zero sample gradients of each coordinate."""

    count: np.ndarray
    grad: np.ndarray
    grad_sq: np.ndarray


class Measured(NamedTuple):
    """Fraction of non-zero samples and σ² / mean² (or infinity), of each coordinate with at least two gradients."""

    presence: np.ndarray
    noise: np.ndarray


def train(task: Task, batch: int = 32) -> None:
    """Train for one pass over the data."""
    optimizer = VSGD(task.model.parameters())
    for rows in torch.randperm(len(task.split.x)).split(batch):
        optimizer.minimize(lambda rows=rows: task.loss(task.model(task.split.x[rows]), task.split.y[rows]))


def sums_of_linear(task: Task, layer: torch.nn.Linear) -> Sums:
    """Return the sums of a linear layer. A sample gradient is the outer product of output gradient and input."""
    seen: list[Tensor] = []

    def record(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen.extend([inputs[0], output])

    with layer.register_forward_hook(record):
        loss = task.loss(task.model(task.split.x), task.split.y)
    (len(task.split.x) * loss).backward()
    x, slope = seen[0].detach(), seen[1].grad
    assert slope is not None
    parts = (slope != 0).float().T @ (x != 0).float(), slope.T @ x, (slope**2).T @ x**2
    return Sums(*(part.double().numpy().ravel() for part in parts))


def sums_of_table(task: Task, table: torch.nn.Embedding, column: int) -> Sums:
    """Return the sums of an embedding table. A sample gradient is a single row."""
    rows: list[Tensor] = []

    def record(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        rows.append(output)

    with table.register_forward_hook(record):
        loss = task.loss(task.model(task.split.x), task.split.y)
    (len(task.split.x) * loss).backward()
    slope, index = rows[0].grad, task.split.x[:, column]
    assert slope is not None

    def summed(values: Tensor) -> np.ndarray:
        return torch.zeros(table.weight.shape).index_add(0, index, values).double().numpy().ravel()

    return Sums(summed((slope != 0).float()), summed(slope), summed(slope**2))


def measured(sums: Sums, samples: int) -> Measured:
    """Return the statistics of the non-zero samples. The bias σ²/k of the squared mean is subtracted."""
    there = sums.count > 1
    count, mean = sums.count[there], sums.grad[there] / sums.count[there]
    variance = np.maximum(sums.grad_sq[there] / count - mean**2, 0) * count / (count - 1)
    signal = mean**2 - variance / count
    known = signal > 0
    return Measured(count / samples, np.where(known, variance / np.where(known, signal, 1), np.inf))


def gains(presence: np.ndarray, noise: float) -> np.ndarray:
    """Return the relative gain per sample at each size, as a mean over some coordinates."""
    chosen = np.random.default_rng(0).choice(presence, min(COORDINATES, len(presence)), replace=False)
    return np.mean([[relative_gain(int(n), float(p), noise, counted(noise)) for n in SIZES] for p in chosen], axis=0)


def draw(found: dict[str, Measured]) -> Figure:
    canvas = Figure(figsize=(13, 4), layout="constrained")
    left, *others = canvas.subplots(1, 1 + len(NOISES))
    for name, one in found.items():
        presence = np.sort(one.presence)
        left.plot(presence, np.arange(1, len(presence) + 1) / len(presence), label=name)
        quartiles = ", ".join(f"{q:.2g}" for q in np.percentile(presence, [25, 50, 75]))
        print(f"{name}: non-zero {quartiles} (quartiles); σ² above 100 or unknown: {np.mean(one.noise > 100):.0%}")
    left.set(xscale="log", xlabel="fraction p of samples with a non-zero gradient", ylabel="fraction of coordinates")
    for axis, noise in zip(others, NOISES, strict=True):
        for name, presence in {**{name: one.presence for name, one in found.items()}, "dense": np.ones(1)}.items():
            line = gains(presence, noise)
            axis.plot(SIZES, line, label=name, **({"color": "0.4", "ls": "--"} if name == "dense" else {}))
            at = ", ".join(f"n = {n}: {np.interp(n, SIZES, line):.2f}" for n in (10, 100, 1000))
            print(f"σ² = {noise:g}, {name}: gain {at}")
        axis.set(xscale="log", xlabel="minibatch size n", ylabel="relative gain per sample", ylim=(0, 1.08))
        axis.set_title(f"σ² = {noise:g}", fontsize=10)
    for axis in (left, *others):
        axis.grid(alpha=0.25)
    others[-1].legend(frameon=False, loc="lower left")
    return canvas


@skipped_without_data()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the figure (default: numbers only)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    fashion, movies = fashion_mlp(0, sparse=False), movielens_factors(0, sparse=True)
    for task in (fashion, movies):
        train(task)
    size = len(movies.split.x)
    found = {
        "Fashion-MNIST, first layer": measured(sums_of_linear(fashion, fashion.model[1]), len(fashion.split.x)),
        "MovieLens, users": measured(sums_of_table(movies, movies.model.user, 0), size),
        "MovieLens, items": measured(sums_of_table(movies, movies.model.item, 1), size),
    }
    figure = draw(found)
    if arguments.out:
        figure.savefig(arguments.out, dpi=110)
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
