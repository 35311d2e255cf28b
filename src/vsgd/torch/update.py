"""The update of one parameter tensor, as arithmetic that runs on whole tensors and as the body of a loop.

Tensors are seen as rows × columns, each row with its own count: a dense parameter is one long row, an embedding has a
row for every entry that was touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vsgd.options import Options
from vsgd.probe import random_sign
from vsgd.rule import Array, Moments, Neighbours, State, step


class Slots(NamedTuple):
    """The rule's `State` as tensors: averages and memory like the parameter, samples seen one number a row."""

    grad: Any
    grad_sq: Any
    curv: Any
    curv_sq: Any
    memory: Any
    seen: Any


class Gradient(NamedTuple):
    """Evidence from one sample (a minibatch, say): its gradient alone."""

    grad: Any


class GradientPair(NamedTuple):
    """Evidence from one sample: its gradients at θ and at θ + δ."""

    grad: Any
    shifted: Any


class Averages(NamedTuple):
    """Evidence from several samples: averages over them, the differences ∇_θ − ∇_{θ+δ} not yet over the shift."""

    grad: Any
    grad_sq: Any
    diff_abs: Any
    diff_sq: Any


class Weighted(NamedTuple):
    """The same when the step goes along another direction than the mean gradient."""

    grad: Any
    grad_sq: Any
    diff_abs: Any
    diff_sq: Any
    direction: Any


def each_tensor(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply to the tensors or arrays that are nested in tuples."""
    if isinstance(value, tuple):
        parts = [each_tensor(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value if value is None else function(value)


class Scale(NamedTuple):
    """What the user may set for a group of parameters."""

    lr: Any
    weight_decay: Any


def advance(
    theta: Array,
    delta: Array | None,
    state: State,
    evidence: Averages,
    direction: Array,
    count: Array,
    neighbours: Neighbours,
    scale: Scale,
    options: Options,
) -> tuple[Array, State, Array]:
    """One step of the rule, with a multiplier and weight decay. Plain arithmetic, like the rule itself.

    Without a second gradient (δ is None), or where δ vanished in the parameter's precision, nothing is learned about
    the curvature and its averages stay.
    """
    curv, curv_sq = state.mean.curv, state.mean.curv_sq
    if delta is not None:
        unknown = delta == 0
        inverse = (delta != 0) / (abs(delta) + unknown)
        curv = evidence.diff_abs * inverse + unknown * curv
        curv_sq = evidence.diff_sq * inverse * inverse + unknown * curv_sq
    batch = Moments(grad=evidence.grad, grad_sq=evidence.grad_sq, curv=curv, curv_sq=curv_sq)
    _, state, info = step(theta, state, batch, count, options, None, neighbours)
    theta = theta - scale.lr * info.rate * (direction + scale.weight_decay * theta)
    return theta, state, info.outlier


# Sources are read by position: a compiled loop sees any of them as `MOST_PARTS` matrices, the first of which are there.


def read_gradient(source: Gradient, at: Any) -> tuple[Averages, Array]:
    g = source[0][at]
    return Averages(grad=g, grad_sq=g * g, diff_abs=g - g, diff_sq=g - g), g


def read_pair(source: GradientPair, at: Any) -> tuple[Averages, Array]:
    g = source[0][at]
    diff = g - source[1][at]
    return Averages(grad=g, grad_sq=g * g, diff_abs=abs(diff), diff_sq=diff * diff), g


def read_averages(source: Averages | Weighted, at: Any) -> tuple[Averages, Array]:
    g = source[0][at]
    return Averages(grad=g, grad_sq=source[1][at], diff_abs=source[2][at], diff_sq=source[3][at]), g


def read_weighted(source: Weighted, at: Any) -> tuple[Averages, Array]:
    averages, _ = read_averages(source, at)
    return averages, source[4][at]


READERS: dict[type, Callable[..., tuple[Averages, Array]]] = {
    Gradient: read_gradient,
    GradientPair: read_pair,
    Averages: read_averages,
    Weighted: read_weighted,
}

MOST_PARTS = max(len(kind._fields) for kind in (Gradient, GradientPair, Averages, Weighted))


def load(slots: Slots, at: Any, seen: Array) -> State:
    mean = Moments(grad=slots.grad[at], grad_sq=slots.grad_sq[at], curv=slots.curv[at], curv_sq=slots.curv_sq[at])
    return State(mean=mean, memory=slots.memory[at], seen=seen)


def keep(slots: Slots, at: Any, state: State) -> None:
    slots.grad[at] = state.mean.grad
    slots.grad_sq[at] = state.mean.grad_sq
    slots.curv[at] = state.mean.curv
    slots.curv_sq[at] = state.mean.curv_sq
    slots.memory[at] = state.memory


class Probe(NamedTuple):
    """What a shift by ± size is made of; with size 0 it is the paper's."""

    size: Any
    downhill: Any
    """Whether each coordinate moves as its gradient says, or to a random side."""
    seed: Any
    """Of the coins that decide the sides, one for each place in the tensor."""


def side(place: Array, grad: Array, probe: Probe) -> Array:
    """Does this coordinate move to the positive side?

    In a dense tensor, what the others add to its curvature averages out over time if sides are random. A row of a table
    may be seen a few times only; then what matters is where its next step goes.
    """
    return probe.downhill * (grad < 0) + (probe.downhill == 0) * random_sign(place, probe.seed)
