"""Measure the seconds to a target loss on Fashion-MNIST, with `BatchSizer` and with fixed minibatches.

VSGD_DATA=... python benchmarks/batch_size.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler

from vsgd.torch import VSGD, BatchSizer
from vsgd_bench.compare.data import fashion_split
from vsgd_bench.datasets import skipped_without_data

FIXED, SEEDS = (8, 32, 128, 512), (0, 1, 2)
TRAIN, TEST = 20_000, 2_000
TARGET = 0.42
"""Target cross-entropy on held-out images."""
EVALUATE_EVERY, MAX_SECONDS = 0.05, 60.0

Sampler = Callable[[VSGD, int], Iterable[list[int]]]

SAMPLERS: dict[str, Sampler] = {
    str(size): lambda opt, seed, size=size: BatchSampler(RandomSampler(range(TRAIN)), size, drop_last=True)
    for size in FIXED
}
SAMPLERS["BatchSizer"] = lambda opt, seed: BatchSizer(range(TRAIN), opt, seed=seed)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def run(make: Sampler, seed: int, max_seconds: float = MAX_SECONDS) -> tuple[float, int, int]:
    """Return the seconds and images until the target is reached, and the last minibatch size."""
    split = fashion_split(seed, train=TRAIN, test=TEST)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = VSGD(model.parameters())
    sampler = make(opt, seed)
    parts = 2 if isinstance(sampler, BatchSizer) else 1
    spent, evaluated, images = 0.0, 0.0, 0
    while True:
        for rows in sampler:
            started = time.perf_counter()
            x, y = split.x[rows], split.y[rows]
            halves = zip(x.chunk(parts), y.chunk(parts), strict=True)
            opt.minimize([partial(loss_of, model, *half) for half in halves])
            spent += time.perf_counter() - started
            images += len(rows)
            if spent > evaluated + EVALUATE_EVERY:
                evaluated = spent
                with torch.no_grad():
                    reached = bool(F.cross_entropy(model(split.x_test), split.y_test) < TARGET)
                if reached or spent > max_seconds:
                    return (spent if reached else float("inf")), images, len(rows)


@skipped_without_data()
def main() -> None:
    torch.set_num_threads(1)
    for make in SAMPLERS.values():  # compiles, and warms caches
        run(make, 0, max_seconds=0.5)
    results = {name: [] for name in SAMPLERS}
    for seed in SEEDS:
        for name, make in SAMPLERS.items():
            results[name].append(run(make, seed))
    medians = {name: statistics.median(seconds for seconds, *_ in runs) for name, runs in results.items()}
    best = min(medians[str(size)] for size in FIXED)
    print(
        f"Fashion-MNIST, MLP 784-64-10, {TRAIN} images: training to a held-out loss of {TARGET}, {len(SEEDS)} seeds.\n"
    )
    print(
        "| minibatch | seconds, median | of the best fixed | images, median | last minibatch |\n|---|---|---|---|---|"
    )
    for name, runs in results.items():
        images, last = (statistics.median(each[k] for each in runs) for k in (1, 2))
        print(f"| {name} | {medians[name]:.2f} | {medians[name] / best:.2f} | {images:.0f} | {last:.0f} |")


if __name__ == "__main__":
    main()
