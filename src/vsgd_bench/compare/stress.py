"""Workloads made harder: minibatches of all sizes, losses and inputs out of scale, bad starts, coarse numbers.

Nothing is tuned, so nothing may break. A run passes if its held-out loss is finite and has fallen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from vsgd_bench.compare.judging import has_failed
from vsgd_bench.compare.table import Cell, Table
from vsgd_bench.compare.tables import NOT_RUN, Grid
from vsgd_bench.compare.workloads import WORKLOADS, Loss, Task, Workload

Build = Callable[[int, bool], Task]
Change = Callable[[Task, float], Task]

STRESSED = ("digits-mlp", "digits-autoencoder", "fashion-cnn", "transformer", "housing")
BATCHES = (1, 8, 32, 128, 512)
FACTORS = (1e-6, 1e-3, 1e3, 1e6)
MOST_UPDATES = 1500
"""With minibatches of one, an epoch would take too long."""


def scaled_loss(loss: Loss, factor: float, output: Tensor, target: Tensor) -> Tensor:
    return factor * loss(output, target)


def coarse_loss(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    return loss(output.float(), target.float() if target.is_floating_point() else target)


def multiply_inputs(task: Task, factor: float) -> Task:
    return task._replace(split=task.split._replace(x=factor * task.split.x, x_test=factor * task.split.x_test))


def multiply_weights(task: Task, gain: float) -> Task:
    with torch.no_grad():
        for parameter in task.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(gain)
    return task


def multiply_loss(task: Task, factor: float) -> Task:
    return task._replace(loss=partial(scaled_loss, task.loss, factor))


def silence_last_layer(task: Task, gain: float) -> Task:
    """Weights of the last layer times `gain`: with 0, outputs say nothing at first, and gradients stop there."""
    last = [module for module in task.model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.mul_(gain)
    return task


def coarsen(task: Task, _: float) -> Task:
    """Weights and inputs in bfloat16; the loss is still taken in float32."""
    x, x_test = (t.bfloat16() if t.is_floating_point() else t for t in (task.split.x, task.split.x_test))
    return Task(task.model.bfloat16(), task.split._replace(x=x, x_test=x_test), partial(coarse_loss, task.loss))


CHANGES: dict[str, tuple[Change, float]] = {
    "inputs-x100": (multiply_inputs, 100.0),
    "last-layer-x0": (silence_last_layer, 0.0),
    "weights-x10": (multiply_weights, 10.0),
    "bfloat16": (coarsen, 0.0),
    **{f"loss-x{factor:g}": (multiply_loss, factor) for factor in FACTORS},
}


def build_changed(build: Build, rows: int, change: Change | None, amount: float, seed: int, sparse: bool) -> Task:
    """Build a task with only the first `rows` rows to learn from, and change it."""
    task = build(seed, sparse)
    task = task._replace(split=task.split._replace(x=task.split.x[:rows], y=task.split.y[:rows]))
    return task if change is None else change(task, amount)


def harder(workload: Workload, batch: int | None = None, change: str | None = None) -> Workload:
    rows = MOST_UPDATES * (batch or workload.batch)
    name = f"{workload.name}+{change or f'minibatch-{batch}'}"
    build = partial(build_changed, workload.build, rows, *(CHANGES[change] if change else (None, 0.0)))
    return workload._replace(name=name, title=name, build=build, batch=batch or workload.batch)


def can_be(workload: Workload, change: str) -> bool:
    """Inputs that are words have no scale."""
    return not (change.startswith("inputs") and workload.name == "transformer")


def stress_workloads() -> tuple[Workload, ...]:
    chosen = [workload for workload in WORKLOADS if workload.name in STRESSED]
    batches = [harder(workload, batch=batch) for workload in chosen for batch in BATCHES]
    changes = [harder(w, change=change) for w in chosen for change in CHANGES if can_be(w, change)]
    return (*batches, *changes)


def _ending(cell: Cell | None) -> str:
    """The loss at the end over the one at the start: the worst of all seeds."""
    if cell is None:
        return NOT_RUN
    if has_failed(cell):
        return "**failed**"
    ratios = [run.held_out[-1] / run.held_out[0] for run in cell.runs.values()]
    worst = max(ratio if math.isfinite(ratio) else math.inf for ratio in ratios)
    return f"{worst:.3g}" if worst < 1 else f"**{worst:.3g}**"


def stress_table(table: Table) -> Grid:
    names = [workload.name for workload in table.workloads]
    bases = list(dict.fromkeys(name.partition("+")[0] for name in names))
    kinds = list(dict.fromkeys(name.partition("+")[2] for name in names))
    rows = []
    for kind in kinds:
        for method in table.methods:
            cells = [table.cells.get((f"{base}+{kind}", method.name)) for base in bases]
            texts = [_ending(c) if f"{b}+{kind}" in names else "" for b, c in zip(bases, cells, strict=True)]
            rows.append([kind, method.title, *texts])
    words = (
        "Held-out loss at the end over the one at the start, the worst of all seeds; bold where it did not fall. "
        f"At most {MOST_UPDATES} updates an epoch."
    )
    return Grid("Nothing tuned, made harder", words, ["change", "optimizer", *bases], rows)
