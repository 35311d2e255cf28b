"""Train the same task with vSGD and with AdamW at several learning rates, and print a table.

The other examples import this module. Every optimizer starts from the same weights and sees the same batches.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vsgd.torch import VSGD

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
WARM_UP = 0.05
EVALUATIONS = 20

Batch = tuple[Tensor, ...]


class Task(NamedTuple):
    """A model, its training batches in order, and its losses.

    `held_out` returns the held-out loss of the model. Without it the task is a stream: each batch is predicted
    before it is used for training, and the result is the mean of these losses. `steps_per_epoch` is that of `VSGD`.
    """

    model: nn.Module
    batches: Sequence[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    held_out: Callable[[nn.Module], float] | None = None
    steps_per_epoch: float | None = None


class Result(NamedTuple):
    """Held-out loss after training, and the lowest one during training."""

    final: float
    best: float


def take_steps(task: Task, rate: float | None, decay: bool) -> Callable[[Batch], None]:
    """Return a function that trains on one batch: vSGD if `rate` is None, otherwise AdamW."""
    parameters = [p for p in task.model.parameters() if p.requires_grad]
    if rate is None:
        vsgd = VSGD(parameters, steps_per_epoch=task.steps_per_epoch)

        def step(batch: Batch) -> None:
            vsgd.minimize(lambda: task.loss(task.model, batch))

        return step

    adamw = torch.optim.AdamW(parameters, lr=rate)
    schedule = None
    if decay:
        updates = len(task.batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(adamw, rate, updates, pct_start=WARM_UP, cycle_momentum=False)

    def step_adamw(batch: Batch) -> None:
        adamw.zero_grad()
        task.loss(task.model, batch).backward()
        adamw.step()
        if schedule is not None:
            schedule.step()

    return step_adamw


def train(task: Task, rate: float | None, decay: bool = True) -> Result:
    """Train with vSGD (`rate` is None) or AdamW, the latter with warm-up and cosine decay if `decay`."""
    step = take_steps(task, rate, decay)
    interval = max(len(task.batches) // EVALUATIONS, 1)
    losses = []
    for number, batch in enumerate(task.batches, start=1):
        if task.held_out is None:
            with torch.no_grad():
                losses.append(task.loss(task.model, batch).item())
        step(batch)
        if task.held_out is not None and (number % interval == 0 or number == len(task.batches)):
            losses.append(task.held_out(task.model))
    if task.held_out is None:
        mean = statistics.fmean(losses)
        return Result(mean, mean)
    return Result(losses[-1], min(losses))


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3g} ± {error:.1g}"


def compare(
    title: str, make: Callable[[int], Task], seeds: int, rates: Sequence[float] = RATES, decay: bool = True
) -> None:
    """Print a table of losses by optimizer, and the seeds on which vSGD ends below the best AdamW.

    The best AdamW is the learning rate with the lowest mean final loss over all seeds.
    """
    rows: dict[float | None, list[Result]] = {}
    for rate in (None, *rates):
        rows[rate] = [train(make(seed), rate, decay) for seed in range(seeds)]
    final = {rate: [each.final for each in results] for rate, results in rows.items()}
    best = min(rates, key=lambda rate: statistics.fmean(final[rate]))
    wins = sum(ours < theirs for ours, theirs in zip(final[None], final[best], strict=True))
    stream = make(0).held_out is None
    print(f"\n{title}, seeds: {seeds}\n")
    print("| | mean loss of the stream |\n|---|---|" if stream else "| | final loss | best loss |\n|---|---|---|")
    for rate, results in rows.items():
        name = "vSGD" if rate is None else f"AdamW {rate:g}"
        cells = [spread(final[rate])] + ([] if stream else [spread([each.best for each in results])])
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"\nvSGD ends below AdamW {best:g} on {wins} of {seeds} seeds.", flush=True)


def arguments(description: str) -> argparse.Namespace:
    """Parse `--seeds`, and use one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, default=1)
    torch.set_num_threads(1)
    return parser.parse_args()
