"""The optimizers that vSGD is compared with, in the configuration that their authors recommend."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vsgd_bench.compare.methods import DECAYS, RATES, Budget, Method, Setting, trainable
from vsgd_bench.compare.muon import muon_and_adamw
from vsgd_bench.compare.schedules import Scheduled, cosine, warm_up_updates

ADAM_RATES = RATES[5:10]
"""3.2e-4 to 3.2e-2: first rates of a search for optimizers with normalized steps."""

SGD_RATES = RATES[8:13]
"""1e-2 to 1: first rates of a search for optimizers whose steps are proportional to the gradient."""

EMA_SHARE = 0.1
"""Horizon of the average of AdamW's weights, as a fraction of the updates."""

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
        mine.copy_(its)  # averaging turns −inf in an attention mask into NaN
    yield average


@contextmanager
def weight_average(optimizer: Any, model: nn.Module) -> Iterator[nn.Module]:
    yield optimizer.average.module


class AveragedDoG:
    """DoG with an average of its weights, as its authors require."""

    def __init__(self, model: nn.Module):
        package = importlib.import_module("dog")
        normalized = any(isinstance(module, BATCH_NORMS) for module in model.modules())
        self.dog = package.DoG(trainable(model), reps_rel=1e-4 if normalized else 1e-6)
        self.averager = package.PolynomialDecayAverager(model)

    def step(self, closure: Callable[[], Tensor]) -> Any:
        loss = self.dog.step(closure)
        self.averager.step()
        return loss


class AveragedAdamW:
    """AdamW with an exponential moving average of its weights."""

    def __init__(self, model: nn.Module, setting: Setting, budget: Budget):
        self.model = model
        self.adamw = from_package("torch.optim", "AdamW", model, setting, budget)
        horizon = max(1.0, EMA_SHARE * budget.updates)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - 1 / horizon))

    def step(self, closure: Callable[[], Tensor]) -> Any:
        loss = self.adamw.step(closure)
        self.average.update_parameters(self.model)
        return loss


def from_package(module: str, name: str, model: nn.Module, setting: Setting, budget: Budget, **options: Any) -> Any:
    """Return an optimizer with its defaults, except for the setting and the options."""
    tuned = {"lr": setting.rate, "weight_decay": setting.decay}
    make = getattr(importlib.import_module(module), name)
    with redirect_stdout(io.StringIO()):  # Prodigy prints its options
        return make(trainable(model), **{key: value for key, value in tuned.items() if value is not None}, **options)


def with_cosine(
    module: str, name: str, model: nn.Module, setting: Setting, budget: Budget, warm_up: bool = True, **options: Any
) -> Any:
    """Return an optimizer of a package with cosine decay to zero, and with warm-up if `warm_up`."""
    optimizer = from_package(module, name, model, setting, budget, **options)
    return Scheduled([optimizer], cosine(budget.updates, warm_up_updates(budget.updates) if warm_up else 0))


def muon_with_cosine(model: nn.Module, setting: Setting, budget: Budget) -> Any:
    assert setting.rate is not None
    assert setting.decay is not None
    optimizers = muon_and_adamw(model, setting.rate, setting.decay)
    return Scheduled(optimizers, cosine(budget.updates, warm_up_updates(budget.updates)))


def schedule_free(name: str, warm_up: bool, model: nn.Module, setting: Setting, budget: Budget) -> Any:
    options = {"warmup_steps": warm_up_updates(budget.updates)} if warm_up else {}
    optimizer = from_package("schedulefree", name, model, setting, budget, **options)
    optimizer.train()
    return optimizer


def averaged_dog(model: nn.Module, setting: Setting, budget: Budget) -> Any:
    return AveragedDoG(model)


def averaged_adamw(model: nn.Module, setting: Setting, budget: Budget) -> Any:
    return AveragedAdamW(model, setting, budget)


def _torch(name: str, title: str, optimizer: str, note: str, **options: Any) -> Method:
    return Method(name, title, partial(from_package, "torch.optim", optimizer, **options), note)


def _packaged(name: str, title: str, package: str, optimizer: str, note: str) -> Method:
    """Return an optimizer of a package with its defaults."""
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


SGD = _torch("sgd", "SGD", "SGD", "no momentum")._replace(default=Setting(1e-3), rates=SGD_RATES, sparse=True)
MOMENTUM = _torch("momentum", "momentum", "SGD", "momentum 0.9", momentum=0.9)
MOMENTUM = MOMENTUM._replace(default=Setting(1e-3), rates=SGD_RATES)
ADAM = _torch("adam", "Adam", "Adam", "no schedule")._replace(default=Setting(1e-3), rates=ADAM_RATES)
ADAGRAD = _torch("adagrad", "AdaGrad", "Adagrad", "PyTorch's default, lr=1e-2")._replace(sparse=True)

ADAMW_COSINE = Method(
    "adamw-cosine",
    "AdamW + cosine",
    partial(with_cosine, "torch.optim", "AdamW"),
    "5 % warm-up, cosine decay to 0",
    Setting(1e-3, 0.01),
    ADAM_RATES,
    DECAYS,
)
MOMENTUM_COSINE = Method(
    "momentum-cosine",
    "momentum + cosine",
    partial(with_cosine, "torch.optim", "SGD", momentum=0.9),
    "momentum 0.9, 5 % warm-up, cosine decay to 0",
    Setting(1e-3),
    SGD_RATES,
)
SOAP_COSINE = Method(
    "soap-cosine",
    "SOAP + cosine",
    partial(with_cosine, "pytorch_optimizer", "SOAP"),
    "5 % warm-up, cosine decay to 0, a new eigenbasis every 10 updates; its default rate is 0.003",
    Setting(RATES[7], 0.01),
    ADAM_RATES,
    DECAYS,
    package="pytorch_optimizer",
    module="pytorch_optimizer",
)
MUON_COSINE = Method(
    "muon-cosine",
    "Muon + cosine",
    muon_with_cosine,
    "Muon for hidden matrices and filters with the scale of AdamW's steps, AdamW for the rest; 5 % warm-up, cosine "
    "decay to 0",
    Setting(1e-3, 0.1),
    ADAM_RATES,
    DECAYS,
)

PRODIGY = _packaged("prodigy", "Prodigy", "prodigyopt", "Prodigy", "default, lr=1")
PRODIGY_COSINE = PRODIGY._replace(
    name="prodigy-cosine",
    title="Prodigy + cosine",
    make=partial(with_cosine, "prodigyopt", "Prodigy", warm_up=False, safeguard_warmup=True, use_bias_correction=True),
    note="lr=1, cosine decay to 0, safeguard_warmup, use_bias_correction, weight decay 0.01 as its README recommends",
    default=Setting(decay=0.01),
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
SCHEDULE_FREE_RADAM = _schedule_free(
    "schedulefree-radam", "Schedule-Free RAdam", "RAdamScheduleFree", "default, lr=0.0025, needs no warm-up"
)
DADAPT_ADAM = _packaged("dadapt-adam", "D-Adapt Adam", "dadaptation", "DAdaptAdam", "default, lr=1")
DADAPT_SGD = _packaged("dadapt-sgd", "D-Adapt SGD", "dadaptation", "DAdaptSGD", "default, lr=1, no momentum")
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
COCOB = _packaged("cocob", "COCOB", "parameterfree", "COCOB", "default, alpha=100")
ADAMW_EMA = Method(
    "adamw-ema",
    "AdamW + EMA",
    averaged_adamw,
    "default, no schedule, evaluated at an average of the weights over a tenth of the updates",
    Setting(1e-3, 0.01),
    evaluation_model=weight_average,
    averages=True,
)
KRON = _packaged("kron", "PSGD Kron", "pytorch_optimizer", "Kron", "default, lr=1e-3")
ADAN = _packaged("adan", "Adan", "pytorch_optimizer", "Adan", "default, lr=1e-3")
ADOPT = _packaged("adopt", "ADOPT", "pytorch_optimizer", "ADOPT", "default, lr=1e-3")
LBFGS = _torch(
    "lbfgs",
    "L-BFGS",
    "LBFGS",
    "one iteration an update, strong Wolfe line search; only where the loss has no noise",
    max_iter=1,
    max_eval=25,
    line_search_fn="strong_wolfe",
)._replace(full_batch_only=True)

TUNED = (SGD, MOMENTUM, ADAM, ADAMW_COSINE, MOMENTUM_COSINE, SOAP_COSINE, MUON_COSINE)
"""Optimizers with a learning rate, whose settings are searched."""

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
"""Optimizers that require no tuning, according to their authors."""

AT_DEFAULTS = (ADAGRAD, SCHEDULE_FREE_RADAM, ADAMW_EMA, KRON, ADAN, ADOPT)
"""Optimizers that run with their defaults only."""

OPPONENTS = (*TUNED, *FREE, *AT_DEFAULTS, LBFGS)
