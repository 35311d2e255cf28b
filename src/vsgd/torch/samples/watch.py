"""Sees every function that a parameter goes into, and every module call around it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vsgd.torch.samples.errors import SampleError
from vsgd.torch.samples.layers import HANDLERS, Build, Layout
from vsgd.torch.samples.replay import Call
from vsgd.torch.samples.terms import Placed


@dataclass(eq=False)
class Use:
    """One function call that some rows of a parameter went into; its term is there once the gradient has arrived."""

    param: Tensor
    lo: int
    hi: int
    build: Build | None
    scopes: tuple[Call, ...]
    placed: Placed | None = None

    def receive(self, grad: Tensor) -> None:
        if self.build is not None:
            self.placed = Placed(self.lo, self.hi, self.build(grad.detach()))


def unguarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without the check that would hand it over whole to a mode, instead of its parts."""
    scope = {**function.__globals__, "has_torch_function": lambda _: False}
    clone = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


ATTENTION = unguarded(F.multi_head_attention_forward)
ROW_VIEWS = {Tensor.chunk, Tensor.split, torch.chunk, torch.split}


@dataclass
class Seen:
    """What a watch has gathered."""

    uses: list[Use] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    count: int | None = None
    counted_by: str = ""
    signature: list[Any] = field(default_factory=list)
    coarsest: float = 0.0
    """The machine epsilon of the least precise gradient."""
    started: bool = False
    """Has a gradient arrived?"""
    lookups: dict[Any, Tensor] = field(default_factory=dict)
    """Rows that an embedding returned for 0, 1, 2, …, by name and shape: each of a sample, or shared by all?"""
    last_input: Tensor | None = None
    """Of the last function that was captured, samples first."""
    listening: bool = True
    """Are gradients those of the loss?"""

    def release(self) -> None:
        """Let go of everything captured; the graph of a loss that somebody keeps still leads here."""
        for use in self.uses:
            use.build, use.placed, use.scopes = None, None, ()
        self.uses, self.calls, self.lookups, self.last_input = [], [], {}, None


class Watch(TorchFunctionMode):
    """Notes the uses of the given parameters as long as it is active."""

    def __init__(self, names: dict[Tensor, str], seen: Seen, apart: set[Any]):
        super().__init__()
        self.names = names
        self.seen = seen
        self.apart = apart
        """Lookups that are known to be one row for each sample."""
        self.stack: list[Call] = []
        self.layout: Layout = samples_first
        self.tracked: dict[int, tuple[Tensor, Tensor, int]] = {id(p): (p, p, 0) for p in names}
        """Parameters and blocks of their rows: the tensor, its parameter, its first row."""
        self.shared: dict[int, Tensor] = {}
        """Made of parameters alone, so that their first axis is not the samples, whatever its size."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self.attend(args, kwargs)
        if func is F.batch_norm and bound(F.batch_norm, args, kwargs)["training"]:
            raise SampleError(
                f"{self.where()} normalises over the batch, which mixes the samples; put it into eval mode, "
                "or use GroupNorm or LayerNorm instead of BatchNorm"
            )
        result = func(*args, **kwargs)
        given = [t for t in tensors((args, kwargs)) if id(t) in self.tracked or id(t) in self.shared]
        if given and any(t.requires_grad for t in tensors(result)):
            self.note(func, args, kwargs, result, given)
        return result

    def attend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Attention is linear layers around a core without parameters; inside it, the samples are the second axis."""
        query = args[0]
        if query.dim() != 3:
            raise SampleError(f"{self.where()} was called without a batch axis: its query is {tuple(query.shape)}")
        samples, outer = query.shape[1], self.layout
        # the output projection sees length and samples as one axis
        self.layout = lambda t: t.reshape(-1, samples, t.shape[-1]).transpose(0, 1)
        try:
            with self:
                return ATTENTION(*args, **kwargs)
        finally:
            self.layout = outer

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor]) -> None:
        if self.seen.started:
            raise SampleError(
                "the model was called again after a backward pass; record one forward and one backward pass at a time"
            )
        if func in ROW_VIEWS and id(given[0]) in self.tracked and not kwargs.get("dim") and len(args) < 3:
            self.track_rows(result, given[0])
        elif not self.handle(func, args, kwargs, result, given):
            for tensor in given:
                if id(tensor) in self.tracked:
                    self.leave_to_module(self.tracked[id(tensor)][1], func)
            if len(given) == sum(1 for _ in tensors((args, kwargs))):
                self.shared.update((id(t), t) for t in tensors(result))

    def handle(self, func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor]) -> bool:
        """Capture the call of a function that has a handler, if parameters are where the handler expects them."""
        if func not in HANDLERS:
            return False
        data = bound(HANDLERS[func], (None, *args), kwargs)["input"]
        if any(t is data or id(t) in self.shared for t in given):
            return False
        capture = HANDLERS[func](self.layout, *args, **kwargs)
        uses = []
        for tensor, build in capture.builders:
            if tensor is not None and id(tensor) in self.tracked:
                _, param, lo = self.tracked[id(tensor)]
                uses.append(Use(param, lo, lo + len(tensor), build, tuple(self.stack)))
        self.agree(capture.samples, self.names[self.tracked[id(given[0])][1]])
        self.seen.uses += uses
        described = [(self.names[use.param], tuple(result.shape)) for use in uses]
        self.seen.signature += described
        self.listen(result, uses)
        self.seen.last_input = self.layout(data)
        if capture.may_be_shared and described[0] not in self.apart:
            self.seen.lookups[described[0]] = result
        return True

    def track_rows(self, views: Any, whole: Tensor) -> None:
        _, param, start = self.tracked[id(whole)]
        for view in views:
            self.tracked[id(view)] = (view, param, start)
            start += len(view)

    def agree(self, count: int, name: str) -> None:
        seen = self.seen
        if seen.count is None:
            seen.count, seen.counted_by = count, name
        elif seen.count != count:
            raise SampleError(
                f"parameter {name!r} saw a batch of {count}, but {seen.counted_by!r} one of {seen.count}; the first "
                "axis of every layer's input must be the same samples (batch_first=True where there is a choice), and "
                "what all samples share, such as positions, must be expanded to the batch"
            )

    def listen(self, output: Tensor, uses: list[Use]) -> None:
        def arrived(grad: Tensor) -> None:
            if not self.seen.listening:
                return
            if any(use.placed is not None for use in uses):
                raise SampleError("backward ran twice through one forward pass; add the losses and call backward once")
            self.seen.coarsest = max(self.seen.coarsest, torch.finfo(grad.dtype).eps)
            for use in uses:
                use.receive(grad)

        output.register_hook(arrived)

    def leave_to_module(self, param: Tensor, func: Any) -> None:
        """No handler: the module call around it has to be replayed sample by sample."""
        scope = self.owner_of(param)
        if scope is None:
            raise SampleError(
                f"parameter {self.names[param]!r} goes into {name_of(func)} outside any module call, "
                "where samples cannot be told apart; use it inside a module's forward (a penalty on it is weight decay)"
            )
        scope.params.add(param)

    def owner_of(self, param: Tensor) -> Call | None:
        """The innermost call of a module that the parameter belongs to, directly or through its parts."""
        return next((c for c in reversed(self.stack) if any(p is param for p in c.module.parameters())), None)

    def enter(self, call: Call) -> None:
        self.stack.append(call)
        call.refuse_ambiguity()

    def leave(self, output: Any) -> None:
        """The innermost call has returned, without an output if it failed."""
        call = self.stack.pop()
        if output is None:
            return
        if not self.stack:
            self.refuse_shared_rows(output)
        if not call.params:
            return
        if all(id(t) in self.shared for t in tensors(output)):
            # nothing in it depends on samples, as in a parametrization; what it is for does
            for param in call.params:
                self.leave_to_module(param, call.module)
        else:
            call.finish(output, lambda: self.seen.listening)
            self.seen.calls.append(call)
            self.seen.signature.append((call.name, tuple(tuple(t.shape) for t in tensors(output))))

    def refuse_shared_rows(self, output: Any) -> None:
        """Rows that were looked up must each have gone into one sample only.

        If half of the samples depend on rows of the other half, all share them, as they do positions. Samples are seen
        in the output of the outermost call, or in the last input of a function if it returns a loss.
        """
        count = self.seen.count
        found = [t for t in tensors(output) if t.requires_grad and t.dim() and len(t) == count]
        if not found and self.seen.last_input is not None and self.seen.last_input.requires_grad:
            found = [self.seen.last_input]
        for (name, _), rows in self.seen.lookups.items():
            if any(self.mixes(values, rows) for values in found):
                raise SampleError(
                    f"the embedding {name!r} was given the positions, or other numbers, that all samples share, so "
                    "their gradients arrive already added up; give each sample its own: "
                    "torch.arange(length).expand(batch, length)"
                )

    def mixes(self, values: Tensor, rows: Tensor) -> bool:
        """Does the first half of the samples depend on rows of the second half?"""
        half = len(values) // 2
        weights = torch.zeros_like(values)
        size = weights[:half].numel()
        weights[:half] = torch.arange(1, size + 1, device=values.device).sin().view_as(weights[:half])
        self.seen.listening = False
        try:
            (grad,) = torch.autograd.grad(values, rows, weights, retain_graph=True, allow_unused=True)
        finally:
            self.seen.listening = True
        return grad is not None and bool(grad.isfinite().all()) and bool(grad[half:].any())

    def where(self) -> str:
        """The innermost module, for people."""
        if not self.stack:
            return "the closure"
        return f"module {self.stack[-1].name!r} ({type(self.stack[-1].module).__name__})"


def name_of(func: Any) -> str:
    return str(getattr(func, "__name__", type(func).__name__))


def samples_first(tensor: Tensor) -> Tensor:
    """The usual layout."""
    return tensor


def bound(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name."""
    arguments = inspect.signature(function).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.arguments


def tensors(nested: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (tuple, list)):
        for item in nested:
            yield from tensors(item)
    elif isinstance(nested, dict):
        for item in nested.values():
            yield from tensors(item)
