"""Records forward and backward passes, and turns two of them into sums over samples.

A mode sees every function that a parameter goes into, and hooks see every module call around it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vsgd.eigenbasis import Basis
from vsgd.torch.per_sample.fallback import Call
from vsgd.torch.per_sample.gram import gram_matrix, weighted_sums
from vsgd.torch.per_sample.layers import HANDLERS, Build, Layout
from vsgd.torch.per_sample.reduce import check_totals, parameter_sums, replayed_sums, rotated_sums
from vsgd.torch.per_sample.terms import Placed, RowSums, SampleError, SampleSums, Terms, scaled


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


PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
ROW_VIEWS = {Tensor.chunk, Tensor.split, torch.chunk, torch.split}


@dataclass
class Seen:
    """Function calls and gradients that a watch has seen."""

    uses: list[Use] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    count: int | None = None
    counted_by: str = ""
    signature: list[Any] = field(default_factory=list)
    coarsest: float = 0.0
    """The machine epsilon of the least precise gradient."""
    started: bool = False
    """Whether a gradient has arrived."""
    lookups: dict[Any, Tensor] = field(default_factory=dict)
    """Rows that an embedding returned for 0, 1, 2, …, by name and shape: each of a sample, or shared by all?"""
    last_input: Tensor | None = None
    """Of the last function that was captured, samples first."""
    listening: bool = True
    """Whether gradients are those of the loss."""

    def release(self) -> None:
        """Let go of everything captured; the graph of a loss that somebody keeps still leads here."""
        for use in self.uses:
            use.build, use.placed, use.scopes = None, None, ()
        self.uses, self.calls, self.lookups, self.last_input = [], [], {}, None


class Watch(TorchFunctionMode):
    """Mode that notes the uses of the given parameters."""

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
            return self.attend(bound(func, args, kwargs))
        if func is F.batch_norm and bound(F.batch_norm, args, kwargs)["training"]:
            raise SampleError(
                f"{self.where()} normalises over the batch, which mixes the samples; put it into eval mode, "
                "or use GroupNorm or LayerNorm instead of BatchNorm"
            )
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and note it if it depends on parameters."""
        result = func(*args, **kwargs)
        given = [t for t in tensors((args, kwargs)) if id(t) in self.tracked or id(t) in self.shared]
        if given and any(t.requires_grad for t in tensors(result)):
            self.note(func, args, kwargs, result, given)
        return result

    def attend(self, given: dict[str, Any]) -> Any:
        """Call attention: linear layers around a core without parameters, of which the samples are the second axis.

        A mode does not see what happens within attention. So the linear layers are called here, and the core is torch's
        attention with projections that change nothing.
        """
        query, key, value, bias = (given[name] for name in ("query", "key", "value", "in_proj_bias"))
        if query.dim() != 3:
            raise SampleError(f"{self.where()} was called without a batch axis: its query is {tuple(query.shape)}")
        outer, self.layout = self.layout, lambda t: t.transpose(0, 1)
        try:
            with self:
                is_apart = given["use_separate_proj_weight"]
                if query is key is value and not is_apart:
                    projected = F.linear(query, given["in_proj_weight"], bias).chunk(3, -1)
                else:
                    weights = [given[name] for name in PROJECTIONS] if is_apart else given["in_proj_weight"].chunk(3)
                    biases = (None,) * 3 if bias is None else bias.chunk(3)
                    projected = tuple(map(F.linear, (query, key, value), weights, biases))
            identity = torch.eye(query.shape[-1], dtype=projected[0].dtype, device=query.device)
            self.shared[id(identity)] = identity
            core = {**given, **dict(zip(("query", "key", "value"), projected, strict=True))}
            core |= dict.fromkeys(("in_proj_weight", "in_proj_bias", "out_proj_bias"))
            core |= {**dict.fromkeys((*PROJECTIONS, "out_proj_weight"), identity), "use_separate_proj_weight": True}
            result, attention = self.call(F.multi_head_attention_forward, (), core)
            with self:
                return F.linear(result, given["out_proj_weight"], given["out_proj_bias"]), attention
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
        """Have the module call around a function without a handler replayed sample by sample."""
        scope = self.owner_of(param)
        if scope is None:
            raise SampleError(
                f"parameter {self.names[param]!r} goes into {name_of(func)} outside any module call, "
                "where samples cannot be told apart; use it inside a module's forward (a penalty on it is weight decay)"
            )
        scope.params.add(param)

    def owner_of(self, param: Tensor) -> Call | None:
        """Return the innermost call of a module that the parameter belongs to, directly or through its parts."""
        return next((c for c in reversed(self.stack) if any(p is param for p in c.module.parameters())), None)

    def enter(self, call: Call) -> None:
        self.stack.append(call)
        call.refuse_ambiguity()

    def leave(self, output: Any) -> None:
        """Take note that the innermost call has returned, without an output if it failed."""
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
        """Raise if a row that was looked up went into several samples.

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
        """Return whether the first half of the samples depends on rows of the second half."""
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
        """Return a description of the innermost module."""
        if not self.stack:
            return "the closure"
        return f"module {self.stack[-1].name!r} ({type(self.stack[-1].module).__name__})"


def name_of(func: Any) -> str:
    return str(getattr(func, "__name__", type(func).__name__))


def samples_first(tensor: Tensor) -> Tensor:
    """Return a tensor whose samples come first unchanged."""
    return tensor


def bound(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    arguments = inspect.signature(function).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.arguments


def tensors(nested: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and dictionaries."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (tuple, list)):
        for item in nested:
            yield from tensors(item)
    elif isinstance(nested, dict):
        for item in nested.values():
            yield from tensors(item)


Sums = dict[Tensor, SampleSums | RowSums]


class Recording:
    """The record of one forward and backward pass; complete when the `with` block has ended."""

    def __init__(self) -> None:
        self.count = 0
        """n, the samples of the minibatch."""
        self.terms: Terms = {}
        self.calls: list[Call] = []
        """Module calls to be replayed."""


class Recorder:
    """Watches a model's parameters.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> recorder = Recorder(model)
        >>> with recorder.record() as here:
        ...     model(torch.ones(5, 3)).square().mean(0).sum().backward()
        >>> here.count, recorder.sums(here)[model.weight].grad_sq.shape
        (5, torch.Size([2, 3]))
    """

    def __init__(self, model: nn.Module):
        for name, param in model.named_parameters():
            if param.is_complex():
                raise SampleError(f"parameter {name!r} is complex; represent it by its real and imaginary part")
        self.model = model
        self._checked: set[Any] = set()
        self._apart: set[Any] = set()

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Record one forward and one backward pass over one minibatch, whose samples are the first axis.

        Compiled modules run uncompiled meanwhile, as nothing can be seen inside them otherwise.
        """
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        seen, recording, received = Seen(), Recording(), dict[Tensor, Tensor | None]()
        try:
            with self._watching(names, seen, received):
                yield recording
            with torch.no_grad():
                self._complete(recording, seen, names, received)
        finally:
            seen.release()

    @contextlib.contextmanager
    def _watching(self, names: dict[Tensor, str], seen: Seen, received: dict[Tensor, Tensor | None]) -> Iterator[None]:
        """Install the mode and all hooks, and remove them at the end."""
        watch = Watch(names, seen, self._apart)
        with contextlib.ExitStack() as stack:
            for name, module in self.model.named_modules():
                for handle in follow(watch, module, name):
                    stack.callback(handle.remove)
            for param in names:
                stack.callback(param.register_hook(self._receiver(param, seen, received)).remove)
            if hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(watch)
            yield

    def _receiver(self, param: Tensor, seen: Seen, received: dict[Tensor, Tensor | None]) -> Any:
        def receive(grad: Tensor) -> None:
            if param in received:
                raise SampleError("backward ran twice in one recording; add the losses and call backward once")
            seen.started = True
            # a copy: what the parameter gets may be clipped or unscaled before the recording ends
            received[param] = None if tuple(seen.signature) in self._checked else grad.detach().clone()

        return receive

    def _complete(
        self, recording: Recording, seen: Seen, names: dict[Tensor, str], received: dict[Tensor, Tensor | None]
    ) -> None:
        if not received:
            raise SampleError("no gradient arrived: call the model and loss.backward() inside the recording")
        calls = [call for call in seen.calls if call.grads]
        recording.count = sample_count(seen, calls)
        if recording.count == 0:
            raise SampleError("the minibatch is empty: there is no row to take the gradient of")
        recording.calls = outermost(calls)
        for call in recording.calls:
            call.freeze(recording.count)
        for use in seen.uses:
            if use.placed is not None and not replayed(use, recording.calls):
                recording.terms.setdefault(use.param, []).append(use.placed)
        covered = {*recording.terms, *(param for call in recording.calls for param in call.params)}
        for param in received:
            if param not in covered:
                raise SampleError(
                    f"parameter {names[param]!r} got a gradient from something that was not recorded, such as a custom "
                    "autograd function or reentrant checkpointing; call it through ordinary functions of torch"
                )
        signature = tuple(seen.signature)
        if signature not in self._checked:
            check_totals(recording.terms, recording.calls, recording.count, received, names, seen.coarsest)
            self._checked.add(signature)
        self._apart.update(seen.lookups)

    @torch.no_grad()
    def sums(
        self,
        here: Recording,
        there: Recording | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        loss_scale: float = 1.0,
        only: set[Tensor] | None = None,
        bases: dict[Tensor, Basis] | None = None,
    ) -> Sums:
        """Return sums over samples for each parameter that has a gradient.

        Args:
            here: the recording at the parameters.
            there: the same minibatch at the shifted parameters, or None.
            reduction: how the loss puts the losses of the samples together.
            loss_scale: what the loss was multiplied by beforehand, as for half precision.
            only: parameters to sum for, if not all.
            bases: coordinates of those parameters whose sums are wanted in others than their own.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
        for recording in (here, there):
            if recording is not None and recording.count == 0:
                raise SampleError("the recording is not complete, or had no samples")
        if there is not None and here.count != there.count:
            raise SampleError(
                f"the two recordings saw {here.count} and {there.count} samples; record the same minibatch twice"
            )
        bases = bases or {}
        recordings = [here] if there is None else [here, there]
        factor = (here.count if reduction == "mean" else 1) / loss_scale
        again = dict.fromkeys(p for recording in recordings for call in recording.calls for p in call.params)
        result: Sums = {}
        for param in dict.fromkeys(p for recording in recordings for p in recording.terms):
            if param not in again and (only is None or param in only):
                terms = [[scaled(item, factor) for item in r.terms.get(param, [])] for r in recordings]
                if param in bases:
                    result[param] = rotated_sums(param, terms, here.count, bases[param])
                else:
                    result[param] = parameter_sums(param, terms, here.count)
        if only is None or any(param in only for param in again):
            result.update(
                replayed_sums(list(again), [(r.terms, r.calls) for r in recordings], here.count, factor, bases)
            )
        return result

    @torch.no_grad()
    def gram(self, recording: Recording) -> Tensor:
        """Return inner products between the gradients of all samples, over all parameters, up to a common factor."""
        return gram_matrix(recording.terms, recording.calls, recording.count)

    @torch.no_grad()
    def weighted(self, recording: Recording, weights: Tensor, params: Collection[Tensor]) -> dict[Tensor, Tensor]:
        """Return weighted sums over samples of these parameters' gradients, as they came from the loss."""
        return weighted_sums(list(params), recording.terms, recording.calls, recording.count, weights)


def follow(watch: Watch, module: nn.Module, name: str) -> Iterator[Any]:
    """Notify the watch when this module is entered and left."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        watch.enter(Call(module, name or "the model", args, kwargs, tuple(watch.stack)))

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watch.leave(output)

    yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    yield module.register_forward_hook(leave, with_kwargs=True, always_call=True)


def sample_count(seen: Seen, calls: Sequence[Call]) -> int:
    """Return the number of samples, from a replayed call if no other layer shows it."""
    if seen.count is not None:
        return seen.count
    return calls[0].leading_size() if calls else 0


def outermost(calls: Sequence[Call]) -> list[Call]:
    """Return the calls to replay. One covers all that happens to a parameter inside it, calls within it included."""
    inner = {call: {p for scope in call.scopes if scope in calls for p in scope.params} for call in calls}
    for call in calls:
        call.params = call.params - inner[call]
    return [call for call in calls if call.params]


def replayed(use: Use, calls: Sequence[Call]) -> bool:
    """Return whether this use is inside a call that is replayed for its parameter."""
    return any(scope in calls and use.param in scope.params for scope in use.scopes)
