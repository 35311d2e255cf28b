"""Learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

WARM_UP_SHARE = 0.05
"""Fraction of the updates during which the learning rate rises."""


def cosine(updates: int, warm_up: int = 0) -> Callable[[int], float]:
    """Return the factor of the rate at each update: linear up to 1 at `warm_up`, then a cosine to 0 at `updates`."""

    def factor(update: int) -> float:
        if update < warm_up:
            return (update + 1) / (warm_up + 1)
        share = (update - warm_up) / max(1, updates - warm_up)
        return (1 + math.cos(math.pi * min(1.0, share))) / 2

    return factor


def warm_up_updates(updates: int) -> int:
    return round(WARM_UP_SHARE * updates)


class Scheduled:
    """Optimizers of one model with a common schedule, `factor`."""

    def __init__(self, optimizers: Sequence[Optimizer], factor: Callable[[int], float]):
        self.optimizers = optimizers
        self.schedules = [LambdaLR(optimizer, factor) for optimizer in optimizers]

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        return loss
