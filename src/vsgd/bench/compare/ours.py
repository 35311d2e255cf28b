"""vSGD: its default, the paper's, and the default with one deviation from the paper taken back at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from vsgd.bench.compare.methods import Method, trainable
from vsgd.options import NETWORKS, PAPER, Options
from vsgd.torch import VSGD

OURS = "vsgd"


def default(model: nn.Module, _: None, updates: int) -> Any:
    return VSGD(trainable(model))


def with_options(options: Options, model: nn.Module, _: None, updates: int) -> Any:
    return VSGD(trainable(model), options=options)


def _variant(name: str, title: str, options: Options, note: str) -> Method:
    return DEFAULT._replace(name=name, title=title, make=partial(with_options, options), note=note)


def _without(name: str, title: str, **changes: Any) -> Method:
    note = ", ".join(f"{key}={value:g}" for key, value in changes.items())
    return _variant(f"vsgd-{name}", title, NETWORKS._replace(**changes), f"`NETWORKS._replace({note})`")


DEFAULT = Method(OURS, "vSGD", default, "`VSGD(model.parameters())`", package="vsgd", module="vsgd", sparse=True)
AS_PUBLISHED = _variant("vsgd-paper", "vSGD, paper", PAPER, "`VSGD(model.parameters(), options=PAPER)`")

ABLATIONS = (
    DEFAULT,
    _without("shift", "shift δ = ḡ", tensor_probe=0.0, epsilon=PAPER.epsilon),
    _without("memory", "memory not limited", memory_limit=0.0),
    _without("slow-start", "no slow start", slow_start=1.0),
    _without("neighbours", "curvature each for itself", neighbours=0.0),
    _without("every", "curvature at every step", curvature_every=1.0),
    _without("average", "no averaging", average_iterates=False),
    _without("bootstrap", "bootstrap of 10", bootstrap=10.0),
    _without("outliers", "outliers not detected", detect_outliers=False),
)
