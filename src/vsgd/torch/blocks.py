"""All blocks of an optimizer: they are built here, and opened, collected and checked together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vsgd.algorithms.strategy import ROUNDING, Config, strategy_of
from vsgd.torch import basis
from vsgd.torch.block import Block, Group, Rule, Update
from vsgd.torch.checkpoint import fault_of
from vsgd.torch.coordinates import Coordinates, Engine, Scratch, lengths_of, precision
from vsgd.torch.dense import DenseBlock
from vsgd.torch.devices import read_numbers
from vsgd.torch.distributed.shards import is_sharded, key_of, local_of, shards_of
from vsgd.torch.embedding import TableBlock, as_table
from vsgd.torch.engine_numba import NumbaEngine
from vsgd.torch.engine_torch import TorchEngine
from vsgd.torch.moments import Sampling
from vsgd.torch.noise import StepNoise, of_samples
from vsgd.torch.settings import check_parameters
from vsgd.torch.state import STATISTICS, ParamState, is_decoupled, is_table, new_state

LARGE = 1 << 18
"""A tensor of at least this many coordinates has buffers of its own: its gradient need not be copied next to others."""

CPU_ENGINE, DEVICE_ENGINE = NumbaEngine(), TorchEngine()


def rule_for(device: torch.device, config: Config) -> Rule:
    """Return how parameters on a device learn."""
    engine: Engine = CPU_ENGINE if device.type == "cpu" else DEVICE_ENGINE
    return Rule(engine, strategy_of(config), config)


class Blocks:
    """The blocks of an optimizer, for all parameters that have state."""

    def __init__(self, compact: bool) -> None:
        self._compact = compact
        self._blocks: list[Block] = []
        self._scratch = Scratch(0)
        self._members: Any = None
        """What the blocks were built for: see `members_of`."""
        self.are_open = False
        """Whether the parameters hold the iterates."""

    def __iter__(self) -> Any:
        return iter(self._blocks)

    def update_blocks(self, groups: list[Group], states: dict[Tensor, ParamState], check: bool = True) -> list[Any]:
        """Rebuild the blocks if groups, parameters, algorithms or states have changed.

        Return what `adopt_changes` returns. With `check`, parameters and states are checked before, since users may
        have edited them.
        """
        if members_of(groups, states) == self._members:
            return []
        if check:
            check_parameters(groups)
            check_states(states)
        was_open = self.are_open
        if was_open:
            self.close()
        changed = self.adopt_changes()
        self._blocks, self._scratch = build_blocks(groups, states, self._compact)
        self._members = members_of(groups, states)  # fields of states have become views of buffers
        if was_open:
            self.open()
        return changed

    def clear(self) -> None:
        """Drop all blocks; `update_blocks` rebuilds them from the states."""
        self._blocks, self._members, self._scratch = [], None, Scratch(0)

    def buffer_bytes(self) -> int:
        """Return the bytes that are kept between steps besides the state."""
        return sum(block.buffer_bytes() for block in self._blocks) + self._scratch.nbytes()

    def create_states(
        self, grads: dict[Tensor, Tensor], sampling: Sampling, groups: list[Group], states: dict[Tensor, ParamState]
    ) -> bool:
        """Create state for parameters with their first gradient.

        The state of a parameter becomes that of a table if its rows are now counted separately. Return whether any
        state is new. Parameters then hold the averaged weights, and the blocks must be opened again.
        """
        tables = sampling.tables(grads)
        fresh = [p for p in grads if not states.get(p)]
        changed = [p for p in tables if states.get(p) and not is_table(states[p])]
        if not fresh and not changed:
            return False
        group_of = {p: group for group in groups for p in group["params"]}
        self.close()
        spent = sum(basis.cost_of(p, state) for p, state in states.items())
        rotated = [
            p
            for p in fresh
            if p not in tables and not is_sharded(p)
            if strategy_of(group_of[p]["algorithm"]).rotates(group_of[p]["algorithm"])
        ]
        sizes = basis.plan(rotated, groups[0]["gradient_flops"], spent)
        for p in fresh:
            config = group_of[p]["algorithm"]
            states[p] = new_state(p, config, p in tables, self._compact, sizes.get(p, (1, 1)))
        for p in changed:
            states[p] = as_table(states[p], p)
        self.clear()
        self.update_blocks(groups, states, check=False)
        return True

    def adopt_changes(self) -> list[Any]:
        """Adopt weights that the user has set since the last step. Return for each block whether any were set."""
        return [] if self.are_open else [block.adopt_changes() for block in self._blocks]

    def open(self) -> None:
        """Let the parameters hold the iterates."""
        self.are_open = True
        for block in self._blocks:
            block.open()

    def close(self) -> None:
        """Let the parameters hold the weights to evaluate."""
        for block in self._blocks:
            block.close()
        self.are_open = False

    def has_table(self, group: Group) -> bool:
        return any(block.is_table and block.group is group for block in self._blocks)

    # --- a step ---------------------------------------------------------------------------------------------------

    def collect(self, sampling: Sampling) -> list[Update]:
        """Return an update for each block that has a gradient."""
        found = [block.collect(sampling) for block in self._blocks]
        return [update for update in found if update is not None]

    def measure_scales(self, least: float = 0.0) -> None:
        """Update the length scale of each dense tensor. `least` stands in where all parameters are zero."""
        dense = [(block.rule, block.coordinates) for block in self._blocks if block.coordinates is not None]
        norms = [
            torch.as_tensor(rule.engine.squared_norms(each.theta, each), device=each.totals.device)
            for rule, each in dense
        ]
        size = sum(sum(coordinates.whole_lengths) for _, coordinates in dense)
        sums = [norm.sum() for norm in norms]
        devices = {norm.device for norm in norms}
        overall = {device: torch.stack([each.to(device) for each in sums]).sum() / size for device in devices}
        for ((_, strategy, config), coordinates), norm in zip(dense, norms, strict=True):
            columns, mean_sq = coordinates.total_columns(), norm / lengths_of(coordinates)
            columns.rms.copy_(mean_sq.sqrt())
            scale = strategy.length_scale(columns.scale, mean_sq, overall[norm.device], least, config)
            columns.scale.copy_(scale)


def check_numbers(updates: list[Update], losses: list[Tensor], pending: list[Any]) -> tuple[bool, bool, list[float]]:
    """Check the numbers of a step before anything is learned from them. This waits for the device.

    Returns:
        Whether every number is finite and can be squared, whether a gradient is unusually long, and the `pending`
        numbers as floats.
    """
    checks = [update.block.check(update) for update in updates]
    known = read_numbers([*itertools.chain.from_iterable(checks), *losses, *pending])
    end = 3 * len(checks)
    usable, norms, long = known[0:end:3], known[1:end:3], known[2:end:3]
    # the norm of a gradient that is rounding, as that of a bias before BatchNorm, varies without a reason
    is_long = max(long, default=0) > ROUNDING**2 * max(norms, default=0)
    values, read = known[end:][: len(losses)], known[end + len(losses) :]
    return all(usable) and all(map(math.isfinite, values)), is_long, read


def probe_is_due(updates: list[Update], long: bool = False) -> bool:
    """Return whether any block needs a second gradient."""

    def is_due(update: Update) -> bool:
        group, (_, strategy, config) = update.block.group, update.block.rule
        starting = group["steps"] == 0 or update.block.is_starting(update)
        return bool(strategy.probe_due(starting, group["unprobed"], long, config))

    return any(map(is_due, updates))


def noise_of(updates: list[Update]) -> StepNoise | None:
    """Return the noise of a step, where dense tensors have several samples."""
    dense = [update.batch for update in updates if update.rows is None]
    several = [(batch.grad_sq, batch.grad) for batch in dense if batch.grad_sq is not None]
    if not several:  # the usual step: a minibatch is one sample
        return None
    count = max(float(batch.counts.max()) for batch in dense)
    if count <= 1:
        return None
    sums = torch.stack([torch.stack([squares.sum(), grad.square().sum()]) for squares, grad in several]).sum(0)
    return of_samples(sums[0], sums[1], count)


# --- building blocks ----------------------------------------------------------------------------------------------


def members_of(groups: Iterable[Group], states: dict[Tensor, ParamState]) -> Any:
    """Return what must not change while blocks serve the parameters.

    These are groups with their algorithms and parameters, the tensors of the states, and shape, precision and device of
    each parameter that has state.
    """
    members = [(id(group), group["algorithm"], *map(id, group["params"])) for group in groups]
    fields = itertools.chain.from_iterable(map(dict.values, states.values()))
    kinds = [(p.shape, p.dtype, p.device) for p in states if isinstance(p, Tensor)]
    return members, [*map(id, fields)], kinds


def build_blocks(
    groups: Iterable[Group], states: dict[Tensor, ParamState], compact: bool
) -> tuple[list[Block], Scratch]:
    """Return blocks for all parameters that have state, and the memory that they share."""
    parts: list[tuple[Group, list[Tensor]]] = []
    for group in groups:
        config, sets = group["algorithm"], dict[Any, list[Tensor]]()
        for parameter in group["params"]:
            if states.get(parameter):
                apart = is_table(states[parameter]) or parameter.numel() >= LARGE
                kind = is_decoupled(parameter, states[parameter], config)
                key = parameter.device, parameter.dtype, kind, key_of(parameter)
                sets.setdefault(parameter if apart else key, []).append(parameter)
        parts += [(group, parameters) for parameters in sets.values()]
    tables = {id(group) for group, parameters in parts if is_table(states[parameters[0]])}
    dense = [parameters for _, parameters in parts if not is_table(states[parameters[0]])]
    scratch = Scratch(max((sum(local_of(p).numel() for p in parameters) for parameters in dense), default=0))
    blocks: list[Block] = []
    for group, parameters in parts:
        rule = rule_for(parameters[0].device, group["algorithm"])
        if is_table(states[parameters[0]]):
            blocks.append(TableBlock(parameters[0], states, group, rule))
        else:
            # rows of tables have no part in `Averaging.advantage`, on which momentum depends
            has_momentum = id(group) not in tables
            blocks.append(DenseBlock(parameters, states, group, rule, compact, scratch, has_momentum))
    return blocks, scratch


def blank_state(parameter: Tensor, group: Group, compact: bool) -> ParamState:
    """Return what a checkpoint holds of a dense parameter that has not begun to learn."""
    states = {parameter: new_state(parameter, group["algorithm"], False, compact)}
    rule = rule_for(parameter.device, group["algorithm"])
    DenseBlock([parameter], states, group, rule, compact, Scratch(0))
    return states[parameter]


def learning_coordinates(parameter: Tensor, state: ParamState, group: Group) -> Coordinates:
    """Return copies of what has seen enough samples to learn: a dense parameter or nothing, some rows of a table."""
    config = group["algorithm"]
    rows = (state["seen"].to(parameter.device) >= config.bootstrap).nonzero()[:, 0]
    rule = rule_for(parameter.device, config)
    if is_table(state):
        return TableBlock(parameter, {parameter: dict(state)}, group, rule).coordinates_of(rows)
    part, shards = local_of(parameter.detach()), shards_of([parameter]) if len(rows) else None
    size = len(rows) * part.numel()
    statistics: dict[str, Any] = {name: local_of(state[name]).reshape(-1)[:size] for name in STATISTICS}
    return Coordinates(
        theta=part.to(precision(parameter.dtype)).reshape(-1)[:size],
        average=None,
        **statistics,
        seen=state["seen"][: len(rows)],
        totals=state["totals"][None][: len(rows)],
        lengths=(part.numel(),) * len(rows),
        decoupled=is_decoupled(parameter, state, config),
        shards=shards,
    )


def check_states(states: dict[Tensor, ParamState]) -> None:
    """Raise ValueError if a parameter that has state has changed its shape, or if no training can have left a state."""
    for number, (parameter, state) in enumerate(states.items()):
        if not isinstance(parameter, Tensor):
            raise ValueError(f"the state has an entry for {parameter!r}, which is not a parameter; delete it")
        grad = state.get("grad")
        if isinstance(grad, Tensor) and grad.shape != parameter.shape:
            raise ValueError(
                f"a parameter changed its shape from {tuple(grad.shape)} to {tuple(parameter.shape)} after it "
                "began to learn; make a new VSGD for the new parameters"
            )
        if (fault := fault_of(state, parameter, number)) is not None:
            raise ValueError(f"{fault}. Load a checkpoint, or start again with opt.state.clear()")
