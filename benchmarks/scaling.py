"""Measure updates and seconds to a target by width, depth and minibatch size, of vSGD relative to AdamW.

    python benchmarks/scaling.py                             # MLPs, a minute
    python benchmarks/scaling.py --full mlp                  # MLPs over two decades of width, minutes
    VSGD_DATA=... python benchmarks/scaling.py --full gpt    # GPTs over two decades of width, hours

One size is varied at a time; the others have their middle value. The target is 1.02 times the final held-out loss of
AdamW with 5 % warm-up, cosine decay and the best learning rate of a grid. AdamW therefore reaches it near the end of
its run. Each finished run is stored in the folder `--out`, so the same command continues an interrupted one.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

from vsgd_bench.compare import data, networks
from vsgd_bench.compare.compute import compute
from vsgd_bench.compare.curves import png
from vsgd_bench.compare.judging import targets, time_to
from vsgd_bench.compare.large import LENGTH, SHAKESPEARE
from vsgd_bench.compare.large_networks import GPT
from vsgd_bench.compare.methods import Setting
from vsgd_bench.compare.opponents import ADAMW_COSINE
from vsgd_bench.compare.ours import DEFAULT, OURS
from vsgd_bench.compare.runs import Runs
from vsgd_bench.compare.table import Table, assemble
from vsgd_bench.compare.workloads import Task, Workload
from vsgd_bench.figures.figure import BLUE, GREY, ORANGE, RED
from vsgd_bench.store import write_whole

ADAMW = ADAMW_COSINE._replace(decays=(), default=Setting(1e-3))
AXES = ("width", "depth", "batch")
LINES = {"updates": (BLUE, "o", "-"), "seconds": (ORANGE, "s", "--")}


class Sizes(NamedTuple):
    width: int
    depth: int
    batch: int


class Family(NamedTuple):
    """Networks of one kind: the middle size, and the sizes along each axis."""

    name: str
    middle: Sizes
    sizes: dict[str, tuple[int, ...]]


def mlp(sizes: Sizes, seed: int, sparse: bool) -> Task:
    model = networks.mlp(64, *([sizes.width] * sizes.depth), 10)
    return Task(model, data.shuffled(*data.digits(), seed), F.cross_entropy)


def gpt(sizes: Sizes, seed: int, sparse: bool) -> Task:
    split, symbols = data.characters(seed, LENGTH, train=4000)
    model: nn.Module = GPT(symbols, LENGTH, sizes.width, heads=4, depth=sizes.depth)
    return Task(model, split, F.cross_entropy)


SMALL_MLP = Family("mlp", Sizes(64, 2, 16), {"width": (8, 64, 512), "depth": (1, 2, 4), "batch": (4, 16, 64)})
MLP = Family(
    "mlp",
    Sizes(64, 3, 32),
    {"width": (16, 32, 64, 160, 512, 1600), "depth": (1, 2, 3, 6, 12), "batch": (4, 8, 32, 128, 400)},
)
TRANSFORMER = Family(
    "gpt",
    Sizes(64, 2, 16),
    {"width": (8, 16, 64, 128, 256, 512), "depth": (1, 2, 4, 8, 16), "batch": (4, 16, 64, 256)},
)
FULL = {family.name: family for family in (MLP, TRANSFORMER)}
BUILD = {"mlp": (mlp, 10, ()), "gpt": (gpt, 1, SHAKESPEARE)}


def workload(family: Family, sizes: Sizes) -> Workload:
    build, epochs, files = BUILD[family.name]
    name = f"{family.name}-{sizes.width}x{sizes.depth}-batch-{sizes.batch}"
    return Workload(name, name, partial(build, sizes), sizes.batch, epochs, files)


def along(family: Family, axis: str) -> dict[int, Workload]:
    """Return the workloads of an axis, by size."""
    return {size: workload(family, family.middle._replace(**{axis: size})) for size in family.sizes[axis]}


def ratio(table: Table, task: Workload, axis: str) -> float:
    """Return the budget of vSGD to the target divided by that of AdamW: NaN if not run, infinite if it misses."""
    ours, theirs = (table.cells.get((task.name, name)) for name in (OURS, ADAMW.name))
    if ours is None or theirs is None:
        return math.nan
    goals = targets(table, task)
    spent = [[time_to(cell.runs[seed], goal, axis, False) for cell in (ours, theirs)] for seed, goal in goals.items()]
    return math.exp(sum(math.log(a / b) for a, b in spent) / len(spent)) if spent else math.nan


def draw(table: Table, families: list[Family]) -> Figure:
    """Draw a panel for each family and axis. vSGD is better below 1. A cross marks a missed target."""
    figure = Figure(figsize=(10, 3.2 * len(families)), layout="constrained")
    panels = figure.subplots(len(families), len(AXES), sharey=True, squeeze=False)
    for row, family in zip(panels, families, strict=True):
        for panel, axis in zip(row, AXES, strict=True):
            panel.axhline(1, color=GREY, lw=1)
            tasks = along(family, axis)
            for what, (color, marker, line) in LINES.items():
                values = {size: ratio(table, task, what) for size, task in tasks.items()}
                reached = {size: value for size, value in values.items() if math.isfinite(value)}
                panel.plot(list(reached), list(reached.values()), line, color=color, marker=marker, label=what)
            missed = [size for size, task in tasks.items() if math.isinf(ratio(table, task, "updates"))]
            style = {"color": RED, "ms": 9, "mew": 2, "transform": panel.get_xaxis_transform(), "clip_on": False}
            panel.plot(missed, [0.95] * len(missed), "x", **style, label="vSGD misses the target")
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xticks(list(tasks), [str(size) for size in tasks])
            panel.set_xticks([], minor=True)
            panel.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
            panel.set_yticks([], minor=True)
            panel.set_xlabel({"batch": "minibatch size"}.get(axis, axis))
            panel.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(f"{family.name.upper()}: vSGD / AdamW, to target")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", nargs="+", choices=list(FULL), default=[], help="networks over two decades of width")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stored", action="store_true", help="draw the stored runs, without training")
    parser.add_argument("--out", type=Path, default=Path("report/scaling"), help="folder of runs and figure")
    arguments = parser.parse_args()

    families = [FULL[name] for name in arguments.full] or [SMALL_MLP]
    tasks = {task.name: task for family in families for axis in AXES for task in along(family, axis).values()}
    runs = Runs(arguments.out, "scaling")
    if not arguments.stored:
        compute(list(tasks.values()), [DEFAULT, ADAMW], arguments.seeds, arguments.jobs, runs)
    table = assemble(list(tasks.values()), [DEFAULT, ADAMW], arguments.seeds, runs)
    print("| network | updates, vSGD / AdamW | seconds, vSGD / AdamW |\n|---|---|---|")
    for name, task in tasks.items():
        print(f"| {name} | {ratio(table, task, 'updates'):.2f} | {ratio(table, task, 'seconds'):.2f} |")
    write_whole(arguments.out / "scaling.png", png(draw(table, families)))
    print(f"wrote {arguments.out / 'scaling.png'}")


if __name__ == "__main__":
    main()
