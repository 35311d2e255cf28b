"""What a method of training is to the comparison: how it is made, what is tuned, and by which weights it is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import nn

Make = Callable[[nn.Module, Any, int], Any]
"""An optimizer of a model, with a setting, for so many updates: what has `step(closure)`."""

EvaluationModel = Callable[[Any, nn.Module], AbstractContextManager[nn.Module]]


@contextmanager
def as_it_is(optimizer: Any, model: nn.Module) -> Iterator[nn.Module]:
    """Most optimizers are judged at the weights that they are at."""
    yield model


class Method(NamedTuple):
    """An optimizer with the settings that it is tried with.

    Attributes:
        make: an optimizer of a model; its second argument is one of `settings`, its third the number of updates.
        note: what its setting is, for readers.
        package: where it comes from on PyPI; `module` is how that is imported.
        sparse: whether it takes sparse gradients.
        evaluation_model: gives the model to judge it by.
        averages: whether its weights are averages, at which the statistics of BatchNorm have to be taken anew.
    """

    name: str
    title: str
    make: Make
    note: str
    settings: tuple[float | None, ...] = (None,)
    package: str = "torch"
    module: str = "torch"
    sparse: bool = False
    evaluation_model: EvaluationModel = as_it_is
    averages: bool = False

    @property
    def ours(self) -> bool:
        return self.package == "vsgd"

    @property
    def has_grid(self) -> bool:
        return len(self.settings) > 1

    @property
    def setting_words(self) -> str:
        """The note, and the grid if there is one."""
        if not self.has_grid:
            return self.note
        rates = f"{len(self.settings)} rates from {self.settings[0]:.2g} to {self.settings[-1]:.2g}"
        return f"{self.note}, {rates}"


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
