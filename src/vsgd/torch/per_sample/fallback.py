"""Replay module calls sample by sample, where parameters go into functions without a handler.

`torch.func.vmap` replays some samples at once. Where it has no rule, as for recurrent layers, samples are replayed one
by one. A call that draws random numbers is replayed on the whole batch, once for each sample, with the same numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from vsgd.torch.coordinates import precision
from vsgd.torch.devices import RandomState, random_state, set_random_state
from vsgd.torch.per_sample.terms import Placed, SampleError


class Call:
    """One call of one module: inputs, output gradients, random state and, if it must be replayed, parameter values."""

    def __init__(self, module: nn.Module, name: str, args: Any, kwargs: Any, scopes: tuple[Call, ...]):
        self.module, self.name, self.scopes = module, name, scopes
        self.params: dict[Tensor, None] = {}
        """The parameters to replay for, in the order of their use. A set would have another order in each run."""
        leaves, self.structure = pytree.tree_flatten((args, kwargs))
        # detached, so that a recording does not keep the graph of the loss alive
        self.inputs = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.is_packed = any(isinstance(item, nn.utils.rnn.PackedSequence) for item in args)
        self.sample_axis = 0 if getattr(module, "batch_first", True) else 1
        self.random_before = self.random_state()
        self.autocast = present_autocast(self.inputs)
        self.grads: dict[int, Tensor] = {}

    def refuse_ambiguity(self) -> None:
        """Raise SampleError if positions come first and are as many as samples, which other layers would confuse."""
        first = next((item for item in self.inputs if isinstance(item, Tensor)), None)
        if self.sample_axis == 1 and first is not None and first.dim() == 3 and 1 < first.shape[0] == first.shape[1]:
            raise SampleError(
                f"module {self.name!r} has batch_first=False and got as many positions as samples "
                f"({first.shape[0]}), so the two cannot be distinguished; use batch_first=True"
            )

    def finish(self, output: Any, expect_gradient: Callable[[Tensor, Callable[[Tensor], None]], None]) -> None:
        """Store what a replay needs after the call has returned, and have the output gradients stored."""
        if self.is_packed:
            raise SampleError(f"module {self.name!r} got a PackedSequence, whose samples interleave; pad instead")
        after = self.random_state()
        self.is_random = any(not torch.equal(state, after[device]) for device, state in self.random_before.items())
        self.versions = [item._version if isinstance(item, Tensor) else 0 for item in self.inputs]
        leaves, _ = pytree.tree_flatten(output)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                expect_gradient(leaf, partial(self.grads.__setitem__, place))

    def random_state(self) -> RandomState:
        """Return the states of the random generators that the module may use."""
        inputs = (item for item in self.inputs if isinstance(item, Tensor))
        return random_state([*inputs, *self.module.parameters()])

    def freeze(self, count: int) -> None:
        """Copy the parameters, which are about to be shifted, and find the sample axes of inputs and outputs."""
        for item, version in zip(self.inputs, self.versions, strict=True):
            if isinstance(item, Tensor) and item._version != version:
                raise SampleError(
                    f"an input of module {self.name!r} was changed in place after the call; change a copy"
                )
        self.input_axes = [self.axis(place, item, count) for place, item in enumerate(self.inputs)]
        self.grad_axes = [self.axis(place, grad, count) for place, grad in self.grads.items()]
        self.names: dict[Tensor, str] = {p: key for key, p in self.module.named_parameters(remove_duplicate=True)}
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.state = {key: value.detach().clone() for key, value in state.items()}
        if all(axis is None for axis in self.input_axes) or None in self.grad_axes:
            raise SampleError(
                f"module {self.name!r} ({type(self.module).__name__}) has to be replayed sample by sample, but its "
                f"inputs or outputs have no axis of {count} samples"
            )

    def leading_size(self) -> int:
        """Return the number of samples according to this call alone."""
        shapes = [item.shape for item in self.inputs if isinstance(item, Tensor) and item.dim() > self.sample_axis]
        return shapes[0][self.sample_axis] if shapes else 0

    def axis(self, place: int, item: Any, count: int) -> int | None:
        """Return the sample axis of an input or output; None if all samples share it."""
        # hidden states are layers × samples, independent of batch_first
        axis = 1 if isinstance(self.module, nn.RNNBase) and place > 0 else self.sample_axis
        return axis if isinstance(item, Tensor) and item.dim() > axis and item.shape[axis] == count else None

    def sample_grads(self, samples: slice) -> dict[Tensor, Tensor]:
        """Return gradients of some samples, samples × parameter, for all parameters to replay for."""
        if self.is_random:
            pull = self.pullback(self.inputs)
            found = stacked(pull(self.masked_grads(j)) for j in range(samples.start, samples.stop))
        else:
            try:
                found = self.at_once(*self.cut(samples))
            except RuntimeError:
                parts = (self.cut(slice(j, j + 1)) for j in range(samples.start, samples.stop))
                found = stacked(self.pullback(inputs)(grads) for inputs, grads in parts)
        return {p: found[self.names[p]].to(precision(p.dtype)) for p in self.params}

    def cut(self, samples: slice) -> tuple[list[Any], list[Tensor]]:
        """Return inputs and output gradients of some samples."""
        return cut(self.inputs, self.input_axes, samples), cut([*self.grads.values()], self.grad_axes, samples)

    def masked_grads(self, j: int) -> list[Tensor]:
        """Return output gradients of the whole batch, zero except for sample j."""
        result = [torch.zeros_like(grad) for grad in self.grads.values()]
        for masked, grad, axis in zip(result, self.grads.values(), self.grad_axes, strict=True):
            masked.select(axis or 0, j).copy_(grad.select(axis or 0, j))
        return result

    def at_once(self, inputs: list[Any], grads: list[Tensor]) -> dict[str, Tensor]:
        """Return gradients of some samples by `vmap`."""

        def one(inputs: list[Any], grads: list[Tensor]) -> dict[str, Tensor]:
            return self.pullback(with_axes(inputs, self.input_axes))(with_axes(grads, self.grad_axes))

        with warnings.catch_warnings():
            # a function that vmap takes sample by sample is slow, and known to be
            warnings.filterwarnings("ignore", message="There is a performance drop")
            result: dict[str, Tensor] = vmap(one, in_dims=(self.input_axes, self.grad_axes))(inputs, grads)
        return result

    def pullback(self, inputs: list[Any]) -> Callable[[list[Tensor]], dict[str, Tensor]]:
        """Run the module once more. Return the function from output gradients to parameter gradients."""
        args, kwargs = pytree.tree_unflatten(inputs, self.structure)
        wanted = {self.names[p]: self.state[self.names[p]] for p in self.params}

        def forward(values: dict[str, Tensor]) -> list[Tensor]:
            with self.autocast():
                output = functional_call(self.module, {**self.state, **values}, args, kwargs)
            leaves, _ = pytree.tree_flatten(output)
            return [leaves[place] for place in self.grads]

        before = self.random_state()
        if self.is_random:
            set_random_state(self.random_before)
        try:
            with torch.enable_grad():
                pull = vjp(forward, wanted)[1]
        finally:
            if self.is_random:
                set_random_state(before)
        return lambda grads: pull(grads)[0]


def cut(items: list[Any], axes: list[int | None], samples: slice) -> list[Any]:
    """Return some samples of the tensors that have a sample axis; the others unchanged."""
    length = samples.stop - samples.start
    return [
        item if axis is None else item.narrow(axis, samples.start, length)
        for item, axis in zip(items, axes, strict=True)
    ]


def with_axes(items: list[Any], axes: list[int | None]) -> list[Any]:
    """Return the parts of one sample with a sample axis of length 1."""
    return [item if axis is None else item.unsqueeze(axis) for item, axis in zip(items, axes, strict=True)]


def stacked(rows: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = list(rows)
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def present_autocast(inputs: Iterable[Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context that repeats the present autocasting after that of the user has ended."""
    device = next((item.device.type for item in inputs if isinstance(item, Tensor)), "cpu")
    if not torch.is_autocast_enabled(device):
        return nullcontext
    return partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)


@dataclass(eq=False)
class Recording:
    """One forward and backward pass; complete when the `with` block of `Recorder.record` has ended."""

    count: int = 0
    """n, the number of samples of the minibatch."""
    terms: dict[Tensor, list[Placed]] = field(default_factory=dict)
    """The terms of each parameter."""
    calls: list[Call] = field(default_factory=list)
    """Module calls to be replayed."""

    def replayed(self) -> list[Tensor]:
        """Return the parameters that module calls are replayed for."""
        return list(dict.fromkeys(param for call in self.calls for param in call.params))

    def sample_grads(self, params: list[Tensor], samples: slice) -> dict[Tensor, Tensor]:
        """Return gradients of some samples, samples × parameter, from replays and from all other uses.

        `params` must include all parameters that calls are replayed for.
        """
        length = samples.stop - samples.start
        grads = {p: torch.zeros(length, *p.shape, dtype=precision(p.dtype), device=p.device) for p in params}
        for call in self.calls:
            for param, part in call.sample_grads(samples).items():
                grads[param] += part
        for param in params:
            for lo, hi, term in self.terms.get(param, []):
                block = grads[param][:, lo:hi]
                block += term.written_out(samples, block[:1, :1].numel())(slice(0, hi - lo)).view_as(block)
        return grads
