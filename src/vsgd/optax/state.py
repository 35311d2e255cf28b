"""State of the optimizer: what it contains, and its value before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vsgd.algorithms.networks import Averaging, Progress
from vsgd.algorithms.strategy import Config, Totals, strategy_of
from vsgd.core import Moments
from vsgd.eigenbasis import Basis
from vsgd.optax.coordinates import Tensor, new_basis
from vsgd.optax.groups import Group
from vsgd.optax.samples import Params


class Counters(NamedTuple):
    """Numbers of steps."""

    step: Array
    """Steps so far, without those that were skipped."""
    skipped: Array
    """Steps that were skipped because a gradient was not finite, or too large to be squared."""
    unprobed: Array
    """Steps since the last probe. Length scales are measured in the step after a probe."""


class Numbers(NamedTuple):
    """Floating-point numbers that all parameters share."""

    seen: Array
    """Samples so far."""
    weight: Array
    """Weight with which the parameters, the newest iterate, enter the average."""
    curvature_penalty: Array
    """½ (θ−θ̄)ᵀ|H|(θ−θ̄), as it was at the last probe."""
    window: Array
    advantage: Array
    recent: Array
    earlier: Array
    horizon: Array
    spread: Array

    @property
    def averaging(self) -> Averaging:
        return Averaging(self.window, self.advantage)

    @property
    def progress(self) -> Progress:
        return Progress(self.recent, self.earlier, self.horizon, self.spread)


class State(NamedTuple):
    """State of the optimizer.

    Numbers are stored together, because every array takes time to pass to a compiled step. Statistics of coordinates
    are tuples with one array per group of tensors, see `vsgd.optax.groups`. Without parameters these tuples are empty
    arrays, because `optax.tree.map_params` accepts any subtree in place of an array.
    """

    counters: Array
    """`Counters` as one array. Its fields are also attributes of the state: `state.skipped`."""
    numbers: Array
    """`Numbers` as one array."""
    mean: Moments
    """Four tuples."""
    memory: tuple[Array, ...]
    totals: tuple[Array]
    """`Totals`, one column per tensor, group after group."""
    basis: tuple[Basis, ...]
    """One per parameter, in the order of the leaves; None for a side that is not rotated."""
    average: Params
    """Tree: average of the iterates without the newest, which enters with `Numbers.weight`; None if not averaged."""

    @property
    def step(self) -> Array:
        return Counters(*self.counters).step

    @property
    def skipped(self) -> Array:
        return Counters(*self.counters).skipped

    @property
    def unprobed(self) -> Array:
        return Counters(*self.counters).unprobed


def curvature_dtype(tensor: Tensor, config: Config) -> Any:
    """Return the precision of curvatures. Those of networks have errors of some percent, so bfloat16 suffices."""
    coarse = strategy_of(config).coarse_curvature and tensor.precision == jnp.float32
    return jnp.bfloat16 if coarse else tensor.precision


def as_tuple(values: Iterable[Any]) -> Any:
    """Return a tuple, or an empty array in place of an empty tuple; see `State`."""
    return tuple(values) or jnp.zeros(0)


def new_state(params: Params, groups: list[Group], config: Config) -> State:
    """Return the state before the first step. No two arrays share memory, so that all may be donated."""
    structure: Any = jax.tree.structure(params)
    leaves = jax.tree.leaves(params)
    strategy = strategy_of(config)

    def filled(value: float, shape: tuple[int, ...], dtype: Any) -> Array:
        return jnp.array(np.full(shape, value, dtype))  # made by NumPy, so that nothing is compiled

    def coordinates(value: float, dtype_of: Callable[[Tensor], Any]) -> Any:
        return as_tuple(
            filled(value, group.shape, dtype_of(group.tensors[0]))
            if group.is_joined
            else jnp.full_like(leaves[group.tensors[0].place], value, dtype_of(group.tensors[0]))
            for group in groups
        )

    def precision(tensor: Tensor) -> Any:
        return tensor.precision

    def curvature(tensor: Tensor) -> Any:
        return curvature_dtype(tensor, config)

    numbers: dict[str, Any] = dict.fromkeys(Numbers._fields, 0.0) | {
        "weight": 1,
        "window": strategy.first_window(config),
        "horizon": 1,
    }
    tensors = sorted((tensor for group in groups for tensor in group.tensors), key=lambda tensor: tensor.place)
    zeros = [jnp.zeros_like(p, t.precision) for p, t in zip(leaves, tensors, strict=True)]
    widest = jnp.result_type(jnp.float32, *map(precision, tensors))
    return State(
        counters=filled(0, (len(Counters._fields),), jnp.int32),
        numbers=jnp.array(np.array(Numbers(**numbers), jnp.result_type(float))),
        mean=Moments(*(coordinates(0, dtype_of) for dtype_of in (precision, precision, curvature, curvature))),
        memory=coordinates(config.memory, precision),
        totals=(filled(0, (len(Totals._fields), len(tensors)), widest),),
        basis=as_tuple(map(new_basis, tensors)),
        average=structure.unflatten(zeros) if strategy.averages_iterates(config) else None,
    )
