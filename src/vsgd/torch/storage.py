"""Where parameters and their state are kept: dense tensors in flat buffers, embedding tables row by row.

Between steps a parameter holds the weights to evaluate; during a step it holds the iterate, and while a second gradient
is taken the probed iterate. `Dense` writes these into the parameters from its buffers. `Table` lets the parameter use
the memory of the iterates meanwhile, since a large table must not be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vsgd.algorithms import networks
from vsgd.algorithms.networks import Networks
from vsgd.eigenbasis import Basis, back, into, observes, turns
from vsgd.tensors import Config, Totals, averages_iterates
from vsgd.torch.basis import basis_of, matrix_shape, new_basis, observe, refresh
from vsgd.torch.engine import Block
from vsgd.torch.shards import is_sharded, key_of, like, local_of, shards_of

ParamState = dict[str, Tensor]

STATISTICS = ("grad", "grad_sq", "curv", "curv_sq", "memory")
"""Names of the state that has the shape of the parameter; as in `Block`."""

LARGE = 1 << 18
"""A tensor of so many coordinates has buffers of its own: its gradient need not be copied next to others."""


def precision(dtype: torch.dtype) -> torch.dtype:
    """What parameters of this precision are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistics_dtypes(dtype: torch.dtype, config: Config, compact: bool) -> dict[str, torch.dtype]:
    """The precision of each part of the state.

    Curvature of networks is known to a few percent at best, so bfloat16 will do for it; with `compact` for all.
    """
    dtypes = dict.fromkeys(STATISTICS, precision(dtype))
    if isinstance(config, Networks) and precision(dtype) == torch.float32:
        dtypes.update(dict.fromkeys(STATISTICS if compact else ("curv", "curv_sq"), torch.bfloat16))
    return dtypes


def is_table(state: ParamState) -> bool:
    """Are the samples of every row counted apart?"""
    return state["seen"].numel() > 1


def is_decoupled(parameter: Tensor, state: ParamState, config: Config) -> bool:
    """Are the coordinates those of an eigenbasis? Vectors and rows of tables count as such, and stay as they are."""
    if not isinstance(config, Networks) or not config.eigenbasis:
        return False
    return is_table(state) or min(matrix_shape(parameter)) == 1 or "left_basis" in state or "right_basis" in state


def new_state(
    parameter: Tensor, config: Config, table: bool, compact: bool, blocks: tuple[int, int] = (1, 1)
) -> ParamState:
    """The state of a parameter before its first sample; `blocks` are the block sizes of its basis."""
    dtypes = statistics_dtypes(parameter.dtype, config, compact and not table)
    part = local_of(parameter)
    state = {name: like(parameter, torch.zeros_like(part, dtype=dtypes[name])) for name in STATISTICS}
    if table:
        state["seen"] = torch.zeros(len(parameter), dtype=torch.float64, device=parameter.device)
    else:
        state["seen"] = torch.zeros(1, dtype=torch.float64)
        state["steps"] = torch.zeros(1, dtype=torch.float64)
        state["totals"] = torch.zeros(len(Totals._fields), dtype=torch.float64, device=parameter.device)
        state["memory"].fill_(config.memory)
        state.update(new_basis(parameter, blocks, precision(parameter.dtype)))
    return state


def as_table(state: ParamState, parameter: Tensor) -> ParamState:
    """The state of a dense parameter whose rows are counted apart from now on."""
    names, basis = (*STATISTICS, "seen", "iterate", "average"), basis_of(state)
    state = {name: value.clone() for name, value in state.items() if name in names}
    state["grad"] = back(state["grad"].reshape(matrix_shape(parameter)), basis).reshape(parameter.shape)
    state["curv"] = state["curv"].abs()
    if "iterate" in state:
        state["iterate"] = state["iterate"].to(parameter.dtype)
    state["seen"] = state["seen"].to(parameter.device).repeat(len(parameter))
    return state


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Our own arithmetic is not to be cast, even if the user trains within autocast."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def is_plain(tensor: Tensor) -> bool:
    """Can compiled loops read its memory as it is?"""
    return tensor.is_contiguous() and not tensor.is_neg() and tensor.data_ptr() != 0


def is_same(parameter: Tensor, weights: Tensor) -> bool:
    """Are these the weights, rounded to the precision of the parameter?"""
    if parameter.is_cpu and parameter.dtype == weights.dtype:  # NumPy compares many numbers at once
        return np.array_equal(parameter.detach().numpy(), weights.numpy())
    return torch.equal(parameter, weights.to(parameter))


class Dense:
    """Dense parameters of one precision and device, one after the other in flat buffers. Each is a segment."""

    def __init__(self, parameters: Sequence[Tensor], states: dict[Tensor, ParamState], config: Config, compact: bool):
        """Take over the states, which become views of the buffers."""
        first = parameters[0]
        self.parameters = list(parameters)
        self._parts = [local_of(p) for p in parameters]
        self.config, self.compact = config, compact
        self.signature = signature(parameters)
        self._coarse = first.dtype != precision(first.dtype)
        self._sharded = any(map(is_sharded, parameters))
        lengths = tuple(part.numel() for part in self._parts)
        dtypes = statistics_dtypes(first.dtype, config, compact)

        def flat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
            return torch.cat([local_of(part.detach()).reshape(-1).to(first.device, dtype) for part in parts])

        weights = {"iterate": [states[p].get("iterate", p) for p in parameters]}
        if averages_iterates(config):
            weights["average"] = [states[p].get("average", p) for p in parameters]
        buffers = {name: flat(parts, precision(first.dtype)) for name, parts in weights.items()}
        buffers |= {name: flat([states[p][name] for p in parameters], dtypes[name]) for name in STATISTICS}
        seen = torch.cat([states[p]["seen"].cpu() for p in parameters])
        self.steps = torch.cat([states[p]["steps"].cpu() for p in parameters])
        totals = torch.stack([states[p]["totals"].to(first.device) for p in parameters])
        self.block = Block(
            theta=buffers["iterate"],
            average=buffers.get("average"),
            **{name: buffers[name] for name in STATISTICS},
            seen=seen,
            totals=totals,
            lengths=lengths,
            decoupled=is_decoupled(first, states[first], config),
            shards=shards_of(self.parameters),
        )
        dtype = precision(first.dtype)
        sides = ("left_basis", "left_cov", "right_basis", "right_cov")
        turned = [{k: states[p][k].to(first.device, dtype) for k in sides if k in states[p]} for p in parameters]
        self.bases = [basis_of(each) for each in turned]
        self._matrices = [(k, matrix_shape(p)) for k, p in enumerate(parameters) if turned[k]]
        self._weights = self.views(self._evaluated())
        self._iterates = self.views(self.block.theta)
        self._scratch: dict[str, Tensor] = {}
        # what the parameter itself holds, exactly, needs no place in a checkpoint
        kept = [
            name for name in buffers if name in STATISTICS or self._coarse or buffers[name] is not self._evaluated()
        ]
        views = {name: self.views(buffers[name]) for name in kept}  # once for all tensors, not once for each
        for k, parameter in enumerate(parameters):
            states[parameter].clear()
            states[parameter].update({name: like(parameter, views[name][k]) for name in kept})
            states[parameter].update(turned[k])
            states[parameter].update(seen=seen[k : k + 1], steps=self.steps[k : k + 1], totals=totals[k])

    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers that are kept between steps besides the state."""
        buffers = [*self._scratch.values()]
        if not self._coarse and self.block.average is not None:
            buffers.append(self.block.average)
        return sum(buffer.nbytes for buffer in buffers)

    def _evaluated(self) -> Tensor:
        return self.block.theta if self.block.average is None else self.block.average

    def views(self, buffer: Tensor) -> list[Tensor]:
        """A buffer as tensors shaped like the parameters."""
        parts = buffer.split(self.block.lengths)
        return [part.view(own.shape) for part, own in zip(parts, self._parts, strict=True)]

    def gather(self, tensors: Sequence[Tensor | None], name: str) -> Tensor:
        """Tensors shaped like the parameters as one flat tensor, zeros for missing ones; its memory is used again."""
        theta = self.block.theta
        for tensor, weights in zip(tensors, self._weights, strict=True):
            if tensor is not None and tensor.shape != weights.shape:
                raise RuntimeError(
                    f"a gradient has shape {tuple(tensor.shape)}, its parameter had {tuple(weights.shape)} before the "
                    "step; a closure must not change the shape of a parameter"
                )
        (first, *others) = tensors
        if not others and first is not None and first.dtype == theta.dtype and is_plain(first):
            return first.detach().reshape(-1)
        parts = [
            theta.new_zeros(1).expand(length) if tensor is None else tensor.detach().reshape(-1)
            for tensor, length in zip(tensors, self.block.lengths, strict=True)
        ]
        buffer = self._scratch.setdefault(name, torch.empty_like(theta))
        return torch.cat(parts, out=buffer)

    def rotated(self) -> dict[Tensor, Basis]:
        """The bases of those parameters that have one."""
        return {self.parameters[k]: self.bases[k] for k, _ in self._matrices}

    def _rotate(self, flat: Tensor, rotate: Callable[[Tensor, Basis], Tensor]) -> Tensor:
        if not self._matrices:
            return flat
        parts = list(flat.split(self.block.lengths))
        with no_autocast(flat.device):
            for k, shape in self._matrices:
                parts[k] = rotate(parts[k].view(shape), self.bases[k]).reshape(-1)
        return torch.cat(parts)

    def into(self, flat: Tensor) -> Tensor:
        """From the parameters' own coordinates to those of their bases."""
        return self._rotate(flat, into)

    def back(self, flat: Tensor) -> Tensor:
        """From the coordinates of the bases to the parameters' own."""
        return self._rotate(flat, back)

    def turn(self, plain_grad: Tensor, counts: Tensor) -> None:
        """Let the bases follow the gradient. ḡ turns with them; the other averages stay as they are."""
        steps, count = self.steps.tolist(), counts.tolist()
        observed = [(k, shape) for k, shape in self._matrices if count[k] > 0 and observes(steps[k])]
        if observed:
            grads, means = plain_grad.split(self.block.lengths), self.block.grad.split(self.block.lengths)
            for k, shape in observed:
                basis = self.bases[k]
                with no_autocast(plain_grad.device):
                    observe(basis, grads[k].view(shape), steps[k])
                    if turns(steps[k]):
                        own = back(means[k].to(plain_grad.dtype).view(shape), basis)
                        refresh(basis)
                        means[k].copy_(into(own, basis).reshape(-1))
        self.steps += counts > 0

    def fits(self, config: Config) -> bool:
        """Are the parameters and the algorithm still what they were?"""
        return self.config == config and self.signature == signature(self.parameters)

    def is_untouched(self) -> bool:
        """Do all parameters hold the weights that the last step has left?"""
        return all(map(is_same, self._own(), self._weights))

    def adopt(self) -> None:
        """Go on from weights that the user has set since the last step."""
        for parameter, weights, iterate in zip(self._own(), self._weights, self._iterates, strict=True):
            if not is_same(parameter, weights):
                weights.copy_(parameter)
                iterate.copy_(parameter)

    def open(self) -> None:
        """Let the parameters hold the iterates."""
        if self.block.average is not None or self._coarse:
            for parameter, iterate in zip(self._own(), self._iterates, strict=True):
                parameter.copy_(iterate)

    def close(self) -> None:
        """Let the parameters hold the weights to evaluate."""
        for parameter, weights in zip(self._own(), self._weights, strict=True):
            if parameter.shape == weights.shape:
                parameter.copy_(weights)
            else:  # the closure has given it another
                parameter.data = weights.to(parameter.dtype, copy=True)

    def shift(self, delta: Tensor) -> None:
        """Let the parameters hold θ + δ, rounded to their precision."""
        for parameter, iterate, offset in zip(self._own(), self._iterates, self.views(delta), strict=True):
            torch.add(iterate, offset, out=parameter)

    def measure_shift(self, delta: Tensor) -> None:
        """Let δ be what came out of `shift`."""
        for parameter, iterate, offset in zip(self._own(), self._iterates, self.views(delta), strict=True):
            torch.sub(parameter, iterate, out=offset)

    def _own(self) -> list[Tensor]:
        """What this process holds of the parameters."""
        return [local_of(p) for p in self.parameters] if self._sharded else self.parameters


class Table:
    """One embedding table, of which a step touches some rows. Each of those is a segment."""

    def __init__(self, parameter: Tensor, states: dict[Tensor, ParamState], config: Config):
        self.parameter, self.config = parameter, config
        self.signature = signature([parameter])
        self.state = state = states[parameter]
        self.decoupled = is_decoupled(parameter, state, config)
        for name, dtype in statistics_dtypes(parameter.dtype, config, compact=False).items():
            state[name] = state[name].to(parameter.device, dtype)
        state["seen"] = state["seen"].to(parameter.device)
        coarse = parameter.dtype != precision(parameter.dtype)
        for name, dtype in (("iterate", parameter.dtype), ("average", precision(parameter.dtype))):
            wanted = averages_iterates(config) and (name == "iterate" or coarse)
            if wanted:
                state[name] = state.get(name, parameter.detach()).to(parameter.device, dtype, copy=True)
            else:
                state.pop(name, None)
        self._weights: Tensor | None = None
        self._probed: tuple[Tensor, Tensor] | None = None
        self._version: tuple[int, int] | None = None

    def is_untouched(self) -> bool:
        """Does the parameter hold the weights that the last step has left? A change through `.data` is not seen."""
        return self._version in (None, (self.parameter._version, self.parameter.data_ptr()))

    def adopt(self) -> None:
        """Go on from weights that the user has set since the last step."""
        for name in {"iterate", "average"} & self.state.keys():
            self.state[name].copy_(self.parameter)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.parameter]

    def fits(self, config: Config) -> bool:
        """Are the parameter and the algorithm still what they were?"""
        return self.config == config and self.signature == signature([self.parameter])

    def open(self) -> None:
        """Let the parameter use the memory of the iterates."""
        if "iterate" in self.state:
            self._weights = self.parameter.data
            self.parameter.data = self.state["iterate"]

    def close(self) -> None:
        """Let the parameter hold the weights to evaluate."""
        if self._probed is not None:
            self._put(self.parameter, *self._probed)
            self._probed = None
        if self._weights is not None:
            self.parameter.data = self._weights
            self._weights = None
            torch.autograd.graph.increment_version(self.parameter)
        self._version = self.parameter._version, self.parameter.data_ptr()

    def _average(self) -> Tensor | None:
        return self.state.get("average", self._weights)

    def rows(self, rows: Tensor) -> Block:
        """Copies of the touched rows."""

        def touched(name: str) -> Tensor:
            return self.state[name].index_select(0, rows).reshape(-1)

        dtype = precision(self.parameter.dtype)
        average = self._average()
        width = self.parameter[0].numel()
        theta = self.parameter.detach().index_select(0, rows).to(dtype).reshape(-1)
        seen = self.state["seen"].index_select(0, rows)
        statistics = {name: touched(name) for name in STATISTICS}
        # of a row that was never touched the memory is set now: a large table is not written just to say so
        untouched = (seen == 0).repeat_interleave(width)
        statistics["memory"] = torch.where(untouched, self.config.memory, statistics["memory"])
        return Block(
            theta=theta,
            average=None if average is None else average.index_select(0, rows).to(dtype).reshape(-1),
            **statistics,
            seen=seen,
            totals=self._totals(theta, statistics, width).expand(len(rows), -1).contiguous(),
            lengths=(width,) * len(rows),
            decoupled=self.decoupled,
            shards=None,
        )

    def _totals(self, theta: Tensor, statistics: dict[str, Tensor], width: int) -> Tensor:
        """What a row is told of its tensor: `width` times the means over all touched rows."""
        values = {**statistics, "signal": statistics["grad"].square()}
        means = {name: values[name].double().mean() * width for name in ("grad_sq", "signal", "curv", "curv_sq")}
        scale, size = theta.double().square().mean().sqrt(), theta.new_zeros((), dtype=torch.float64)
        if isinstance(self.config, Networks):
            scale = networks.length_scale(size, scale, self.config)
            size = networks.probe_size(scale, self.config)
        return torch.stack(Totals(**means, probe_size=size, scale=scale))

    def _put(self, target: Tensor, rows: Tensor, values: Tensor) -> None:
        target.index_copy_(0, rows, values.view(len(rows), *target.shape[1:]).to(target.dtype))

    def store(self, rows: Tensor, block: Block) -> None:
        """Put touched rows back."""
        self._put(self.parameter, rows, block.theta)
        self._probed = None
        for name in (*STATISTICS, "seen"):
            self._put(self.state[name], rows, getattr(block, name))
        if block.average is not None:
            assert self._weights is not None
            for target in {id(t): t for t in (self._weights, self._average()) if t is not None}.values():
                self._put(target, rows, block.average)

    def move_to(self, rows: Tensor, block: Block, point: Tensor) -> Tensor:
        """Let rows of the parameter hold other values, rounded to its precision. Returns what they hold now."""
        self._probed = rows, block.theta.clone()
        self._put(self.parameter, rows, point)
        return self.parameter.detach().index_select(0, rows).to(point.dtype).reshape(-1)


Storage = Dense | Table


def blank_state(parameter: Tensor, config: Config, compact: bool) -> ParamState:
    """What a checkpoint holds of a dense parameter that has not begun to learn."""
    states = {parameter: new_state(parameter, config, False, compact)}
    Dense([parameter], states, config, compact)
    return states[parameter]


def is_blank(state: ParamState) -> bool:
    return "steps" in state and float(state["steps"]) == 0


def block_of(parameter: Tensor, state: ParamState, config: Config) -> Block:
    """Copies of what has seen enough samples to learn: all of a dense parameter or nothing, some rows of a table."""
    rows = (state["seen"].to(parameter.device) >= config.bootstrap).nonzero()[:, 0]
    if is_table(state):
        return Table(parameter, {parameter: dict(state)}, config).rows(rows)
    part, shards = local_of(parameter.detach()), shards_of([parameter]) if len(rows) else None
    size = len(rows) * part.numel()
    statistics = {name: local_of(state[name]).reshape(-1)[:size] for name in STATISTICS}
    theta = part.to(precision(parameter.dtype)).reshape(-1)[:size]
    totals, lengths = state["totals"][None][: len(rows)], (part.numel(),) * len(rows)
    seen, kind = state["seen"][: len(rows)], is_decoupled(parameter, state, config)
    return Block(theta, None, **statistics, seen=seen, totals=totals, lengths=lengths, decoupled=kind, shards=shards)


def signature(parameters: Sequence[Tensor]) -> list[Any]:
    """What must not change of parameters while a storage serves them."""
    return [(id(p), p.shape, p.dtype, p.device) for p in parameters]


def served(storages: list[tuple[dict[str, Any], Storage]], states: dict[Tensor, ParamState]) -> bool:
    """Do these storages still fit all parameters that have state?"""
    count = sum(len(storage.parameters) for _, storage in storages)
    return count == len(states) and all(storage.fits(group["algorithm"]) for group, storage in storages)


def arranged(
    groups: list[dict[str, Any]], states: dict[Tensor, ParamState], compact: bool
) -> list[tuple[dict[str, Any], Storage]]:
    """Storages for all parameters that have state."""
    wanted = []
    for group in groups:
        sets: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if states.get(parameter):
                apart = is_table(states[parameter]) or parameter.numel() >= LARGE
                kind = is_decoupled(parameter, states[parameter], group["algorithm"])
                key = parameter.device, parameter.dtype, kind, key_of(parameter)
                sets.setdefault(parameter if apart else key, []).append(parameter)
        wanted += [(group, parameters) for parameters in sets.values()]

    def storage_of(parameters: list[Tensor], config: Config) -> Storage:
        if is_table(states[parameters[0]]):
            return Table(parameters[0], states, config)
        return Dense(parameters, states, config, compact)

    return [(group, storage_of(parameters, group["algorithm"])) for group, parameters in wanted]


def check_shapes(states: dict[Tensor, ParamState]) -> None:
    """Parameters that have state must be as large as it is."""
    for parameter, state in states.items():
        if state and state["grad"].shape != parameter.shape:
            raise ValueError(
                f"a parameter changed its shape from {tuple(state['grad'].shape)} to {tuple(parameter.shape)} after it "
                "began to learn; make a new VSGD for the new parameters"
            )
