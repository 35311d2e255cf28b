"""The optimizers that vSGD is compared with, set up as their authors recommend."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any

from torch import Tensor, nn

from vsgd_bench.compare.methods import Method, trainable
from vsgd_bench.compare.muon import muon_and_adamw
from vsgd_bench.compare.schedules import Scheduled, cosine, warm_up_updates

HALF_DECADES = tuple(10 ** (k / 2) for k in range(-8, 5))
"""1e-4 to 1e2: wide enough that the best rate is seldom at an end."""

WEIGHT_DECAY = 0.01

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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
        normalized = any(isinstance(module, BATCH_NORMS) for module in model.modules())
        self.dog = package.DoG(trainable(model), reps_rel=1e-4 if normalized else 1e-6)
        self.averager = package.PolynomialDecayAverager(model)

    def step(self, closure: Callable[[], Tensor]) -> Any:
        loss = self.dog.step(closure)
        self.averager.step()
        return loss


def from_package(module: str, name: str, model: nn.Module, lr: float | None, updates: int, **options: Any) -> Any:
    """An optimizer at its defaults but for what is given."""
    rate = {} if lr is None else {"lr": lr}
    make = getattr(importlib.import_module(module), name)
    with redirect_stdout(io.StringIO()):  # Prodigy prints what it was told
        return make(trainable(model), **rate, **options)


def with_cosine(
    module: str, name: str, model: nn.Module, lr: float | None, updates: int, warm_up: bool = True, **options: Any
) -> Any:
    """The same with cosine decay to zero, and warm-up unless told."""
    optimizer = from_package(module, name, model, lr, updates, **options)
    return Scheduled([optimizer], cosine(updates, warm_up_updates(updates) if warm_up else 0))


def muon_with_cosine(model: nn.Module, lr: float, updates: int) -> Any:
    return Scheduled(muon_and_adamw(model, lr, WEIGHT_DECAY), cosine(updates, warm_up_updates(updates)))


def schedule_free(name: str, warm_up: bool, model: nn.Module, _: None, updates: int) -> Any:
    options = {"warmup_steps": warm_up_updates(updates)} if warm_up else {}
    optimizer = from_package("schedulefree", name, model, None, updates, **options)
    optimizer.train()
    return optimizer


def averaged_dog(model: nn.Module, _: None, updates: int) -> Any:
    return AveragedDoG(model)


def _torch(name: str, title: str, optimizer: str, note: str, **options: Any) -> Method:
    return Method(name, title, partial(from_package, "torch.optim", optimizer, **options), note)


def _free(name: str, title: str, package: str, optimizer: str, note: str) -> Method:
    """An optimizer that promises to need no tuning."""
    return Method(name, title, partial(from_package, package, optimizer), note, package=package, module=package)


def _schedule_free(name: str, title: str, optimizer: str, note: str, warm_up: bool = False) -> Method:
    return Method(
        name,
        title,
        partial(schedule_free, optimizer, warm_up),
        note,
        package="schedulefree",
        module="schedulefree",
        evaluation_model=schedule_free_average,
        averages=True,
    )


SGD = _torch("sgd", "best SGD", "SGD", "no momentum")._replace(settings=HALF_DECADES, sparse=True)
MOMENTUM = _torch("momentum", "best momentum", "SGD", "momentum 0.9", momentum=0.9)._replace(settings=HALF_DECADES)
ADAM = _torch("adam", "best Adam", "Adam", "no schedule")._replace(settings=HALF_DECADES[:7])
ADAM_DEFAULT = _torch("adam-default", "Adam 1e-3", "Adam", "its default, lr=1e-3")
ADAGRAD = _torch("adagrad", "AdaGrad 1e-2", "Adagrad", "PyTorch's default, lr=1e-2")._replace(sparse=True)

ADAMW_COSINE = Method(
    "adamw-cosine",
    "best AdamW + cosine",
    partial(with_cosine, "torch.optim", "AdamW", weight_decay=WEIGHT_DECAY),
    "5 % warm-up, cosine decay to 0, weight decay 0.01",
    HALF_DECADES[1:8],
)
MOMENTUM_COSINE = Method(
    "momentum-cosine",
    "best momentum + cosine",
    partial(with_cosine, "torch.optim", "SGD", momentum=0.9),
    "momentum 0.9, 5 % warm-up, cosine decay to 0",
    HALF_DECADES[3:10],
)
SOAP_COSINE = Method(
    "soap-cosine",
    "best SOAP + cosine",
    partial(with_cosine, "pytorch_optimizer", "SOAP", weight_decay=WEIGHT_DECAY),
    "5 % warm-up, cosine decay to 0, weight decay 0.01, a new eigenbasis every 10 updates",
    HALF_DECADES[2:7],
    package="pytorch_optimizer",
    module="pytorch_optimizer",
)
MUON_COSINE = Method(
    "muon-cosine",
    "best Muon + cosine",
    muon_with_cosine,
    "Muon for hidden matrices and filters with the scale of AdamW's steps, AdamW for the rest; 5 % warm-up, cosine "
    "decay to 0, weight decay 0.01",
    HALF_DECADES[2:7],
)

PRODIGY = _free("prodigy", "Prodigy", "prodigyopt", "Prodigy", "default, lr=1")
PRODIGY_COSINE = PRODIGY._replace(
    name="prodigy-cosine",
    title="Prodigy + cosine",
    make=partial(
        with_cosine,
        "prodigyopt",
        "Prodigy",
        warm_up=False,
        safeguard_warmup=True,
        use_bias_correction=True,
        weight_decay=WEIGHT_DECAY,
    ),
    note="lr=1, cosine decay to 0, safeguard_warmup, use_bias_correction, weight decay 0.01 as its README recommends",
)
SCHEDULE_FREE = _schedule_free(
    "schedulefree-adamw", "Schedule-Free AdamW", "AdamWScheduleFree", "default, lr=0.0025, no warm-up"
)
SCHEDULE_FREE_WARM_UP = _schedule_free(
    "schedulefree-adamw-warmup",
    "Schedule-Free AdamW + warm-up",
    "AdamWScheduleFree",
    "lr=0.0025, 5 % warm-up as its README recommends",
    warm_up=True,
)
SCHEDULE_FREE_SGD = _schedule_free(
    "schedulefree-sgd", "Schedule-Free SGD", "SGDScheduleFree", "default, lr=1, momentum=0.9"
)
DADAPT_ADAM = _free("dadapt-adam", "D-Adapt Adam", "dadaptation", "DAdaptAdam", "default, lr=1")
DADAPT_SGD = _free("dadapt-sgd", "D-Adapt SGD", "dadaptation", "DAdaptSGD", "default, lr=1, no momentum")
DOG = Method(
    "dog",
    "DoG",
    averaged_dog,
    "default with its polynomial averager; reps_rel=1e-6, or 1e-4 with BatchNorm as its documentation asks",
    package="dog-optimizer",
    module="dog",
    evaluation_model=dog_average,
    averages=True,
)
COCOB = _free("cocob", "COCOB", "parameterfree", "COCOB", "default, alpha=100")

TUNED = (SGD, MOMENTUM, ADAM, ADAMW_COSINE, MOMENTUM_COSINE, SOAP_COSINE, MUON_COSINE)
"""Those that are given the best rate of a grid."""

FREE = (
    PRODIGY,
    PRODIGY_COSINE,
    SCHEDULE_FREE,
    SCHEDULE_FREE_WARM_UP,
    SCHEDULE_FREE_SGD,
    DADAPT_ADAM,
    DADAPT_SGD,
    DOG,
    COCOB,
)
"""Those that promise to need no tuning."""

OPPONENTS = (*TUNED, ADAM_DEFAULT, ADAGRAD, *FREE)
