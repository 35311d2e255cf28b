"""Modules whose parameters go into anything else: the call is repeated sample by sample.

`torch.func.vmap` does that for some samples at once. Where it has no rule (recurrent layers) or must not be used
(random numbers would differ), samples go one by one; after a random call, through one replay of the whole batch with
the same random numbers, which is slow but right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from vsgd.torch.devices import RandomState, random_state, set_random_state
from vsgd.torch.per_sample.terms import SampleError, sum_dtype

Grads = dict[Tensor, Tensor]


class Call:
    """One call of one module: inputs, output gradients, random state and, if it must be replayed, parameter values."""

    def __init__(self, module: nn.Module, name: str, args: Any, kwargs: Any, scopes: tuple[Call, ...]):
        self.module, self.name, self.scopes = module, name, scopes
        self.params: set[Tensor] = set()
        """The parameters to replay for."""
        leaves, self.structure = pytree.tree_flatten((args, kwargs))
        # detached, as hooks in the graph lead here: a way back into the graph would keep both alive for good
        self.inputs = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.is_packed = any(isinstance(item, nn.utils.rnn.PackedSequence) for item in args)
        self.random_before = self.random_state()
        self.autocast = present_autocast(self.inputs)
        self.outputs: list[Any] = []
        self.grads: dict[int, Tensor] = {}

    def refuse_ambiguity(self) -> None:
        """Raise if samples are not first and as many as the positions, which other layers would count."""
        first = next((item for item in self.inputs if isinstance(item, Tensor)), None)
        if first is None or first.dim() != 3 or getattr(self.module, "batch_first", True):
            return
        if 1 < first.shape[0] == first.shape[1]:
            raise SampleError(
                f"module {self.name!r} has batch_first=False and got as many positions as samples "
                f"({first.shape[0]}), so the two cannot be told apart; use batch_first=True"
            )

    def finish(self, output: Any, listening: Callable[[], bool]) -> None:
        """Store what a replay needs after the call has returned, and wait for gradients."""
        if self.is_packed:
            raise SampleError(f"module {self.name!r} got a PackedSequence, whose samples interleave; pad instead")
        after = self.random_state()
        self.is_random = any(not torch.equal(state, after[device]) for device, state in self.random_before.items())
        self.versions = [item._version if isinstance(item, Tensor) else 0 for item in self.inputs]
        leaves, _ = pytree.tree_flatten(output)
        self.outputs = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves]
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda grad, place=place: self.receive(place, grad) if listening() else None)

    def random_state(self) -> RandomState:
        """Return the states of the random generators that the module may use."""
        inputs = (item for item in self.inputs if isinstance(item, Tensor))
        return random_state([*inputs, *self.module.parameters()])

    def receive(self, place: int, grad: Tensor) -> None:
        if place in self.grads:
            raise SampleError("backward ran twice through one forward pass; add the losses and call backward once")
        self.grads[place] = grad.detach()

    def freeze(self, count: int) -> None:
        """Copy the parameters, which are about to be shifted, and find out where the samples are."""
        changed = [
            item
            for item, version in zip(self.inputs, self.versions, strict=True)
            if isinstance(item, Tensor) and item._version != version
        ]
        if changed:
            raise SampleError(f"an input of module {self.name!r} was changed in place after the call; change a copy")
        self.input_axes = [
            self.axis(place, item.shape, count) if isinstance(item, Tensor) else None
            for place, item in enumerate(self.inputs)
        ]
        self.output_axes = [
            None if item is None else self.axis(place, item[0], count) for place, item in enumerate(self.outputs)
        ]
        self.names = {id(p): key for key, p in self.module.named_parameters(remove_duplicate=True)}
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.state = {key: value.detach().clone() for key, value in state.items()}
        self.count = count
        if all(axis is None for axis in self.input_axes) or any(self.output_axes[k] is None for k in self.grads):
            raise SampleError(
                f"module {self.name!r} ({type(self.module).__name__}) has to be replayed sample by sample, but its "
                f"inputs or outputs have no axis of {count} samples"
            )

    def leading_size(self) -> int:
        """Return the number of samples according to this call alone."""
        axis = 0 if getattr(self.module, "batch_first", True) else 1
        sizes = [item.shape[axis] for item in self.inputs if isinstance(item, Tensor) and item.dim() > axis]
        return sizes[0] if sizes else 0

    def axis(self, place: int, shape: torch.Size, count: int) -> int | None:
        """Return the sample axis of an input or output; None if all samples share it."""
        axis = 0 if getattr(self.module, "batch_first", True) else 1
        if isinstance(self.module, nn.RNNBase) and place > 0:
            axis = 1  # hidden states are layers × samples whatever batch_first says
        return axis if len(shape) > axis and shape[axis] == count else None

    def sample_grads(self, samples: slice) -> Grads:
        """Return gradients of some samples, samples × parameter, for all wanted parameters."""
        wanted = {self.names[id(p)]: self.state[self.names[id(p)]] for p in self.params}
        if not self.is_random:
            try:
                found = self.at_once(samples, wanted)
            except RuntimeError:
                found = stacked(self.alone(j, wanted) for j in range(samples.start, samples.stop))
        else:
            pull = self.pullback(self.inputs, wanted)
            found = stacked(pull(self.masked(j)) for j in range(samples.start, samples.stop))
        by_id = {id(p): p for p in self.params}
        return {by_id[i]: found[key].to(sum_dtype(found[key].dtype)) for i, key in self.names.items() if i in by_id}

    def at_once(self, samples: slice, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = cut(self.inputs, self.input_axes, samples)
        batched = [i for i, axis in enumerate(self.input_axes) if axis is not None]
        grads = self.output_grads(samples)
        places = sorted(grads)

        def one(parts: list[Tensor], grad_parts: list[Tensor]) -> dict[str, Tensor]:
            single = list(inputs)
            for i, part in zip(batched, parts, strict=True):
                single[i] = part.unsqueeze(self.input_axes[i] or 0)
            pull = self.pullback(single, wanted)
            return pull(
                {k: part.unsqueeze(self.output_axes[k] or 0) for k, part in zip(places, grad_parts, strict=True)}
            )

        axes = ([self.input_axes[i] for i in batched], [self.output_axes[k] for k in places])
        with warnings.catch_warnings():
            # a function that vmap takes sample by sample is slow, and known to be
            warnings.filterwarnings("ignore", message="There is a performance drop")
            result: dict[str, Tensor] = vmap(one, in_dims=axes)(
                [inputs[i] for i in batched], [grads[k] for k in places]
            )
        return result

    def alone(self, j: int, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
        one = slice(j, j + 1)
        return self.pullback(cut(self.inputs, self.input_axes, one), wanted)(self.output_grads(one))

    def masked(self, j: int) -> dict[int, Tensor]:
        """Return output gradients of the whole batch, zero except for sample j."""
        kept = {}
        for place, grad in self.grads.items():
            axis = self.output_axes[place] or 0
            kept[place] = torch.zeros_like(grad)
            kept[place].select(axis, j).copy_(grad.select(axis, j))
        return kept

    def output_grads(self, samples: slice) -> dict[int, Tensor]:
        places = list(self.grads)
        parts = cut([self.grads[k] for k in places], [self.output_axes[k] for k in places], samples)
        return dict(zip(places, parts, strict=True))

    def pullback(
        self, inputs: list[Any], wanted: dict[str, Tensor]
    ) -> Callable[[dict[int, Tensor]], dict[str, Tensor]]:
        """Run the module once more. Return the function from output gradients to parameter gradients."""
        args, kwargs = pytree.tree_unflatten(inputs, self.structure)
        rest = {key: value for key, value in self.state.items() if key not in wanted}

        def forward(values: dict[str, Tensor]) -> dict[int, Tensor]:
            with self.autocast():
                output = functional_call(self.module, {**rest, **values}, args, kwargs)
            leaves, _ = pytree.tree_flatten(output)
            return {place: leaves[place] for place in self.grads}

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


def stacked(rows: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = list(rows)
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def present_autocast(inputs: Iterable[Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context that repeats the present autocasting after the user's has ended."""
    device = next((item.device.type for item in inputs if isinstance(item, Tensor)), "cpu")
    if not torch.is_autocast_enabled(device):
        return nullcontext
    return partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
