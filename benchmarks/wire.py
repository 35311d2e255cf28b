"""Model the time of an all-reduce: fit latency and bandwidth on this machine, and check a prediction.

A ring all-reduce of B bytes over w workers takes 2(w − 1) messages of B/w bytes, one after the other:

    seconds = 2 (w − 1) · latency + 2 (w − 1)/w · B / bandwidth

If there are more workers than cores, the bandwidth of each is divided by w / cores. Latency and bandwidth are fitted to
1, 2 and 3 gloo processes on loopback, and then predict 4. `--plan` applies the formula to 1 to 1,024 workers with a
given bandwidth and latency.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

FITTED, CHECKED = (1, 2, 3), 4
SIZES = tuple(4**k for k in range(5, 13))
"""Message sizes in bytes: 1 KB to 16 MB."""
LIMIT = datetime.timedelta(seconds=120)


class Link(NamedTuple):
    """Latency in seconds per message, and bandwidth in bytes per second."""

    latency: float
    bandwidth: float


def terms(workers: int, size: float, cores: int) -> tuple[float, float]:
    """Return the numbers of messages and bytes that a worker waits for."""
    sharing = max(1.0, workers / cores)
    return 2 * (workers - 1), 2 * (workers - 1) / workers * size * sharing


def seconds(link: Link, workers: int, size: float, cores: int) -> float:
    messages, transferred = terms(workers, size, cores)
    return messages * link.latency + transferred / link.bandwidth


def measure(rank: int, workers: int, store: str, repeats: int) -> None:
    """Measure all-reduces in one process. Rank 0 stores the medians."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers, timeout=LIMIT)
    torch.set_num_threads(1)
    medians = []
    for size in SIZES:
        tensor, times = torch.zeros(size // 4), []
        for _ in range(repeats + 2):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
        medians.append(float(np.median(times[2:])))
    if rank == 0:
        np.save(f"{store}.npy", medians)
    dist.destroy_process_group()


def measured(workers: int, repeats: int) -> np.ndarray:
    """Return the median seconds of an all-reduce at each size."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes.spawn(measure, (workers, store, repeats), nprocs=workers)
        return np.load(f"{store}.npy")


def fit(points: dict[int, np.ndarray], cores: int) -> Link:
    """Return latency and bandwidth by least squares of relative errors. One worker sends nothing, so it is skipped."""
    rows, targets = [], []
    for workers, times in points.items():
        for size, taken in zip(SIZES, times, strict=True):
            if workers > 1:
                rows.append(np.array(terms(workers, size, cores)) / taken)
                targets.append(1.0)
    latency, inverse = np.linalg.lstsq(np.array(rows), np.array(targets))[0]
    return Link(max(latency, 0.0), 1 / inverse)


def plan(size: float, compute: float, link: Link) -> None:
    """Print the seconds of a step by number of workers, with one worker per machine."""
    print("| workers | all-reduce | step | samples per second, relative to 1 worker |\n|---|---|---|---|")
    for workers in (1, 2, 4, 8, 16, 64, 256, 1024):
        wire = seconds(link, workers, size, cores=workers)
        gain = workers * compute / (compute + wire)
        print(f"| {workers:,} | {wire * 1e3:.1f} ms | {(compute + wire) * 1e3:.1f} ms | {gain:,.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="repetitions of each all-reduce (default: 30)")
    parser.add_argument("--plan", action="store_true", help="predict with the given numbers, without measuring")
    parser.add_argument("--parameters", type=float, default=25e6, help="number of parameters (default: 25e6)")
    parser.add_argument("--gradients", type=float, default=1.1, help="float32 gradients sent per step (default: 1.1)")
    parser.add_argument("--compute", type=float, default=0.1, help="seconds of a step with one worker (default: 0.1)")
    parser.add_argument("--gigabits", type=float, default=10.0, help="bandwidth in gigabits per second (default: 10)")
    parser.add_argument("--latency", type=float, default=2e-5, help="latency of a message in seconds (default: 2e-5)")
    arguments = parser.parse_args()
    if not arguments.plan:
        cores = len(os.sched_getaffinity(0))
        link = fit({workers: measured(workers, arguments.repeats) for workers in FITTED}, cores)
        print(f"fitted to {FITTED} processes on {cores} cores: {link.latency:.2g} s, {link.bandwidth / 1e9:.3g} GB/s")
        for size, taken in zip(SIZES, measured(CHECKED, arguments.repeats), strict=True):
            expected = seconds(link, CHECKED, size, cores)
            print(f"{CHECKED} processes, {size:>10,} bytes: {taken:.2e} s, predicted {expected:.2e} s")
    plan(
        4 * arguments.parameters * arguments.gradients,
        arguments.compute,
        Link(arguments.latency, arguments.gigabits * 1e9 / 8),
    )


if __name__ == "__main__":
    main()
