"""One embedding table, of which a step touches some rows. Each of those is a segment.

During a step the parameter uses the memory of the iterates, since a large table must not be copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsgd.algorithms.strategy import Totals
from vsgd.eigenbasis import Basis, back
from vsgd.torch.basis import basis_of
from vsgd.torch.block import (
    Group,
    Report,
    Rule,
    Update,
    check,
    estimates_decay,
    is_starting,
    learn_and_move,
    rates_of,
)
from vsgd.torch.coordinates import Checks, Coordinates, Inputs, precision
from vsgd.torch.devices import sum_dtype
from vsgd.torch.moments import RowMoments, Sampling
from vsgd.torch.state import STATISTICS, ParamState, coarse_fields, is_decoupled, matrix_shape


def as_table(state: ParamState, parameter: Tensor) -> ParamState:
    """Return the state of a dense parameter whose rows are counted apart from now on."""
    names, basis = (*STATISTICS, "seen", "iterate", "average"), basis_of(state)
    state = {name: value.clone() for name, value in state.items() if name in names}
    state["grad"] = back(state["grad"].reshape(matrix_shape(parameter.shape)), basis).reshape(parameter.shape)
    state["curv"] = state["curv"].abs()
    if "iterate" in state:
        state["iterate"] = state["iterate"].to(parameter.dtype)
    state["seen"] = state["seen"].to(parameter.device).repeat(len(parameter))
    return state


class TableBlock:
    """An embedding table whose touched rows are updated. Implements `Block`."""

    is_table = True
    coordinates = None

    def __init__(self, parameter: Tensor, states: dict[Tensor, ParamState], group: Group, rule: Rule):
        self.parameter, self.group, self.rule = parameter, group, rule
        self.parameters = [parameter]
        state = states[parameter]
        self.decoupled = is_decoupled(parameter, state, rule.config)
        coarse = coarse_fields(parameter.dtype, rule.config, compact=False)
        for name in STATISTICS:
            dtype = torch.bfloat16 if name in coarse else precision(parameter.dtype)
            state[name] = state[name].to(parameter.device, dtype)
        state["seen"] = state["seen"].to(parameter.device, sum_dtype(parameter.device))
        is_coarse = parameter.dtype != precision(parameter.dtype)
        averages = rule.strategy.averages_iterates(rule.config)
        for name, dtype in (("iterate", parameter.dtype), ("average", precision(parameter.dtype))):
            if averages and (name == "iterate" or is_coarse):
                state[name] = state.get(name, parameter.detach()).to(parameter.device, dtype, copy=True)
            else:
                state.pop(name, None)
        self._state = dict(state)  # users may replace entries of the other one
        self._weights: Tensor | None = None
        """The averaged weights, while the parameter holds the iterates."""
        self._probed: tuple[Tensor, Tensor] | None = None
        """Probed rows, and their iterates."""
        self._left: Tensor | None = None
        """The weights that the last step has left, in the memory that the parameter had then."""
        self._version = 0

    # --- parameters -----------------------------------------------------------------------------------------------

    def buffer_bytes(self) -> int:
        return 0

    def bases(self) -> dict[Tensor, Basis]:
        return {}

    def adopt_changes(self) -> Any:
        """Adopt weights that the user has set. A change through `.data` in the same memory is not noticed."""
        if self._is_changed():
            for name in {"iterate", "average"} & self._state.keys():
                self._state[name].copy_(self.parameter)
        return False  # a new version number does not prove that values have changed

    def _is_changed(self) -> bool:
        if self._left is None:
            return False
        if self.parameter.device == self._left.device and self.parameter.data_ptr() == self._left.data_ptr():
            return self.parameter._version != self._version
        return not torch.equal(self.parameter, self._left.to(self.parameter))  # its memory has moved

    def open(self) -> None:
        if "iterate" in self._state:
            self._weights = self.parameter.data
            self.parameter.data = self._state["iterate"]

    def close(self) -> None:
        if self._probed is not None:
            self._put(self.parameter, *self._probed)
            self._probed = None
        if self._weights is not None:
            self.parameter.data = self._weights
            self._weights = None
            torch.autograd.graph.increment_version(self.parameter)
        self._left, self._version = self.parameter.data, self.parameter._version

    # --- rows -----------------------------------------------------------------------------------------------------

    def coordinates_of(self, rows: Tensor) -> Coordinates:
        """Return copies of rows."""
        dtype, width = precision(self.parameter.dtype), self.parameter[0].numel()
        theta = self.parameter.detach().index_select(0, rows).to(dtype).reshape(-1)
        average, seen = self._average(), self._state["seen"].index_select(0, rows)
        statistics: dict[str, Any] = {name: self._state[name].index_select(0, rows).reshape(-1) for name in STATISTICS}
        # rows that were never touched get their memory now: a large table is not written for it
        untouched = (seen == 0).repeat_interleave(width)
        statistics["memory"] = torch.where(untouched, self.rule.config.memory, statistics["memory"])
        return Coordinates(
            theta=theta,
            average=None if average is None else average.index_select(0, rows).to(dtype).reshape(-1),
            **statistics,
            seen=seen,
            totals=self._totals(theta, statistics, width).expand(len(rows), -1).contiguous(),
            lengths=(width,) * len(rows),
            decoupled=self.decoupled,
        )

    def _average(self) -> Tensor | None:
        return self._state.get("average", self._weights)

    def _totals(self, theta: Tensor, statistics: dict[str, Tensor], width: int) -> Tensor:
        """Return the totals of a row: `width` times the means over all touched rows."""
        _, strategy, config = self.rule
        values = {**statistics, "signal": statistics["grad"].square()}
        dtype = self._state["seen"].dtype
        means = {name: values[name].to(dtype).mean() * width for name in ("grad_sq", "signal", "curv", "curv_sq")}
        mean_sq, zero = theta.to(dtype).square().mean(), theta.new_zeros((), dtype=dtype)
        scale = strategy.length_scale(zero, mean_sq, mean_sq, zero, config)
        probe_size = strategy.probe_size(scale, config)
        return torch.stack(
            Totals(**means, probe_size=probe_size, scale=scale, rms=mean_sq.sqrt(), momentum=zero, agreement=zero)
        )

    def _put(self, target: Tensor, rows: Tensor, values: Tensor) -> None:
        target.index_copy_(0, rows, values.view(len(rows), *target.shape[1:]).to(target.dtype))

    # --- a step ---------------------------------------------------------------------------------------------------

    def collect(self, sampling: Sampling) -> Update | None:
        found = sampling.rows(self)
        return found and Update(self, self.coordinates_of(found.rows), found.batch, rows=found.rows)

    def complete(self, update: Update, sampling: Sampling) -> Update:
        assert update.rows is not None
        return update._replace(batch=sampling.complete_rows(self, RowMoments(update.rows, update.batch)))

    def check(self, update: Update) -> Checks:
        checks = check(update.coordinates, update.batch, self.rule)
        return checks._replace(long_norm_sq=0.0)  # totals are those of all touched rows, not of a single one

    def is_starting(self, update: Update) -> bool:
        return False  # rows start whenever they come

    def probe(self, update: Update, indices: dict[Tensor, int]) -> Update:
        """Let the touched rows hold θ + δ, rounded to their precision."""
        assert update.rows is not None
        theta, engine = update.coordinates.theta, self.rule.engine
        delta = engine.probe(update.coordinates, update.batch, None, self.rule.config)
        self._probed = update.rows, theta.clone()
        self._put(self.parameter, update.rows, theta + delta)
        probed = self.parameter.detach().index_select(0, update.rows).to(theta.dtype).reshape(-1)
        return update._replace(delta=probed - theta)

    def apply(self, update: Update) -> Report:
        engine, strategy, config = self.rule
        rows, coordinates, batch = update.rows, update.coordinates, update.batch
        assert rows is not None
        seen, counts = engine.numbers(coordinates.seen), engine.numbers(batch.counts)
        weight = strategy.row_averaging_weight(seen, counts, config)
        samples = None
        if estimates_decay(self.group):  # a row has as many samples as its share of the steps so far
            samples = seen * (self.group["steps_per_epoch"] / (self.group["steps"] + 1))
        # reading the counts of rows on a device would wait for it
        starts = not coordinates.seen.is_cpu or is_starting(coordinates, batch, config)
        inputs = Inputs(batch, update.delta, rates_of(self.group), weight, samples, starts)
        outliers = learn_and_move(coordinates, inputs, self.rule, None).outliers.sum()
        self._store(rows, coordinates)
        return Report(products=0.0, penalty=None, outliers={id(self.parameter): outliers})

    def _store(self, rows: Tensor, coordinates: Coordinates) -> None:
        self._put(self.parameter, rows, coordinates.theta)
        self._probed = None
        parts: dict[str, Any] = {**dict(zip(STATISTICS, coordinates.statistics, strict=True)), "seen": coordinates.seen}
        for name, values in parts.items():
            self._put(self._state[name], rows, values)
        if coordinates.average is not None:
            assert self._weights is not None
            for target in {id(t): t for t in (self._weights, self._average()) if t is not None}.values():
                self._put(target, rows, coordinates.average)
