"""vSGD: its default, the algorithm of the paper, and the default without one of its differences from the paper."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from vsgd import NETWORKS, PAPER, Networks, Paper
from vsgd.torch import VSGD
from vsgd_bench.compare.methods import Budget, Method, Setting, trainable

OURS = "vsgd"


def default(model: nn.Module, setting: Setting, budget: Budget) -> Any:
    return with_algorithm(NETWORKS, model, setting, budget)


def with_algorithm(algorithm: Networks | Paper, model: nn.Module, setting: Setting, budget: Budget) -> Any:
    """Return the optimizer. `steps_per_epoch` is set if there is more than one epoch."""
    steps_per_epoch = None if budget.epochs == 1 or algorithm is PAPER else budget.updates / budget.epochs
    return VSGD(trainable(model), algorithm=algorithm, steps_per_epoch=steps_per_epoch)


def without_decay(model: nn.Module, setting: Setting, budget: Budget) -> Any:
    return VSGD(trainable(model))


def _variant(name: str, title: str, algorithm: Networks | Paper, note: str) -> Method:
    return DEFAULT._replace(name=name, title=title, make=partial(with_algorithm, algorithm), note=note)


def _without(name: str, title: str, **changes: Any) -> Method:
    note = ", ".join(f"{key}={value:g}" for key, value in changes.items())
    return _variant(f"vsgd-{name}", title, NETWORKS._replace(**changes), f"`NETWORKS._replace({note})`")


def constant_changed(name: str, constant: str, factor: float) -> Method:
    """Return the default with one constant multiplied by a factor."""
    changed = NETWORKS._replace(**{constant: factor * getattr(NETWORKS, constant)})
    return _variant(name, f"{constant} ×{factor:g}", changed, f"`{constant}` multiplied by {factor:g}")


DEFAULT = Method(
    OURS,
    "vSGD",
    default,
    "`VSGD(model.parameters(), steps_per_epoch=len(loader))`",
    package="vsgd",
    module="vsgd",
    sparse=True,
)
AS_PUBLISHED = _variant("vsgd-paper", "vSGD, paper", PAPER, "`VSGD(model.parameters(), algorithm=PAPER)`")

ABLATIONS = (
    DEFAULT,
    _without("eigenbasis", "no eigenbasis", eigenbasis=False),
    _without("step-limit", "steps not limited", step_limit=1e6),
    _without("grad-clip", "gradients not clipped", grad_clip=1e6),
    _without("memory", "memory not capped", min_memory_cap=1e6),
    _without("inflation", "no variance inflation", variance_inflation=1.0),
    _without("shrinkage", "curvature not shrunk", shrinkage=0.0),
    _without("interval", "a second gradient at every step", probe_interval=1.0),
    _without("average", "no averaging", average_iterates=False),
    _without("window", "no minimum window", window_share=0.0),
    _without("horizon", "rates for a single step", max_horizon=1.0),
    DEFAULT._replace(name="vsgd-decay", title="no weight decay", make=without_decay, note="`VSGD(model.parameters())`"),
    _without("momentum", "no momentum", max_momentum=0.0),
    _without("bootstrap", "bootstrap of 10", bootstrap=10.0),
    _without("outliers", "outliers not detected", outlier_sigmas=1e6),
)
