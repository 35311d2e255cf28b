"""A method: how its optimizer is created, which settings are tried, and which weights are evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import nn

RATES = tuple(10 ** (k / 2) for k in range(-12, 3))
"""All learning rates that a search may try: 1e-6 to 10 by factors of √10."""

DECAYS = (0.0, 0.01, 0.1, 1.0)
"""All values of weight decay that a search tries, if the method has weight decay."""


class Setting(NamedTuple):
    """Values of the tuned hyperparameters. None is the default of the optimizer."""

    rate: float | None = None
    decay: float | None = None

    def __str__(self) -> str:
        parts = [] if self.rate is None else [f"{self.rate:.2g}"]
        return ", decay ".join(parts + ([] if self.decay is None else [f"{self.decay:g}"])) or "default"


class Budget(NamedTuple):
    """The length of a run."""

    updates: int
    rows: int
    """Number of training examples."""
    epochs: int
    """Number of passes over the training examples."""


Make = Callable[[nn.Module, Any, Budget], Any]
"""Returns an optimizer for a model and a `Setting`: an object with a method `step(closure)`."""

EvaluationModel = Callable[[Any, nn.Module], AbstractContextManager[nn.Module]]


@contextmanager
def as_it_is(optimizer: Any, model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model unchanged. Most optimizers are evaluated at their current weights."""
    yield model


class Method(NamedTuple):
    """An optimizer and its settings.

    Attributes:
        make: creates the optimizer.
        note: description for readers.
        default: the setting that its authors or its package recommend.
        rates: the learning rates that a search begins with; empty if nothing is tuned.
        decays: the values of weight decay that a search tries; empty if it is not tuned.
        package: its package on PyPI; `module` is the name to import.
        sparse: whether it supports sparse gradients.
        evaluation_model: returns a context manager with the model to evaluate.
        averages: whether averaged weights are evaluated. BatchNorm statistics are then recomputed.
        full_batch_only: whether it requires a loss without noise.
    """

    name: str
    title: str
    make: Make
    note: str
    default: Setting = Setting()
    rates: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    package: str = "torch"
    module: str = "torch"
    sparse: bool = False
    evaluation_model: EvaluationModel = as_it_is
    averages: bool = False
    full_batch_only: bool = False

    @property
    def ours(self) -> bool:
        return self.package == "vsgd"


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
