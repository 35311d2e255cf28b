"""Measure the number of samples to a target loss on Fashion-MNIST by minibatch size, for vSGD, SGD and AdamW.

    VSGD_DATA=... python benchmarks/batch_scaling.py --out docs/figures/batch-scaling.png

SGD and AdamW are tuned at a minibatch of 32. The learning rate of SGD is scaled linearly with the size, that of AdamW
by its square root. vSGD has no setting. With the rate of eq. 3, the gain of a step is proportional to n / (n + B),
where B = tr Σ / |G|² is the gradient noise scale. Steps with n samples therefore need (n + B) / (m + B) times the
samples of steps with m samples. The prediction applies this factor to each part of the run with the smallest minibatch,
with the B of that part. B is measured at the iterates, where gradients are taken, and also at their average, which has
less noise.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from noise_scale import loss_of, moments
from torch import Tensor, nn

from vsgd.torch import VSGD
from vsgd_bench.compare.data import Split, fashion_split
from vsgd_bench.datasets import skipped_without_data

SIZES, TUNED, SEEDS = (8, 32, 128, 512), 32, (0, 1, 2)
TRAIN, TEST = 60_000, 5_000
TARGETS = (0.5, 0.45)
"""Target cross-entropies on held-out images."""
EVALUATE_EVERY, MOST_IMAGES = 1024, 240_000
SINGLE, MANY = 500, 10_000
"""Number of images for single gradients and for the mean gradient, which give the noise scale."""

Make = Callable[[Iterable[Tensor], int], torch.optim.Optimizer]


def vsgd(params: Iterable[Tensor], size: int) -> torch.optim.Optimizer:
    return VSGD(params)


def sgd(params: Iterable[Tensor], size: int, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, rate * size / TUNED)


def adamw(params: Iterable[Tensor], size: int, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, rate * math.sqrt(size / TUNED))


RATES = {"SGD, linear": (sgd, (0.03, 0.1, 0.3, 1.0)), "AdamW, square root": (adamw, (3e-4, 1e-3, 3e-3, 1e-2))}


PLACES = ("iterates", "average")


class Point(NamedTuple):
    """The state of a run after a number of images."""

    images: int
    loss: float
    noises: tuple[float, ...]
    """The gradient noise scale at each of `PLACES`; empty if it was not measured."""


def noise_scale(model: nn.Module, split: Split) -> float:
    """Return B = tr Σ / |G|² of the first training images, which are in random order."""
    squares = sum(moments(model, split.x[:SINGLE], split.y[:SINGLE]))
    loss = loss_of(model, split.x[:MANY], split.y[:MANY])
    signal = sum(float(grad.square().sum()) for grad in torch.autograd.grad(loss, list(model.parameters())))
    return squares / signal - 1


def take_step(opt: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    if isinstance(opt, VSGD):
        opt.minimize(loss)
        return
    opt.zero_grad()
    loss().backward()
    opt.step()


def run(make: Make, size: int, seed: int, with_noise: bool = False) -> list[Point]:
    """Train until the last target is reached, and return the points of the run."""
    split = fashion_split(seed, train=TRAIN, test=TEST)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    opt, images, points = make(model.parameters(), size), 0, []
    while images < MOST_IMAGES:
        for rows in torch.randperm(TRAIN).split(size):
            take_step(opt, partial(loss_of, model, split.x[rows], split.y[rows]))
            images += len(rows)
            if images >= EVALUATE_EVERY * (len(points) + 1):
                with torch.no_grad():
                    loss = float(F.cross_entropy(model(split.x_test), split.y_test))
                noises: tuple[float, ...] = ()
                if with_noise and isinstance(opt, VSGD):
                    with opt.iterates(), torch.enable_grad():
                        here = noise_scale(model, split)
                    noises = here, noise_scale(model, split)
                points.append(Point(images, loss, noises))
                if loss <= min(TARGETS):
                    return points
    return points


def samples_to(points: list[Point], target: float) -> float:
    return next((point.images for point in points if point.loss <= target), math.inf)


def predicted(points: list[Point], target: float, size: int, place: int) -> float:
    """Return the predicted number of samples for a minibatch size, from the run with the smallest size."""
    total, before = 0.0, 0
    for point in points:
        total += (point.images - before) * (size + point.noises[place]) / (SIZES[0] + point.noises[place])
        before = point.images
        if point.loss <= target:
            return total
    return math.inf


def tuned(name: str) -> Make:
    """Return the optimizer with the learning rate that needs the fewest samples to the last target."""
    make, rates = RATES[name]
    needed = {
        rate: statistics.median(samples_to(run(partial(make, rate=rate), TUNED, seed), min(TARGETS)) for seed in SEEDS)
        for rate in rates
    }
    print(f"{name}, minibatch {TUNED}: " + ", ".join(f"{rate:g}: {n:,.0f}" for rate, n in needed.items()), flush=True)
    return partial(make, rate=min(needed, key=needed.__getitem__))


Results = dict[str, dict[int, list[float]]]
"""Number of samples by name, size and seed."""


def draw(found: dict[float, Results]) -> Figure:
    canvas = Figure(figsize=(11, 4.6), layout="constrained")
    for axis, (target, results) in zip(canvas.subplots(1, len(found), sharey=True), found.items(), strict=True):
        for name, line in results.items():
            middle = [statistics.median(line[size]) for size in SIZES]
            style = {"color": "black", "ls": "--" if PLACES[0] in name else ":"}
            style = style if name.startswith("predicted") else {"marker": "o"}
            axis.plot(SIZES, [n if math.isfinite(n) else math.nan for n in middle], label=name, **style)
        axis.set(xscale="log", yscale="log", xlabel="minibatch", title=f"to a held-out loss of {target}")
        axis.set_xticks(SIZES, [str(size) for size in SIZES])
        axis.minorticks_off()
        ticks = (5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
        axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.grid(alpha=0.25)
    canvas.axes[0].set_ylabel("images, median of three seeds")
    canvas.axes[0].legend(frameon=False)
    return canvas


@skipped_without_data()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the figure (default: numbers only)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    makes: dict[str, Make] = {"vSGD": vsgd, **{name: tuned(name) for name in RATES}}
    runs = {
        (name, size): [run(make, size, seed, with_noise=name == "vSGD" and size == SIZES[0]) for seed in SEEDS]
        for name, make in makes.items()
        for size in SIZES
    }
    found: dict[float, Results] = {}
    for target in TARGETS:
        found[target] = {
            name: {size: [samples_to(points, target) for points in runs[name, size]] for size in SIZES}
            for name in makes
        }
        smallest = runs["vSGD", SIZES[0]]
        for k, place in enumerate(PLACES):
            found[target][f"predicted, noise at the {place}"] = {
                size: [predicted(points, target, size, k) for points in smallest] for size in SIZES
            }
        print(f"\n| images to {target} |" + "".join(f" {size} |" for size in SIZES) + "\n|---|" + "---|" * len(SIZES))
        for name, line in found[target].items():
            cells = [f"{statistics.median(n):,.0f} ({min(n):,.0f} to {max(n):,.0f})" for n in line.values()]
            print(f"| {name} | " + " | ".join(cells) + " |")
    for k, place in enumerate(PLACES):
        scale = statistics.median(point.noises[k] for points in runs["vSGD", SIZES[0]] for point in points)
        print(f"\nnoise scale at the {place} of the runs with minibatches of {SIZES[0]}, median: {scale:,.0f}")
    if arguments.out:
        draw(found).savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
