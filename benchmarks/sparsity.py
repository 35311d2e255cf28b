"""Figure 1 of the paper with real gradients: what sparsity buys to larger minibatches.

After one pass of training, gradients of single samples say in which fraction p of the samples each coordinate has a
gradient other than zero, and how noisy that gradient is. The closed form of Figure 1 then gives the gain per sample in
minibatches of n, once with this p and once as if every sample touched the coordinate. VSGD_DATA names the folder of
the data sets.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from vsgd.bench.compare.workloads import Task, fashion_mlp, movielens_factors
from vsgd.bench.gain import counted, relative_gain
from vsgd.torch import VSGD

SIZES = np.unique(np.logspace(0, 3, 25).astype(int))
NOISE_RANGE = (0.01, 100.0)
COORDINATES = 300


class Sums(NamedTuple):
    """Per coordinate, over single samples: how many gradients are not zero, their sum, and that of their squares."""

    count: np.ndarray
    grad: np.ndarray
    grad_sq: np.ndarray


class Measured(NamedTuple):
    """Of each coordinate that has a gradient at all: the fraction of non-zero samples, and σ² / mean²."""

    presence: np.ndarray
    noise: np.ndarray


def train(task: Task, batch: int = 32) -> None:
    """One pass over the data."""
    optimizer = VSGD(task.model.parameters())
    for rows in torch.randperm(len(task.split.x)).split(batch):
        optimizer.minimize(lambda rows=rows: task.loss(task.model(task.split.x[rows]), task.split.y[rows]))


def sums_of_linear(task: Task, layer: torch.nn.Linear) -> Sums:
    """The gradient of one sample is the outer product of the slope in the output and the input."""
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
    """The gradient of one sample is a single row of the table."""
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
    """Moments over the non-zero samples; the square of a mean of k samples is too large by σ²/k."""
    there = sums.count > 1
    count, mean = sums.count[there], sums.grad[there] / sums.count[there]
    variance = np.maximum(sums.grad_sq[there] / count - mean**2, 0) * count / (count - 1)
    signal = np.maximum(mean**2 - variance / count, 1e-30)
    return Measured(count / samples, np.clip(variance / signal, *NOISE_RANGE))


def gains(found: Measured, dense: bool) -> np.ndarray:
    """The relative gain per sample at each size, mean over some of the coordinates."""
    chosen = np.random.default_rng(0).choice(len(found.noise), min(COORDINATES, len(found.noise)), replace=False)
    total = np.zeros(len(SIZES))
    for presence, noise in zip(found.presence[chosen], found.noise[chosen], strict=True):
        p = 1.0 if dense else float(presence)
        total += [relative_gain(int(n), p, float(noise), counted(float(noise))) for n in SIZES]
    return total / len(chosen)


def draw(found: dict[str, Measured]) -> Figure:
    canvas = Figure(figsize=(11, 4), layout="constrained")
    left, right = canvas.subplots(1, 2)
    for color, (name, one) in zip(("C0", "C1", "C2"), found.items(), strict=True):
        presence = np.sort(one.presence)
        left.plot(presence, np.arange(1, len(presence) + 1) / len(presence), color=color, label=name)
        sparse, dense = gains(one, dense=False), gains(one, dense=True)
        right.plot(SIZES, sparse, color=color, label=name)
        right.plot(SIZES, dense, color=color, ls="--")
        at = {n: int(np.argmin(abs(SIZES - n))) for n in (10, 100, 1000)}
        values = ", ".join(f"n = {n}: {sparse[i]:.2f} (dense {dense[i]:.2f})" for n, i in at.items())
        quartiles = np.percentile(one.presence, [25, 50, 75])
        noise = np.median(one.noise)
        print(f"{name}: non-zero {', '.join(f'{q:.2g}' for q in quartiles)} (quartiles), σ² {noise:.2g}; gain {values}")
    left.set(xscale="log", xlabel="fraction p of samples with a non-zero gradient", ylabel="fraction of coordinates")
    right.set(xscale="log", xlabel="minibatch size n", ylabel="relative gain per sample", ylim=(0, 1.08))
    right.plot([], [], color="0.4", ls="--", label="the same noise, every sample non-zero")
    for axis in (left, right):
        axis.grid(alpha=0.25)
    right.legend(frameon=False, loc="lower left")
    return canvas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/sparsity.png"))
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
    draw(found).savefig(arguments.out, dpi=110)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
