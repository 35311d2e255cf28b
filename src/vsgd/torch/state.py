"""The state of a parameter: one table of its fields, from which state is allocated, viewed and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vsgd.algorithms.strategy import MIN_PROBE, UNLIMITED, Config, Totals, strategy_of
from vsgd.eigenbasis import columns, is_full
from vsgd.torch.coordinates import precision
from vsgd.torch.devices import CPU, sum_dtype
from vsgd.torch.distributed.shards import like, local_of

ParamState = dict[str, Tensor]

FORMAT = 4
"""Version of the layout of `state_dict`. Version 0.2 of this package wrote no number."""

SIDES = ("left", "right")

Shape = tuple[int, ...]


class Bounds(NamedTuple):
    """Range of the numbers of one field."""

    low: float
    high: str
    """Upper bound of their absolute values, a key of `upper_bounds`."""


INF = math.inf
FIELDS = {
    "grad": Bounds(-INF, "gradient"),  # ḡ, moving average of the gradient
    "grad_sq": Bounds(0.0, "square"),  # v̄, of the squared gradient
    "curv": Bounds(-INF, "curvature"),  # h̄^fd, of the curvature
    "curv_sq": Bounds(0.0, "squared curvature"),  # v̄^fd, of the squared curvature
    "memory": Bounds(-INF, "count"),  # τ, the horizon of the averages in samples
    "iterate": Bounds(-INF, "gradient"),  # θ, where the parameter holds the average
    "average": Bounds(-INF, "gradient"),  # θ̄, where the parameter is of lower precision
    "seen": Bounds(0.0, "count"),  # samples so far, of a table for each row
    "steps": Bounds(0.0, "count"),  # steps with a gradient
    "totals": Bounds(-INF, "sum"),  # `Totals` of the tensor
    "left_basis": Bounds(-INF, "sum"),  # Q_L, or V and N of 1 − N Vᵀ
    "left_cov": Bounds(-INF, "square"),  # L, covariance of the rows of the gradient, or L U
    "right_basis": Bounds(-INF, "sum"),  # Q_R, or V and N
    "right_cov": Bounds(-INF, "square"),  # R, covariance of the columns, or R U
}
"""All fields. Coordinates are those of the basis for statistics, and the parameter's own for iterates and averages."""

STATISTICS = tuple(FIELDS)[:5]
"""The fields of an algorithm's own state, in the order of `Coordinates.statistics`."""

OPTIONAL = ("iterate", "average")
"""Fields that a state may lack."""

BASIS_FIELDS = tuple(FIELDS)[-4:]
"""The fields of `vsgd.eigenbasis.Basis`, in its order."""

SUMS = ("seen", "steps", "totals")
"""Counts and sums over many coordinates, whose precision does not depend on that of the parameter."""


def upper_bounds(largest: float, size: int) -> dict[str, float]:
    """Return bounds of numbers, from the largest number of their precision and the size of their parameter."""
    return {
        "gradient": math.sqrt(largest) * MIN_PROBE,
        "square": largest * MIN_PROBE,
        "curvature": math.sqrt(largest) / 10,
        "squared curvature": largest / 100,  # second moments of the curvature may yet be inflated
        "count": UNLIMITED,
        "sum": largest * size,
    }


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return the rows and columns of a tensor as a matrix."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape), 1)


def shapes_of(shape: Shape, table: bool, sizes: Sequence[int]) -> dict[str, Shape]:
    """Return the shapes of all fields of a parameter.

    Args:
        shape: shape of the parameter.
        table: whether its rows have counts of their own.
        sizes: sizes of the basis on both sides; 1 leaves a side as it is.
    """
    shapes = dict.fromkeys((*STATISTICS, *OPTIONAL), shape)
    if table:
        return {**shapes, "seen": shape[:1]}
    shapes |= {"seen": (1,), "steps": (1,), "totals": (len(Totals._fields),)}
    for side, width, size in zip(SIDES, matrix_shape(shape), sizes, strict=True):
        if size > 1:
            shapes |= {f"{side}_basis": (width, columns(width, size)), f"{side}_cov": (width, size)}
    return shapes


def coarse_fields(dtype: torch.dtype, config: Config, compact: bool) -> frozenset[str]:
    """Return the statistics that are stored in bfloat16: curvature where it suffices, with `compact` all."""
    if precision(dtype) == torch.float64 or not strategy_of(config).coarse_curvature:
        return frozenset()
    return frozenset(STATISTICS if compact else ("curv", "curv_sq"))


def storage_of(name: str, table: bool, device: torch.device, dtype: torch.dtype) -> tuple[torch.device, torch.dtype]:
    """Return the device and the precision of a field of a parameter on `device`, whose own precision is `dtype`.

    Counts of dense parameters are on the CPU, where reading them needs no synchronization.
    """
    is_on_cpu = name in ("seen", "steps") and not table
    return CPU if is_on_cpu else device, sum_dtype(device) if name in SUMS else dtype


def placed(state: ParamState, device: torch.device) -> ParamState:
    """Return the state of a parameter on `device`.

    A loaded state and that of a model that was moved are on another device until the next step. Counts and totals may
    have a precision that the device of the parameter does not have.
    """
    table = is_table(state)
    return {name: value.to(*storage_of(name, table, device, value.dtype)) for name, value in state.items()}


def new_state(
    parameter: Tensor, config: Config, table: bool, compact: bool, sizes: tuple[int, int] = (1, 1)
) -> ParamState:
    """Return the state of a parameter before its first sample; `sizes` are those of its basis.

    Rows of a table are never compact.
    """
    part, state = local_of(parameter), {}
    coarse = coarse_fields(parameter.dtype, config, compact and not table)
    for name, shape in shapes_of(tuple(parameter.shape), table, sizes).items():
        own = torch.bfloat16 if name in coarse else precision(parameter.dtype)
        device, dtype = storage_of(name, table, part.device, own)
        if name in STATISTICS:
            state[name] = like(parameter, torch.zeros_like(part, dtype=dtype))
        elif name not in OPTIONAL:
            state[name] = torch.zeros(shape, dtype=dtype, device=device)
    for side in SIDES:
        if f"{side}_basis" in state and is_full(state[f"{side}_basis"]):  # 1 − N Vᵀ is the identity if both are zero
            state[f"{side}_basis"] += torch.eye(state[f"{side}_basis"].shape[-1], device=part.device)
    if not table:  # rows of a table get it when they are first touched: a large table is not written
        local_of(state["memory"]).fill_(config.memory)
    return state


def is_table(state: ParamState) -> bool:
    """Return whether the samples of every row are counted apart."""
    return state["seen"].numel() > 1


def is_decoupled(parameter: Tensor, state: ParamState, config: Config) -> bool:
    """Return whether coordinates are those of an eigenbasis. Vectors and rows of tables count as such."""
    if not strategy_of(config).rotates(config):
        return False
    return is_table(state) or min(matrix_shape(parameter.shape)) == 1 or any(f"{s}_basis" in state for s in SIDES)
