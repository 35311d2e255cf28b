"""The state of a parameter: one table of its fields, from which state is allocated, viewed, checked and documented."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vsgd.algorithms.strategy import MIN_PROBE, UNLIMITED, Config, Totals, strategy_of
from vsgd.torch.coordinates import precision
from vsgd.torch.devices import sum_dtype
from vsgd.torch.distributed.shards import like, local_of

ParamState = dict[str, Tensor]

FORMAT = 3
"""Version of the layout of `state_dict`. Version 0.2 of this package wrote no number."""

SIDES = ("left", "right")

Shape = tuple[int, ...]


class Field(NamedTuple):
    """One tensor of the state of a parameter."""

    name: str
    low: float
    """Lower bound of its numbers."""
    high: str
    """Upper bound of their absolute values, a key of `upper_bounds`."""
    meaning: str
    is_optional: bool = False
    """Whether a state may lack it."""


INF = math.inf
FIELDS = (
    Field("grad", -INF, "gradient", "ḡ, moving average of the gradient"),
    Field("grad_sq", 0.0, "square", "v̄, moving average of the squared gradient"),
    Field("curv", -INF, "curvature", "h̄^fd, of the curvature"),
    Field("curv_sq", 0.0, "squared curvature", "v̄^fd, of the squared curvature"),
    Field("memory", -INF, "count", "τ, the horizon of the averages in samples"),
    Field("iterate", -INF, "gradient", "θ, where the parameter holds the average", True),
    Field("average", -INF, "gradient", "θ̄, where the parameter is of lower precision", True),
    Field("seen", 0.0, "count", "samples so far, of a table for each row"),
    Field("steps", 0.0, "count", "steps with a gradient"),
    Field("totals", -INF, "sum", "`Totals` of the tensor"),
    Field("left_basis", -INF, "sum", "Q_L, blocks of the eigenbasis"),
    Field("left_cov", -INF, "square", "L, covariance of the rows of the gradient"),
    Field("right_basis", -INF, "sum", "Q_R"),
    Field("right_cov", -INF, "square", "R, covariance of the columns"),
)
"""All fields. Coordinates are those of the basis for statistics, and the parameter's own for iterates and averages."""

STATISTICS = tuple(field.name for field in FIELDS[:5])
"""The fields of an algorithm's own state, in the order of `Coordinates.statistics`."""

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


def shapes_of(shape: Shape, table: bool, blocks: Sequence[int]) -> dict[str, Shape]:
    """Return the shapes of all fields of a parameter.

    Args:
        shape: shape of the parameter.
        table: whether its rows have counts of their own.
        blocks: block sizes of the basis on both sides; 1 leaves a side as it is.
    """
    shapes = dict.fromkeys((*STATISTICS, "iterate", "average"), shape)
    if table:
        return {**shapes, "seen": shape[:1]}
    shapes |= {"seen": (1,), "steps": (1,), "totals": (len(Totals._fields),)}
    for side, length, size in zip(SIDES, matrix_shape(shape), blocks, strict=True):
        if size > 1:
            shapes |= dict.fromkeys((f"{side}_basis", f"{side}_cov"), (length // size, size, size))
    return shapes


def coarse_fields(dtype: torch.dtype, config: Config, compact: bool) -> frozenset[str]:
    """Return the statistics that are stored in bfloat16: curvature where it suffices, with `compact` all."""
    if precision(dtype) == torch.float64 or not strategy_of(config).coarse_curvature:
        return frozenset()
    return frozenset(STATISTICS if compact else ("curv", "curv_sq"))


def new_state(
    parameter: Tensor, config: Config, table: bool, compact: bool, blocks: tuple[int, int] = (1, 1)
) -> ParamState:
    """Return the state of a parameter before its first sample; `blocks` are the block sizes of its basis.

    Counts of dense parameters are on the CPU, where reading them needs no synchronization. Rows of a table are never
    compact.
    """
    shapes, part, state = shapes_of(tuple(parameter.shape), table, blocks), local_of(parameter), {}
    coarse = coarse_fields(parameter.dtype, config, compact and not table)
    for field in FIELDS:
        name = field.name
        if name not in shapes or field.is_optional:
            continue
        own = torch.bfloat16 if name in coarse else precision(parameter.dtype)
        dtype = sum_dtype(parameter.device) if name in SUMS else own
        if name in STATISTICS:
            state[name] = like(parameter, torch.zeros_like(part, dtype=dtype))
        else:
            on_cpu = name in ("seen", "steps") and not table
            state[name] = torch.zeros(shapes[name], dtype=dtype, device="cpu" if on_cpu else part.device)
    for side in SIDES:
        if f"{side}_basis" in state:
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


def is_blank(state: ParamState) -> bool:
    """Return whether the state of a dense parameter has not begun to learn."""
    return "steps" in state and float(state["steps"]) == 0
