"""Arguments of `VSGD` and settings of its groups, with their checks."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from torch import nn

from vsgd.torch.distributed import AVERAGED, Replicas, check_replicas
from vsgd.torch.frameworks import warn

LEFTOVER_LR = 0.05
"""A factor on the rates below this is more likely a learning rate left over from another optimizer."""

LEFTOVER_STEPS = 20
"""A schedule that has `lr` below `LEFTOVER_LR` for this many steps was probably made for another optimizer."""

LEFTOVER = (
    "{what} multiplies the learning rates that VSGD finds, so training hardly moves. If it is a learning rate or a "
    "schedule for another optimizer, remove it."
)


class Rows(NamedTuple):
    """Setting of `VSGD`: every row of the minibatch is a sample, as in the paper.

        VSGD(model.parameters(), per_sample=Rows(model, reduction="sum"))

    Args:
        model: the model whose parameters are trained.
        reduction: whether the loss is the "mean" or the "sum" over the rows.
        reweight: whether each row is weighted by one over the number of rows whose gradients interfere with its own
            (section 4.1 of the paper).
    """

    model: nn.Module
    reduction: Literal["mean", "sum"] = "mean"
    reweight: bool = False


class Deprecated(NamedTuple):
    """Arguments of version 0.2, each with its value if it was given."""

    reduction: Any = None
    reweight: Any = None
    samples: Any = None
    reduce_dtype: Any = None
    process_group: Any = None


class SampleSettings(NamedTuple):
    """Checked settings of what a sample is."""

    rows: Rows | None
    replicas: Replicas


def check_sampling(
    per_sample: nn.Module | Rows | None, distributed: Replicas | None, old: dict[str, Any]
) -> SampleSettings:
    """Return the settings of what a sample is, or raise if they do not fit together.

    Args:
        per_sample: argument of `VSGD`.
        distributed: argument of `VSGD`.
        old: arguments of version 0.2, which are deprecated.
    """
    unknown = old.keys() - set(Deprecated._fields)
    if unknown:
        raise TypeError(f"VSGD got an unexpected argument {min(unknown)!r}")
    rows = Rows(per_sample) if isinstance(per_sample, nn.Module) else per_sample
    if rows is not None and not (isinstance(rows, Rows) and isinstance(rows.model, nn.Module)):
        raise TypeError(f"per_sample is {per_sample!r}, it must be a model or a vsgd.torch.Rows")
    if old:
        rows, distributed = translate(Deprecated(**old), rows, distributed)
    if rows is not None and rows.reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {rows.reduction!r}, it must be 'mean' or 'sum'")
    replicas = AVERAGED if distributed is None else check_replicas(distributed)
    if replicas.as_samples and rows is not None:
        raise ValueError("with per_sample every row is a sample, so replicas cannot be: Replicas(as_samples=False)")
    return SampleSettings(rows, replicas)


def translate(old: Deprecated, rows: Rows | None, distributed: Replicas | None) -> tuple[Rows | None, Replicas | None]:
    """Return the settings that deprecated arguments stand for."""
    for_rows = {name: value for name in ("reduction", "reweight") if (value := getattr(old, name)) is not None}
    for_replicas = {
        name: value for name in ("reduce_dtype", "process_group") if (value := getattr(old, name)) is not None
    }
    if old.samples not in (None, "minibatch", "replicas"):
        raise ValueError(f"samples is {old.samples!r}, it must be 'minibatch' or 'replicas'")
    if for_rows:
        arguments = ", ".join(f"{name}={value!r}" for name, value in for_rows.items())
        warn(f"VSGD({arguments}) is deprecated; use per_sample=vsgd.torch.Rows(model, {arguments})", DeprecationWarning)
        if rows is None:
            if for_rows.get("reweight"):
                raise ValueError("reweight needs the model: per_sample=vsgd.torch.Rows(model, reweight=True)")
        else:
            rows = rows._replace(**for_rows)
    if for_replicas or old.samples is not None:
        as_samples = old.samples == "replicas"
        given = {"as_samples": as_samples, **for_replicas}
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        warn(
            "the arguments samples, reduce_dtype and process_group of VSGD are deprecated; use "
            f"distributed=vsgd.torch.Replicas({arguments})",
            DeprecationWarning,
        )
        distributed = Replicas(**given)
    return rows, distributed


def check_settings(group: dict[str, Any]) -> None:
    """Raise unless `lr` and `weight_decay` of a group are finite numbers that are not negative."""
    for name in ("lr", "weight_decay"):
        try:
            value = float(group[name])
        except (TypeError, ValueError):
            raise ValueError(f"{name} is {group[name]!r}, it must be a number") from None
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value:g}, it must be finite and at least 0")


class LearningRateWatch:
    """Warns once of an `lr` that was probably chosen for another optimizer."""

    def __init__(self) -> None:
        self._largest = 0.0

    def see_new_group(self, lr: Any) -> None:
        """Warn if a new group has a small `lr`."""
        if isinstance(lr, float) and 0 < lr < LEFTOVER_LR:
            self._largest = LEFTOVER_LR  # one warning is enough
            warn(LEFTOVER.format(what=f"lr={lr:g}"))

    def see_step(self, groups: list[dict[str, Any]]) -> None:
        """Raise if a setting is impossible. Warn if `lr` was small in all of the first steps."""
        for group in groups:
            check_settings(group)
        self._largest = max(self._largest, *(float(group["lr"]) for group in groups))
        if groups[0]["steps"] == LEFTOVER_STEPS and 0 < self._largest < LEFTOVER_LR:
            what = f"an lr of at most {self._largest:g} in the first {LEFTOVER_STEPS} steps"
            warn(LEFTOVER.format(what=what))
