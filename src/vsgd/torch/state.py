"""The state of a parameter: one table of its fields, from which state is allocated, viewed, checked and documented."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Layout(NamedTuple):
    """What decides which fields the state of a parameter has, and their shapes and precisions."""

    shape: Shape
    dtype: torch.dtype
    is_table: bool = False
    """Whether the rows of the parameter have counts of their own."""
    blocks: tuple[int, int] = (1, 1)
    """Block sizes of the basis on both sides; 1 leaves a side as it is."""
    coarse: frozenset[str] = frozenset()
    """Fields in bfloat16."""
    sums: torch.dtype = torch.float64
    """Precision of counts and totals."""


class Field(NamedTuple):
    """One tensor of the state of a parameter."""

    name: str
    shape: Callable[[Layout], Shape | None]
    """The shape; None if the parameter has no such field."""
    dtype: Callable[[Layout], torch.dtype]
    low: float
    """Lower bound of its numbers."""
    high: Callable[[float, int], float]
    """Upper bound of their absolute values, from the largest number of the precision and the parameter's size."""
    meaning: str
    is_optional: bool = False
    """Whether a state may lack it though `shape` is not None."""


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return the rows and columns of a tensor as a matrix."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape), 1)


def _whole(layout: Layout) -> Shape:
    return layout.shape


def _counts(layout: Layout) -> Shape:
    return layout.shape[:1] if layout.is_table else (1,)


def _dense(*shape: int) -> Callable[[Layout], Shape | None]:
    return lambda layout: None if layout.is_table else shape


def _side(side: int) -> Callable[[Layout], Shape | None]:
    def shape(layout: Layout) -> Shape | None:
        size = layout.blocks[side]
        return (matrix_shape(layout.shape)[side] // size, size, size) if size > 1 and not layout.is_table else None

    return shape


def _statistic(name: str) -> Callable[[Layout], torch.dtype]:
    return lambda layout: torch.bfloat16 if name in layout.coarse else precision(layout.dtype)


def _precision(layout: Layout) -> torch.dtype:
    return precision(layout.dtype)


def _sums(layout: Layout) -> torch.dtype:
    return layout.sums


def _gradient(largest: float, size: int) -> float:
    return math.sqrt(largest) * MIN_PROBE


def _square(largest: float, size: int) -> float:
    return largest * MIN_PROBE


def _count(largest: float, size: int) -> float:
    return UNLIMITED


INF = math.inf
FIELDS = (
    Field("grad", _whole, _statistic("grad"), -INF, _gradient, "ḡ, moving average of the gradient"),
    Field("grad_sq", _whole, _statistic("grad_sq"), 0.0, _square, "v̄, moving average of the squared gradient"),
    # second moments of the curvature may yet be inflated
    Field("curv", _whole, _statistic("curv"), -INF, lambda m, n: math.sqrt(m) / 10, "h̄^fd, of the curvature"),
    Field("curv_sq", _whole, _statistic("curv_sq"), 0.0, lambda m, n: m / 100, "v̄^fd, of the squared curvature"),
    Field("memory", _whole, _statistic("memory"), -INF, _count, "τ, the horizon of the averages in samples"),
    Field("iterate", _whole, _precision, -INF, _gradient, "θ, where the parameter holds the average", True),
    Field("average", _whole, _precision, -INF, _gradient, "θ̄, where the parameter is of lower precision", True),
    Field("seen", _counts, _sums, 0.0, _count, "samples so far, of a table for each row"),
    Field("steps", _dense(1), _sums, 0.0, _count, "steps with a gradient"),
    Field("totals", _dense(len(Totals._fields)), _sums, -INF, lambda m, n: m * n, "`Totals` of the tensor"),
    Field("left_basis", _side(0), _precision, -INF, lambda m, n: m * n, "Q_L, blocks of the eigenbasis"),
    Field("left_cov", _side(0), _precision, -INF, _square, "L, covariance of the rows of the gradient"),
    Field("right_basis", _side(1), _precision, -INF, lambda m, n: m * n, "Q_R"),
    Field("right_cov", _side(1), _precision, -INF, _square, "R, covariance of the columns"),
)
"""All fields. Coordinates are those of the basis for statistics, and the parameter's own for iterates and averages."""

STATISTICS = tuple(field.name for field in FIELDS[:5])
"""The fields of an algorithm's own state, in the order of `Coordinates.statistics`."""


def coarse_fields(dtype: torch.dtype, config: Config, compact: bool) -> frozenset[str]:
    """Return the statistics that are stored in bfloat16: curvature where it suffices, with `compact` all."""
    if precision(dtype) == torch.float64 or not strategy_of(config).coarse_curvature:
        return frozenset()
    return frozenset(STATISTICS if compact else ("curv", "curv_sq"))


def layout_of(parameter: Tensor, config: Config, compact: bool, table: bool, blocks: tuple[int, int]) -> Layout:
    """Return the layout of the state of a parameter. Rows of a table are never compact."""
    coarse = coarse_fields(parameter.dtype, config, compact and not table)
    return Layout(tuple(parameter.shape), parameter.dtype, table, blocks, coarse, sum_dtype(parameter.device))


def new_state(
    parameter: Tensor, config: Config, table: bool, compact: bool, blocks: tuple[int, int] = (1, 1)
) -> ParamState:
    """Return the state of a parameter before its first sample; `blocks` are the block sizes of its basis.

    Counts of dense parameters are on the CPU, where reading them needs no synchronization.
    """
    layout, part, state = layout_of(parameter, config, compact, table, blocks), local_of(parameter), {}
    for field in FIELDS:
        shape = field.shape(layout)
        if shape is None or field.is_optional:
            continue
        on_cpu = field.name in ("seen", "steps") and not table
        device = torch.device("cpu") if on_cpu else part.device
        if field.shape is _whole:
            state[field.name] = like(parameter, torch.zeros_like(part, dtype=field.dtype(layout)))
        else:
            state[field.name] = torch.zeros(shape, dtype=field.dtype(layout), device=device)
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


def found_layout(shapes: dict[Any, Any], parameter: Tensor) -> Layout:
    """Return the layout that the state of a parameter has, judged by the shapes of its fields."""
    shape = tuple(parameter.shape)
    table = bool(shape) and shape[0] > 1 and shapes.get("seen") == shape[:1]
    sizes = [max((shapes[f"{s}_basis"] or (1,))[-1], 2) if f"{s}_basis" in shapes else 1 for s in SIDES]
    return Layout(shape, parameter.dtype, table, (sizes[0], sizes[1]))
