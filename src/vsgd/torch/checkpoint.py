"""Check a saved state: every key, shape, type and range, before anything is loaded."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.algorithms.strategy import STRATEGIES, UNLIMITED, Config, Totals, strategy_of
from vsgd.eigenbasis import halves, is_full
from vsgd.torch.coordinates import precision
from vsgd.torch.devices import sum_dtype
from vsgd.torch.distributed.shards import is_sharded, local_of
from vsgd.torch.state import (
    FIELDS,
    FORMAT,
    OPTIONAL,
    SIDES,
    STATISTICS,
    SUMS,
    ParamState,
    Shape,
    shapes_of,
    upper_bounds,
)

ALGORITHMS: dict[Any, Any] = {kind.__name__: kind for kind in STRATEGIES}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

MAX_COUNT = 1 << 53
"""Upper bound for counts of steps. Every whole number up to here is a float64."""

SUM_TOLERANCE = 0.1
"""Maximum relative error of sums of statistics, which may have been rounded to half precision since."""

BASIS_TOLERANCE = 0.05
"""Maximum deviation of QᵀQ from the identity. It is largest for a basis that was saved in half precision."""


class Checkpoint(NamedTuple):
    """Content of a state dictionary, copied."""

    algorithms: list[Config]
    """The algorithm of each group."""
    states: dict[Tensor, ParamState]


def checked(saved: Any, groups: list[dict[str, Any]]) -> Checkpoint:
    """Return the content of a state dictionary.

    Tensors are copied in their own precision. The base class would round them to the precision of the parameter.

    Args:
        saved: the state dictionary.
        groups: the parameter groups to load it for.

    Raises:
        ValueError: the state does not fit the groups, or no training can have left it.
    """
    check_structure(saved, groups)
    algorithms = [check_group(group, number) for number, group in enumerate(saved["param_groups"])]
    names = [name for group in saved["param_groups"] for name in group["params"]]
    if len({repr(name) for name in names}) != len(names) or not all(isinstance(name, int | str) for name in names):
        raise refused("the state is damaged: 'params' of its groups must be different numbers")
    if unknown := [name for name in saved["state"] if name not in names]:
        raise refused(
            f"the state is of another model: it has a state of parameter {unknown[0]!r}, which is in no group"
        )
    states = {}
    for parameter, name in zip((p for group in groups for p in group["params"]), names, strict=True):
        if name in saved["state"]:
            state = saved["state"][name]
            if (fault := fault_of(state, parameter, name)) is not None:
                raise refused(fault)
            if not is_blank(state):
                states[parameter] = {key: copied(key, value) for key, value in state.items()}
    return Checkpoint(algorithms, states)


def refused(why: str) -> ValueError:
    return ValueError(f"{why}. Nothing was loaded.")


def copied(key: str, value: Tensor) -> Tensor:
    """Return a copy. The precision of counts and sums does not depend on that of the parameter."""
    dtype = sum_dtype(value.device) if key in SUMS else value.dtype
    return value.detach().to(dtype, copy=True)


def check_structure(saved: Any, groups: list[dict[str, Any]]) -> None:
    """Raise ValueError unless the state has the format of this version, and groups of the same sizes.

    A state that was assembled by other software, for example from shards, may have no format number.
    """
    parts = saved if isinstance(saved, dict) else {}
    found = parts.get("param_groups")
    if not (isinstance(parts.get("state"), dict) and isinstance(found, list)):
        raise refused("the state is not one of VSGD: it must have a dictionary 'state' and a list 'param_groups'")
    if not all(isinstance(group, dict) and isinstance(group.get("algorithm"), dict) for group in found):
        raise refused("the state is not one of VSGD, or was saved by vsgd 0.1 or earlier")
    version = parts.get("format", FORMAT)
    if not (isinstance(version, int) and version == FORMAT):
        raise refused(
            f"the state has format {version!r}, this version of vsgd reads format {FORMAT}; load it with the version "
            "that saved it"
        )
    params = [group.get("params") for group in found]
    sizes = [len(each) if isinstance(each, list | tuple) else None for each in params]
    own_sizes = [len(group["params"]) for group in groups]
    if sizes != own_sizes:
        raise refused(f"the state is of another model: its parameter groups have sizes {sizes}, these have {own_sizes}")


# --- groups ---------------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Return whether this is a finite number, or a tensor of one, as a learning rate may be."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype in DTYPES and not value.is_meta and bool(value.isfinite())
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def fits(value: Any, rule: Any) -> bool:
    """Return whether a value is what a rule of `OPTIONS` allows."""
    if rule is bool:
        return isinstance(value, bool)
    if isinstance(rule, list):
        return isinstance(value, list) and len(value) == len(rule) and all(map(fits, value, rule))
    if isinstance(rule, range):
        return isinstance(value, int) and not isinstance(value, bool) and value in rule
    low, high = rule
    return is_number(value) and bool(low <= value <= high)


COUNT = range(MAX_COUNT + 1)
FINITE = (-math.inf, math.inf)
SETTING = (0, UNLIMITED)  # float32 can square it
OPTIONS = {
    **dict.fromkeys(("steps", "unprobed", "skipped", "skipped_in_a_row"), COUNT),
    **dict.fromkeys(("lr", "weight_decay"), SETTING),
    **dict.fromkeys(("samples", "gradient_flops"), (0, math.inf)),
    "maximize": bool,
    "averaging": [(1, MAX_COUNT), FINITE, FINITE],  # the fields of `networks.Averaging`, and the last penalty
    "progress": [FINITE, FINITE, (1, UNLIMITED), (0, math.inf)],  # the fields of `networks.Progress`
    "steps_per_epoch": (1, MAX_COUNT),
}
"""Options of a group, and their rules: a type, whole numbers, bounds of a finite number, or a list of rules."""


def check_group(group: dict[str, Any], number: int) -> Config:
    """Return the algorithm of a group. Raise ValueError if it lacks an option or has an impossible one.

    Further options, as those of schedulers, are allowed.
    """
    for name, rule in OPTIONS.items():
        if name not in group:
            raise refused(f"the state was saved by vsgd 0.2 or earlier, or is damaged: group {number} has no {name!r}")
        is_left_out = name == "steps_per_epoch" and group[name] is None
        if not is_left_out and not fits(group[name], rule):
            raise refused(f"the state is damaged: {name!r} of group {number} is {group[name]!r}")
    algorithm = algorithm_of(group["algorithm"], number)
    window, steps = group["averaging"][0], group["steps"]
    longest = strategy_of(algorithm).max_window(steps, algorithm)
    if window > longest:  # the average would not move
        raise refused(
            f"the state is damaged: the averaging window of group {number} is {window:g} after {steps} steps, it can "
            f"be at most {longest:g}"
        )
    return algorithm


def algorithm_of(saved: dict[str, Any], number: int) -> Config:
    """Return the algorithm of a group. All of its constants must be given."""
    constants = dict(saved)
    kind = ALGORITHMS.get(str(constants.pop("name", None)))
    if kind is None:
        raise refused(f"the algorithm of group {number} is {saved.get('name')!r}, VSGD takes {' or '.join(ALGORITHMS)}")
    for name, default in kind()._asdict().items():
        value = constants.get(name)
        if not fits(value, bool if isinstance(default, bool) else SETTING):
            raise refused(f"the algorithm of group {number} has {name!r}: {value!r}")
        constants[name] = float(value) if isinstance(value, Tensor) else value
    try:
        config: Config = kind(**constants)
    except (TypeError, ValueError) as error:
        raise refused(f"the algorithm of group {number} is not one of this version ({error})") from None
    return config


# --- states ---------------------------------------------------------------------------------------------------------


def fault_of(state: Any, parameter: Tensor, name: Any) -> str | None:
    """Return why a state does not fit its parameter, or why no training can have left it; None if all is well."""
    if not isinstance(state, dict):
        return f"the state is damaged: that of parameter {name} is {type(state).__name__}, not a dictionary"
    if not state:
        return None
    found = {key: shape_of(value) for key, value in state.items()}
    wanted = wanted_shapes(found, parameter)
    for key in sorted({*wanted, *found}, key=str):
        if found.get(key) != wanted.get(key, "absent"):
            return (
                f"the state is of another model: {key!r} of parameter {name} has shape {found.get(key)}, it must be "
                f"{wanted.get(key, 'absent')}"
            )
    for key, fault in faults_in(state, parameter):
        return f"the state is damaged: {key!r} of parameter {name} {fault}"
    return None


def faults_in(state: ParamState, parameter: Tensor) -> Iterator[tuple[str, str]]:
    """Yield fields with contents that no training can have left. All fields have the right shapes."""
    for key, value in state.items():
        if local_of(value).numel() and not is_possible(key, local_of(value), parameter):
            yield key, "has numbers that are not finite, too large or too small"
    if not has_totals(state):
        yield "totals", "has other numbers than the sums of its statistics"
    if not has_memory(state):
        yield "memory", "is below 1"
    yield from basis_faults(state)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an ordinary tensor of real numbers; None for anything else."""
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided or value.dtype not in DTYPES:
        return None
    return tuple(value.shape)


def wanted_shapes(found: dict[Any, Any], parameter: Tensor) -> dict[Any, Any]:
    """Return the shapes that the fields of a state must have, with the bases that it has."""
    shape = tuple(parameter.shape)
    table = bool(shape) and shape[0] > 1 and found.get("seen") == shape[:1]
    shapes = shapes_of(shape, table, basis_sizes(found))
    return {name: shape for name, shape in shapes.items() if name in found or name not in OPTIONAL}


def basis_sizes(shapes: Mapping[str, Shape | None]) -> list[int]:
    """Return the sizes of the basis on both sides, from the shapes of its fields; 1 for a side without one.

    A side with a basis has at least 2, so that `shapes_of` includes it even if its shape is impossible.
    """
    sizes = []
    for side in SIDES:
        width, count = ((1, 1) + (shapes.get(f"{side}_basis") or ()))[-2:]
        sizes.append(max(count if count == width else count // 2, 2) if f"{side}_basis" in shapes else 1)
    return sizes


def is_possible(key: str, value: Tensor, parameter: Tensor) -> bool:
    """Return whether training can leave these numbers. It skips gradients whose square would overflow."""
    bounds = FIELDS[key]
    largest = torch.finfo(torch.float64 if precision(parameter.dtype) == torch.float64 else torch.bfloat16).max
    low, high = (float(each) for each in value.detach().aminmax())
    whole = key != "steps" or low.is_integer()
    return bounds.low <= low and max(-low, high) <= upper_bounds(largest, parameter.numel())[bounds.high] and whole


def has_totals(state: ParamState) -> bool:
    """Return whether the totals of a dense parameter are the sums of its statistics, and the others in their ranges.

    A sharded parameter is not checked, since this process has only a part of its statistics.
    """
    if "totals" not in state or is_sharded(state["grad"]):
        return True
    dtype = sum_dtype(state["grad"].device)
    grad, grad_sq, curv, curv_sq = (state[key].detach().to(dtype) for key in STATISTICS[:4])
    sums = torch.stack([part.sum() for part in (grad_sq, grad.square(), curv.abs(), curv_sq)])
    totals = state["totals"].detach().to(sums)
    lengths, momentum = totals[4:7], Totals(*totals).momentum
    are_sums = ((sums - totals[:4]).abs() <= SUM_TOLERANCE * sums).all()
    return bool(are_sums and ((lengths >= 0) & (lengths <= UNLIMITED)).all() and 0 <= momentum <= 1)


def has_memory(state: ParamState) -> bool:
    """Return whether τ ≥ 1, except in rows of a table that were never touched."""
    memory, seen = local_of(state["memory"].detach()), state["seen"].detach().to(state["memory"].device)
    untouched = (seen == 0).view(-1, *[1] * (memory.dim() - 1)) if seen.numel() > 1 else memory < memory
    return bool(((memory >= 1) | untouched).all())


def basis_faults(state: ParamState) -> Iterator[tuple[str, str]]:
    """Yield the bases that no training can have left, and why: QᵀQ ≠ 1, or a covariance above the largest variance."""
    for side in SIDES:
        if f"{side}_basis" not in state:
            continue
        parts = state[f"{side}_basis"], state[f"{side}_cov"]
        q, cov = (each.detach().to(sum_dtype(each.device)) for each in parts)
        if not is_orthogonal(q) or (is_full(q) and not is_covariance(cov)):
            yield f"{side}_basis", f"is not orthogonal, or '{side}_cov' is no covariance"


def is_orthogonal(q: Tensor) -> bool:
    """Return whether QᵀQ = 1, up to the rounding of half precision."""
    if is_full(q):
        off = q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
        return bool(off.abs().max() <= BASIS_TOLERANCE)
    # QᵀQ − 1 = Z K Zᵀ with Z = (V N); its norm needs no matrix of width × width
    v, n = halves(q)
    one = torch.eye(v.shape[-1], dtype=q.dtype, device=q.device)
    k = torch.cat([torch.cat([n.mT @ n, -one], 1), torch.cat([-one, 0 * one], 1)])
    product = k @ (q.mT @ q)
    return bool((product * product.mT).sum().abs().sqrt() <= BASIS_TOLERANCE * len(product))


def is_covariance(cov: Tensor) -> bool:
    """Return whether no covariance is larger than the largest variance."""
    variances = cov.diagonal()
    return bool(variances.min() >= 0 and cov.abs().max() <= variances.max() * (1 + BASIS_TOLERANCE))


def is_blank(state: ParamState) -> bool:
    """Return whether the state of a dense parameter has not begun to learn."""
    return "steps" in state and float(state["steps"]) == 0
