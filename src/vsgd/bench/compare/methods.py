"""The optimizers that are compared: how each is made, what is tuned, and at which weights it wants to be judged."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vsgd.options import NETWORKS, PAPER, Options
from vsgd.torch import VSGD

Make = Callable[[nn.Module, Any], Any]
EvaluationModel = Callable[[Any, nn.Module], AbstractContextManager[nn.Module]]

HALF_DECADES = tuple(10 ** (k / 2) for k in range(-8, 5))
"""1e-4 to 1e2: wide enough that the best rate is seldom at an end."""


@contextmanager
def as_it_is(optimizer: Any, model: nn.Module) -> Iterator[nn.Module]:
    """Most optimizers are judged at the weights that they are at."""
    yield model


@contextmanager
def schedule_free_average(optimizer: Any, model: nn.Module) -> Iterator[nn.Module]:
    optimizer.eval()
    yield model
    optimizer.train()


@contextmanager
def dog_average(optimizer: Any, model: nn.Module) -> Iterator[nn.Module]:
    average = optimizer.averager.averaged_model
    for mine, its in zip(average.buffers(), model.buffers(), strict=True):
        mine.copy_(its)  # averaging makes NaN of the -inf in an attention mask
    yield average


class AveragedDoG:
    """DoG with the average of its weights, without which its authors do not want it to be used."""

    def __init__(self, model: nn.Module):
        package = importlib.import_module("dog")
        normalized = any(isinstance(module, _BatchNorm) for module in model.modules())
        self.dog = package.DoG(model.parameters(), reps_rel=1e-4 if normalized else 1e-6)
        self.averager = package.PolynomialDecayAverager(model)

    def step(self, closure: Callable[[], Tensor]) -> Any:
        loss = self.dog.step(closure)
        self.averager.step()
        return loss


def torch_optimizer(name: str, model: nn.Module, lr: float | None, **options: Any) -> Any:
    if lr is not None:
        options["lr"] = lr
    return getattr(torch.optim, name)(model.parameters(), **options)


def foreign(module: str, name: str, model: nn.Module, _: None) -> Any:
    """An optimizer of another package, at its defaults."""
    return getattr(importlib.import_module(module), name)(model.parameters())


def schedule_free(name: str, model: nn.Module, _: None) -> Any:
    optimizer = foreign("schedulefree", name, model, None)
    optimizer.train()
    return optimizer


def averaged_dog(model: nn.Module, _: None) -> Any:
    return AveragedDoG(model)


def vsgd_with(options: Options, model: nn.Module, _: None) -> Any:
    return VSGD(model.parameters(), options=options)


class Method(NamedTuple):
    """An optimizer with the settings that it is tried with.

    Attributes:
        make: an optimizer of a model; the second argument is one of `settings`.
        note: what its setting is, for readers.
        package: where it comes from on PyPI; `module` is how that is imported.
        sparse: whether it takes sparse gradients.
        evaluation_model: gives the model to judge it by.
        averages: whether these are averages, at which the statistics of BatchNorm have to be taken anew.
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


def _ours(name: str, title: str, options: Options, note: str) -> Method:
    return Method(name, title, partial(vsgd_with, options), note, package="vsgd", module="vsgd", sparse=True)


def _free(name: str, title: str, package: str, optimizer: str, note: str, module: str | None = None) -> Method:
    """An optimizer that promises to need no tuning."""
    make = partial(foreign, module or package, optimizer)
    return Method(name, title, make, note, package=package, module=module or package)


def _schedule_free(name: str, title: str, optimizer: str, note: str) -> Method:
    free = _free(name, title, "schedulefree", optimizer, note)
    return free._replace(make=partial(schedule_free, optimizer), evaluation_model=schedule_free_average, averages=True)


OURS = "vsgd"

METHODS = (
    _ours(OURS, "vSGD", NETWORKS, "`VSGD(model.parameters())`"),
    _ours("vsgd-paper", "vSGD, paper", PAPER, "`VSGD(model.parameters(), options=PAPER)`"),
    Method(
        "sgd",
        "best SGD",
        partial(torch_optimizer, "SGD"),
        "13 rates from 1e-4 to 1e2, no momentum",
        HALF_DECADES,
        sparse=True,
    ),
    Method(
        "momentum",
        "best momentum",
        partial(torch_optimizer, "SGD", momentum=0.9),
        "SGD with momentum 0.9, 13 rates from 1e-4 to 1e2",
        HALF_DECADES,
    ),
    Method("adam", "best Adam", partial(torch_optimizer, "Adam"), "7 rates from 1e-4 to 1e-1", HALF_DECADES[:7]),
    Method("adam-default", "Adam 1e-3", partial(torch_optimizer, "Adam"), "its default, lr=1e-3"),
    Method("adagrad", "AdaGrad 1e-2", partial(torch_optimizer, "Adagrad"), "PyTorch's default, lr=1e-2", sparse=True),
    _free("prodigy", "Prodigy", "prodigyopt", "Prodigy", "default, lr=1"),
    _schedule_free("schedulefree-adamw", "Schedule-Free AdamW", "AdamWScheduleFree", "default, lr=0.0025, no warm-up"),
    _schedule_free("schedulefree-sgd", "Schedule-Free SGD", "SGDScheduleFree", "default, lr=1, momentum=0.9"),
    _free("dadapt-adam", "D-Adapt Adam", "dadaptation", "DAdaptAdam", "default, lr=1"),
    _free("dadapt-sgd", "D-Adapt SGD", "dadaptation", "DAdaptSGD", "default, lr=1, no momentum"),
    Method(
        "dog",
        "DoG",
        averaged_dog,
        "default with its polynomial averager; reps_rel=1e-6, or 1e-4 with BatchNorm as its documentation asks",
        package="dog-optimizer",
        module="dog",
        evaluation_model=dog_average,
        averages=True,
    ),
    _free("cocob", "COCOB", "parameterfree", "COCOB", "default, alpha=100"),
)


def _without(name: str, title: str, **changes: Any) -> Method:
    """Our default with one of its deviations from the paper taken back."""
    note = ", ".join(f"{key}={value:g}" for key, value in changes.items())
    return _ours(f"vsgd-{name}", title, NETWORKS._replace(**changes), f"`NETWORKS._replace({note})`")


ABLATIONS = (
    METHODS[0],
    _without("shift", "shift δ = ḡ", tensor_probe=0.0, epsilon=PAPER.epsilon),
    _without("memory", "memory not limited", memory_limit=0.0),
    _without("slow-start", "no slow start", slow_start=1.0),
    _without("neighbours", "curvature each for itself", neighbours=0.0),
    _without("every", "curvature at every step", curvature_every=1.0),
    _without("average", "no averaging", average_iterates=False),
    _without("bootstrap", "bootstrap of 10", bootstrap=10.0),
    _without("outliers", "outliers not detected", detect_outliers=False),
)
