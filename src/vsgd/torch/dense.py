"""Dense parameters of one group, precision and device, one after the other in flat buffers. Each is a segment.

Between steps a parameter holds the weights to evaluate, during a step the iterate, and while a second gradient is taken
the probed iterate. They are copied from the buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from vsgd.algorithms.strategy import probe_seed
from vsgd.eigenbasis import Basis, is_covariance_step, is_refresh_step
from vsgd.torch.basis import (
    Product,
    Stack,
    basis_of,
    multiply,
    refresh,
    rotation,
    stack_bases,
    stack_key,
    update_covariances,
)
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
from vsgd.torch.coordinates import Checks, Coordinates, Inputs, Scratch, Workspace, precision
from vsgd.torch.devices import sum_dtype
from vsgd.torch.distributed.shards import is_sharded, like, local_of, shards_of
from vsgd.torch.moments import Sampling
from vsgd.torch.state import BASIS_FIELDS, STATISTICS, ParamState, coarse_fields, is_decoupled, matrix_shape


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products are not cast, even if the user trains within autocast."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def is_plain(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor are one after the other in memory."""
    return tensor.is_contiguous() and not tensor.is_neg() and tensor.data_ptr() != 0


class DenseBlock:
    """Dense parameters that are updated together. Implements `Block`."""

    is_table = False

    def __init__(
        self,
        parameters: Sequence[Tensor],
        states: dict[Tensor, ParamState],
        group: Group,
        rule: Rule,
        compact: bool,
        scratch: Scratch,
        has_momentum: bool = True,
    ):
        """Take over the states, which become views of the buffers."""
        self._has_momentum = has_momentum
        parameters = in_stacking_order(parameters, states)
        first = parameters[0]
        config, dtype = rule.config, precision(first.dtype)
        self.parameters, self.group, self.rule = parameters, group, rule
        self._parts = [local_of(p) for p in parameters]
        self._is_coarse = first.dtype != dtype
        self._is_sharded = any(map(is_sharded, parameters))
        self._is_matrix = rule.engine.numbers(torch.tensor([p.dim() > 1 for p in parameters], device="cpu"))
        lengths = tuple(part.numel() for part in self._parts)

        def flat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
            return torch.cat([local_of(part.detach()).reshape(-1).to(first.device, dtype) for part in parts])

        coarse = coarse_fields(first.dtype, config, compact)
        buffers = {"iterate": flat([states[p].get("iterate", p) for p in parameters], dtype)}
        if rule.strategy.averages_iterates(config):
            buffers["average"] = flat([states[p].get("average", p) for p in parameters], dtype)
        for name in STATISTICS:
            kind = torch.bfloat16 if name in coarse else dtype
            buffers[name] = flat([states[p][name] for p in parameters], kind)
        sums = sum_dtype(first.device)
        self._has_started = False
        self._steps = torch.cat([states[p]["steps"].to("cpu", sums) for p in parameters])
        self.coordinates = Coordinates(
            theta=buffers["iterate"],
            average=buffers.get("average"),
            **{name: buffers[name] for name in STATISTICS},
            seen=torch.cat([states[p]["seen"].to("cpu", sums) for p in parameters]),
            totals=torch.stack([states[p]["totals"].to(first.device, sums) for p in parameters]),
            lengths=lengths,
            decoupled=is_decoupled(first, states[first], config),
            shards=shards_of(self.parameters),
            workspace=Workspace(scratch),
        )
        sides = [{k: states[p][k].to(first.device, dtype) for k in BASIS_FIELDS if k in states[p]} for p in parameters]
        self._stacks = stack_bases([matrix_shape(p.shape) for p in parameters], [basis_of(each) for each in sides])
        alone = [stack.of_one(k) for stack in self._stacks for k in range(stack.shape[0])]
        self._rotations: dict[Any, list[Product]] = {}
        """Products by the parameters, the addresses of values and results, and the direction."""
        self._bases = [Basis(*(None if part is None else part[0] for part in stack.basis)) for stack in alone]
        self._weights = self._views(self._evaluated())
        self._iterates = self._views(self.coordinates.theta)
        # what the parameter itself holds, exactly, needs no place in a checkpoint
        kept = [name for name in buffers if self._is_coarse or buffers[name] is not self._evaluated()]
        views = {name: self._views(buffers[name]) for name in kept}  # once for all tensors, not once for each
        for k, parameter in enumerate(parameters):
            states[parameter].clear()
            states[parameter].update({name: like(parameter, views[name][k]) for name in kept})
            if k < len(self._bases):
                fields = zip(BASIS_FIELDS, self._bases[k], strict=True)
                states[parameter].update({name: part for name, part in fields if part is not None})
            numbers = {"seen": self.coordinates.seen, "steps": self._steps}
            states[parameter].update({name: values[k : k + 1] for name, values in numbers.items()})
            states[parameter]["totals"] = self.coordinates.totals[k]

    # --- parameters -----------------------------------------------------------------------------------------------

    def buffer_bytes(self) -> int:
        average, workspace = self.coordinates.average, self.coordinates.workspace
        own = 0 if self._is_coarse or average is None else average.nbytes
        return own + (0 if workspace is None else workspace.nbytes())

    def adopt_changes(self) -> Any:
        changed = self.rule.engine.adopt(self._own(), self._weights, self._iterates, self.coordinates)
        # a part of a tensor may be changed in one process only
        return False if self._is_sharded else changed

    def open(self) -> None:
        if self.coordinates.average is not None or self._is_coarse:
            copy_all(self._own(), self._iterates)

    def close(self) -> None:
        own = self._own()
        for parameter, weights in zip(own, self._weights, strict=True):
            if parameter.shape != weights.shape:  # the closure has given it another
                parameter.data = weights.to(parameter.dtype, copy=True)
        copy_all(own, self._weights)

    def _own(self) -> list[Tensor]:
        """Return what this process holds of the parameters."""
        return [local_of(p) for p in self.parameters] if self._is_sharded else self.parameters

    def _evaluated(self) -> Tensor:
        average = self.coordinates.average
        return self.coordinates.theta if average is None else average

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Return a buffer as tensors shaped like the parameters."""
        parts = buffer.split([part.numel() for part in self._parts])
        return [part.view(own.shape) for part, own in zip(parts, self._parts, strict=True)]

    # --- coordinates ----------------------------------------------------------------------------------------------

    def gather(self, tensors: Sequence[Tensor | None], name: str | None = None) -> Tensor:
        """Return tensors shaped like the parameters as one flat tensor, with zeros for missing ones.

        With a `name` the memory of the last call with that name is used again.
        """
        theta = self.coordinates.theta
        for tensor, weights in zip(tensors, self._weights, strict=True):
            if tensor is not None and tensor.shape != weights.shape:
                raise RuntimeError(
                    f"a gradient has shape {tuple(tensor.shape)}, its parameter had {tuple(weights.shape)} before the "
                    "step; a closure must not change the shape of a parameter"
                )
        parts = [
            theta.new_zeros(1).expand(length)
            if tensor is None
            else (tensor.to_dense() if tensor.is_sparse else tensor).detach().reshape(-1)
            for tensor, length in zip(tensors, self.coordinates.lengths, strict=True)
        ]
        if len(parts) == 1 and parts[0].dtype == theta.dtype and is_plain(parts[0]):
            return parts[0]
        return torch.cat(parts, out=self.coordinates.memory_for(name))

    def bases(self) -> dict[Tensor, Basis]:
        return dict(zip(self.parameters, self._bases, strict=False))

    def into(self, flat: Tensor, name: str | None = None) -> Tensor:
        """Rotate from the parameters' own coordinates to those of their bases; see `gather` for the `name`."""
        return self._rotate(flat, self.coordinates.memory_for(name), backwards=False) if self._stacks else flat

    def back(self, flat: Tensor, name: str | None = None) -> Tensor:
        """Rotate from the coordinates of the bases to the parameters' own; see `gather` for the `name`."""
        return self._rotate(flat, self.coordinates.memory_for(name), backwards=True) if self._stacks else flat

    def _rotate(self, flat: Tensor, out: Tensor, backwards: bool) -> Tensor:
        multiply(self._products(self._stacks, flat, out, backwards))
        end = self._stacks[-1].coordinates.stop
        if end < flat.numel():
            out[end:].copy_(flat[end:])
        return out

    def _products(self, stacks: Sequence[Stack], flat: Tensor, out: Tensor, backwards: bool) -> list[Product]:
        """Return the products that rotate adjacent stacks. They are planned once for memory that is used again."""
        key = stacks[0].parameters.start, stacks[-1].parameters.stop, flat.data_ptr(), out.data_ptr(), backwards
        products = self._rotations.get(key)
        if products is None:
            half = self.coordinates.memory_for("half")
            products = [each for stack in stacks for each in rotation(stack, flat, half, out, backwards)]
            if self._stays(flat) and self._stays(out):
                self._rotations[key] = products
        return products

    def _stays(self, tensor: Tensor) -> bool:
        """Return whether this memory is used in the steps to come."""
        workspace = self.coordinates.workspace
        return tensor is self.coordinates.grad or (workspace is not None and workspace.holds(tensor))

    # --- a step ---------------------------------------------------------------------------------------------------

    def collect(self, sampling: Sampling) -> Update | None:
        batch = sampling.dense(self)
        return Update(self, self.coordinates, batch) if any(batch.counts.tolist()) else None

    def complete(self, update: Update, sampling: Sampling) -> Update:
        return update._replace(batch=sampling.complete_dense(self, update.batch))

    def check(self, update: Update) -> Checks:
        return check(update.coordinates, update.batch, self.rule)

    def is_starting(self, update: Update) -> bool:
        if not self._has_started:
            self._has_started = bool((self.coordinates.seen >= self.rule.config.bootstrap).all())
        return not self._has_started and is_starting(update.coordinates, update.batch, self.rule.config)

    def probe(self, update: Update, indices: dict[Tensor, int]) -> Update:
        """Let the parameters hold θ + δ. Without an eigenbasis, δ is then rounded to their precision."""
        seeds = [probe_seed(self.group["steps"], indices[p]) for p in self.parameters]
        delta = self.rule.engine.probe(self.coordinates, update.batch, seeds, self.rule.config)
        # a tensor without a gradient stays where it is
        has_grad = (update.batch.counts > 0).tolist()
        own = list(compress(zip(self._own(), self._iterates, strict=True), has_grad))
        offsets = self._views(self.back(delta, "back"))
        for (parameter, iterate), offset in zip(own, compress(offsets, has_grad), strict=True):
            torch.add(iterate, offset, out=parameter)
        if not self.coordinates.decoupled:
            for (parameter, iterate), offset in zip(own, compress(self._views(delta), has_grad), strict=True):
                torch.sub(parameter, iterate, out=offset)
        return update._replace(delta=delta)

    def apply(self, update: Update) -> Report:
        engine, strategy, config = self.rule
        batch, group = update.batch, self.group
        seen, counts = engine.numbers(self.coordinates.seen), engine.numbers(batch.counts)
        weight = strategy.averaging_weight(seen, group["averaging"][0], config) * (counts > 0)
        rotation = (partial(self.into, name="rotated"), partial(self.back, name="back")) if self._stacks else None
        # biases and scales of normalization layers, which are vectors, do not decay
        samples = self._is_matrix * counts * group["steps_per_epoch"] if estimates_decay(group) else None
        rates = rates_of(group)
        if not self._has_momentum:
            rates = rates._replace(momentum_obstacle=math.inf)
        inputs = Inputs(batch, update.delta, rates, weight, samples, starts=self.is_starting(update))
        report = learn_and_move(self.coordinates, inputs, self.rule, rotation)
        self._update_bases(batch.plain_grad, batch.counts)
        group["samples"] = max(batch.counts.tolist()) or group["samples"]
        return report._replace(outliers=dict(zip(map(id, self.parameters), report.outliers, strict=True)))

    def _update_bases(self, plain_grad: Tensor, counts: Tensor) -> None:
        """Let the bases follow the gradient. ḡ is rotated with them; the other statistics stay."""
        steps, count = self._steps.tolist(), counts.tolist()
        own_steps = self._steps.numpy()  # NumPy takes less time for a few numbers
        own_steps += counts.numpy() > 0
        if not any(map(is_covariance_step, set(steps))):
            return
        for stack in self._stacks:
            own = set(steps[stack.parameters])
            if len(own) == 1 and all(count[stack.parameters]):
                self._follow(stack, plain_grad, own.pop())
            else:
                for k, place in enumerate(range(stack.parameters.start, stack.parameters.stop)):
                    if count[place]:
                        self._follow(stack.of_one(k), plain_grad, steps[place])

    def _follow(self, stack: Stack, plain_grad: Tensor, steps: float) -> None:
        """Let the bases of a stack follow the gradient, if that is due; each matrix has had as many `steps`."""
        if not is_covariance_step(steps):
            return
        place = stack.coordinates
        update_covariances(stack.basis, plain_grad[place].view(stack.shape), steps)
        if is_refresh_step(steps):
            own, mean = self.coordinates.memory_for("back"), self.coordinates.grad
            is_compact = mean.dtype != own.dtype
            mean = mean.to(own.dtype) if is_compact else mean
            multiply(self._products([stack], mean, own, True))
            with no_autocast(plain_grad.device):
                refresh(stack.basis, steps)
            multiply(self._products([stack], own, mean, False))
            if is_compact:
                self.coordinates.grad[place].copy_(mean[place])


def in_stacking_order(parameters: Sequence[Tensor], states: dict[Tensor, ParamState]) -> list[Tensor]:
    """Return parameters with those first that have a basis, and with those next to each other that can be stacked."""
    places: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        key = stack_key(matrix_shape(parameter.shape), basis_of(states[parameter]))
        places.setdefault(key, []).append(parameter)
    others = places.pop(None, [])
    return [*(parameter for same in places.values() for parameter in same), *others]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of equal shapes, at once."""
    torch._foreach_copy_(targets, sources)
