"""Harder workloads: unusual batch sizes, badly scaled losses and inputs, bad initial weights, and bfloat16.

Nothing is tuned. A run passes if its final held-out loss is finite and below the initial one.
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
MAX_UPDATES = 1500
"""Maximum number of updates per epoch. With minibatches of one sample, an epoch would take too long."""


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
    """Multiply the weights of the last layer. With a gain of 0, earlier layers have zero gradients at first."""
    last = [module for module in task.model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.mul_(gain)
    return task


def coarsen(task: Task, _: float) -> Task:
    """Convert weights and inputs to bfloat16. The loss is computed in float32."""
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
    """Build a task with the first `rows` training rows, and apply the change."""
    task = build(seed, sparse)
    task = task._replace(split=task.split._replace(x=task.split.x[:rows], y=task.split.y[:rows]))
    return task if change is None else change(task, amount)


def harder(workload: Workload, batch: int | None = None, change: str | None = None) -> Workload:
    rows = MAX_UPDATES * (batch or workload.batch)
    name = f"{workload.name}+{change or f'minibatch-{batch}'}"
    build = partial(build_changed, workload.build, rows, *(CHANGES[change] if change else (None, 0.0)))
    return workload._replace(name=name, title=name, build=build, batch=batch or workload.batch)


def can_be(workload: Workload, change: str) -> bool:
    """Return whether a change applies to a workload. Inputs that are words have no scale."""
    return not (change.startswith("inputs") and workload.name == "transformer")


def stress_workloads() -> tuple[Workload, ...]:
    chosen = [workload for workload in WORKLOADS if workload.name in STRESSED]
    batches = [harder(workload, batch=batch) for workload in chosen for batch in BATCHES]
    changes = [harder(w, change=change) for w in chosen for change in CHANGES if can_be(w, change)]
    return (*batches, *changes)


def _ending(cell: Cell | None) -> str:
    """Return the final loss divided by the initial one, for the worst seed."""
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
        "Final held-out loss divided by the initial one, of the worst seed; bold if it did not decrease. "
        f"An epoch has at most {MAX_UPDATES} updates."
    )
    return Grid("Final loss relative to the initial one", words, ["change", "optimizer", *bases], rows)
