"""Checks of a saved state: every key, shape, type and range is checked before anything is loaded."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsgd.algorithms.networks import Progress
from vsgd.algorithms.strategy import STRATEGIES, UNLIMITED, Config, Totals, strategy_of
from vsgd.torch.batchnorm import Correction
from vsgd.torch.coordinates import precision
from vsgd.torch.devices import sum_dtype
from vsgd.torch.distributed import is_sharded, local_of
from vsgd.torch.state import FIELDS, FORMAT, SIDES, STATISTICS, ParamState, found_layout, is_blank

ALGORITHMS: dict[Any, Any] = {kind.__name__: kind for kind in STRATEGIES}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

COUNTS = ("steps", "unprobed", "skipped", "skipped_in_a_row")
SETTINGS = ("lr", "weight_decay")
NUMBERS = ("samples", "gradient_flops")

MAX_COUNT = 1 << 53
"""Upper bound for counts of steps. Every whole number up to here is a float64."""

BASIS_TOLERANCE = 0.05
"""How far QᵀQ may be from the identity; a basis that was saved in half precision is further off than others."""

SUM_TOLERANCE = 0.1
"""How far sums of statistics may be off, relatively; these may have been rounded to half precision since."""


class Checkpoint(NamedTuple):
    """What `load_state_dict` needs, in memory of its own."""

    algorithms: list[Config]
    """Of each group."""
    states: dict[Tensor, ParamState]
    corrections: dict[str, Correction]


def checked(saved: Any, groups: list[dict[str, Any]]) -> Checkpoint:
    """Return the content of a state dictionary for parameters in these groups. Raise ValueError if it does not fit.

    Every tensor is copied as it is, since the base class would round it.
    """
    if not (is_dict(saved) and is_dict(saved.get("state")) and isinstance(saved.get("param_groups"), list)):
        raise refused("the state is not one of VSGD: it must have a dictionary 'state' and a list 'param_groups'")
    if not all(is_dict(group) and is_dict(group.get("algorithm")) for group in saved["param_groups"]):
        raise refused("the state is not one of VSGD, or was saved by vsgd 0.1 or earlier")
    check_format(saved)
    found = saved["param_groups"]
    sizes, own_sizes = [size_of(group.get("params")) for group in found], [len(group["params"]) for group in groups]
    if sizes != own_sizes:
        raise refused(f"the state is of another model: its parameter groups have sizes {sizes}, these have {own_sizes}")
    for place, group in enumerate(found):
        check_options(group, place)
    names = [name for group in found for name in group["params"]]
    if len({repr(name) for name in names}) != len(names) or not all(isinstance(name, int | str) for name in names):
        raise refused("the state is damaged: 'params' of its groups must be different numbers")
    if unknown := [name for name in saved["state"] if name not in names]:
        raise refused(
            f"the state is of another model: it has a state of parameter {unknown[0]!r}, which is in no group"
        )
    parameters = [parameter for group in groups for parameter in group["params"]]
    states = {p: saved["state"][name] for p, name in zip(parameters, names, strict=True) if name in saved["state"]}
    for parameter, name in zip(parameters, names, strict=True):
        if parameter in states:
            check_state(states[parameter], parameter, name)
    begun = {p: state for p, state in states.items() if not is_blank(state)}
    copies = {p: {key: copied(key, value) for key, value in state.items()} for p, state in begun.items()}
    algorithms = [algorithm_of(group["algorithm"], place) for place, group in enumerate(found)]
    for place, (group, algorithm) in enumerate(zip(found, algorithms, strict=True)):
        check_window(group, algorithm, place)
    return Checkpoint(algorithms, copies, corrections_of(saved.get("statistics", {})))


def check_format(saved: dict[str, Any]) -> None:
    """Refuse a state of another format. A state put together by others, such as shards, may have no number."""
    version = saved.get("format", FORMAT)
    if version != FORMAT:
        raise refused(
            f"the state has format {version!r}, this version of vsgd reads format {FORMAT}; load it with the version "
            "that saved it"
        )


def refused(why: str) -> ValueError:
    return ValueError(f"{why}. Nothing was loaded.")


def copied(key: str, value: Tensor) -> Tensor:
    """Return a copy. The precision of counts and sums does not depend on that of the parameter."""
    dtype = sum_dtype(value.device) if key in ("seen", "steps", "totals") else value.dtype
    return value.detach().to(dtype, copy=True)


def is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def size_of(params: Any) -> int | None:
    return len(params) if isinstance(params, list | tuple) else None


# --- options ------------------------------------------------------------------------------------------------------


def check_options(group: dict[str, Any], place: int) -> None:
    """Refuse a group that lacks an option or has an impossible one. Further options, as of schedulers, are allowed."""
    kinds = {**dict.fromkeys(COUNTS, is_count), **dict.fromkeys(SETTINGS, is_setting)}
    kinds |= {**dict.fromkeys(NUMBERS, is_number), "maximize": is_truth, "averaging": is_averaging}
    kinds |= {"progress": is_progress, "steps_per_epoch": is_steps_per_epoch}
    for name, is_possible in kinds.items():
        if name not in group:
            raise refused(f"the state was saved by vsgd 0.2 or earlier, or is damaged: group {place} has no {name!r}")
        if not is_possible(group[name]):
            raise refused(f"the state is damaged: {name!r} of group {place} is {group[name]!r}")


def is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not is_truth(value) and 0 <= value <= MAX_COUNT


def is_number(value: Any) -> bool:
    """Return whether this is a finite number, or a tensor of one, as a learning rate may be."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype in DTYPES and not value.is_meta and bool(value.isfinite())
    return isinstance(value, int | float) and not is_truth(value) and abs(value) <= sys.float_info.max


def is_setting(value: Any) -> bool:
    """Return whether this is a number that is not negative and that float32 can square."""
    return is_number(value) and bool(0 <= value <= UNLIMITED)


def is_steps_per_epoch(value: Any) -> bool:
    """Return whether `value` is None or a number of steps."""
    return value is None or (is_number(value) and bool(1 <= value <= MAX_COUNT))


def is_averaging(value: Any) -> bool:
    """Return whether `value` has the window, advantage and curvature penalty of the average of the iterates."""
    return are_numbers(value, 3) and bool(1 <= value[0] <= MAX_COUNT)


def is_progress(value: Any) -> bool:
    """Return whether `value` has the fields of `networks.Progress` in their ranges."""
    return are_numbers(value, len(Progress._fields)) and bool(1 <= value[2] <= UNLIMITED and value[3] >= 0)


def check_window(group: dict[str, Any], algorithm: Config, place: int) -> None:
    """Refuse an averaging window that is longer than training can have made it: the average would not move."""
    window, longest = group["averaging"][0], strategy_of(algorithm).max_window(group["steps"], algorithm)
    if window > longest:
        raise refused(
            f"the state is damaged: the averaging window of group {place} is {window:g} after {group['steps']} "
            f"steps, it can be at most {longest:g}"
        )


def are_numbers(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(map(is_number, value))


def algorithm_of(saved: dict[str, Any], place: int) -> Config:
    """Return the constants of a group. All constants of its algorithm must be there."""
    constants = dict(saved)
    kind = ALGORITHMS.get(str(constants.pop("name", None)))
    if kind is None:
        known = " or ".join(kind.__name__ for kind in ALGORITHMS.values())
        raise refused(f"the algorithm of group {place} is {saved.get('name')!r}, VSGD takes {known}")
    for name, default in kind()._asdict().items():
        value = constants.get(name)
        if not (is_truth if is_truth(default) else is_setting)(value):
            raise refused(f"the algorithm of group {place} has {name!r}: {value!r}")
        constants[name] = float(value) if isinstance(value, Tensor) else value
    try:
        config: Config = kind(**constants)
    except (TypeError, ValueError) as error:
        raise refused(f"the algorithm of group {place} is not one of this version ({error})") from None
    return config


def corrections_of(saved: Any) -> dict[str, Correction]:
    """Return the corrections of running statistics. A state put together by others, such as shards, may have none."""
    if not is_dict(saved) or not all(is_correction(each) for each in saved.values()):
        raise refused("the state is damaged: 'statistics' must be three tensors of finite numbers for each layer")
    return {str(key): Correction(*(each.detach().clone() for each in found)) for key, found in saved.items()}


def is_correction(found: Any) -> bool:
    """Return whether this is a shift, a factor that is not negative, and a trust between 0 and 1."""
    if size_of(found) != len(Correction._fields) or any(shape_of(each) is None for each in found):
        return False
    shift, factor, trust = found
    ranges = bool(shift.isfinite().all() and factor.isfinite().all() and (factor >= 0).all())
    return ranges and shift.shape == factor.shape and trust.numel() == 1 and 0 <= float(trust) <= 1


# --- states -------------------------------------------------------------------------------------------------------


def check_state(state: Any, parameter: Tensor, name: Any) -> None:
    """Refuse a state that does not fit its parameter, or that no training could have left."""
    if not is_dict(state):
        raise refused(f"the state is damaged: that of parameter {name} is {type(state).__name__}, not a dictionary")
    if not state:
        return
    found = {key: shape_of(value) for key, value in state.items()}
    wanted = wanted_shapes(found, parameter)
    for key in sorted({*wanted, *found}, key=str):
        if found.get(key) != wanted.get(key, "absent"):
            raise refused(
                f"the state is of another model: {key!r} of parameter {name} has shape {found.get(key)}, it must be "
                f"{wanted.get(key, 'absent')}"
            )
    for key, value in state.items():
        if local_of(value).numel() and not is_possible(key, local_of(value), parameter):
            raise refused(
                f"the state is damaged: {key!r} of parameter {name}, of shape {found[key]}, has numbers that are not "
                "finite, too large or too small"
            )
    if not adds_up(state):
        raise refused(f"the state is damaged: 'totals' of parameter {name} are not the sums of its statistics")
    if not has_memory(state):
        raise refused(f"the state is damaged: 'memory' of parameter {name} is below 1")
    for side in SIDES:
        if f"{side}_basis" in state and not is_basis(state[f"{side}_basis"], state[f"{side}_cov"]):
            raise refused(
                f"the state is damaged: '{side}_basis' of parameter {name} is not orthogonal, or '{side}_cov' is no "
                "covariance"
            )


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an ordinary tensor of real numbers; None for anything else."""
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided or value.dtype not in DTYPES:
        return None
    return tuple(value.shape)


def wanted_shapes(found: dict[Any, Any], parameter: Tensor) -> dict[Any, Any]:
    """Return the shapes of the fields of a parameter, dense or a table, with the bases that it has."""
    layout = found_layout(found, parameter)
    shapes = {field.name: field.shape(layout) for field in FIELDS if not field.is_optional or field.name in found}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def is_possible(key: str, value: Tensor, parameter: Tensor) -> bool:
    """Return whether training can leave these numbers. It skips gradients whose square would overflow."""
    field = next(field for field in FIELDS if field.name == key)
    largest = torch.finfo(torch.float64 if precision(parameter.dtype) == torch.float64 else torch.bfloat16).max
    low, high = (float(each) for each in value.detach().aminmax())
    whole = key != "steps" or low.is_integer()
    return field.low <= low and max(-low, high) <= field.high(largest, parameter.numel()) and whole


def adds_up(state: ParamState) -> bool:
    """Return whether the totals of a dense parameter are the sums of its statistics, and the others in their ranges.

    Of a sharded one this process has a part of the statistics only.
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


def is_basis(q: Tensor, cov: Tensor) -> bool:
    """Return whether QᵀQ = 1 and no covariance is larger than the largest variance."""
    q, cov = (each.detach().to(sum_dtype(each.device)) for each in (q, cov))
    off = q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    variances = cov.diagonal(dim1=-2, dim2=-1)
    largest = variances.amax(-1) * (1 + BASIS_TOLERANCE)
    return bool(
        off.abs().max() <= BASIS_TOLERANCE and variances.min() >= 0 and (cov.abs().amax((-2, -1)) <= largest).all()
    )
