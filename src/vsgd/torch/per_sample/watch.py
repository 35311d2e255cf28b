"""Watch forward and backward passes: a mode sees every function that a parameter goes into, hooks see module calls."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.overrides
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vsgd.torch.per_sample.fallback import Call
from vsgd.torch.per_sample.layers import HANDLERS, Build, Layout, bound
from vsgd.torch.per_sample.terms import Placed, SampleError

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
ROW_VIEWS = {Tensor.chunk, Tensor.split, torch.chunk, torch.split}


@dataclass(eq=False)
class Use:
    """One function call that some rows of a parameter went into. It has a term once the gradient has arrived."""

    param: Tensor
    lo: int
    hi: int
    build: Build
    scopes: tuple[Call, ...]
    placed: Placed | None = None


class Watch(TorchFunctionMode):
    """Mode that records the uses of parameters in one forward and backward pass.

    Args:
        names: the parameters, with their names.
        checked: signatures of passes whose totals need no check.
        apart: lookups that are known to be one row for each sample.
    """

    def __init__(self, names: dict[Tensor, str], checked: set[Any], apart: set[Any]):
        super().__init__()
        self.names, self._checked, self._apart = names, checked, apart
        self.uses: list[Use] = []
        self.calls: list[Call] = []
        """Module calls that have to be replayed."""
        self.received: dict[Tensor, Tensor | None] = {}
        """Parameters that have a gradient; the gradient if it has to be checked."""
        self.count: int | None = None
        """Number of samples, from the first captured function."""
        self._counted_by = ""
        self.signature: list[Any] = []
        """Names and shapes that identify passes of the same kind."""
        self.epsilon = 0.0
        """The machine epsilon of the least precise gradient."""
        self.lookups: dict[Any, Tensor] = {}
        """Results of embeddings, by name and shape, of which all samples may share the indices, as of positions."""
        self._last_input: Tensor | None = None
        """Input of the last function that was captured, samples first."""
        self._listening = True
        """Whether gradients are those of the loss."""
        self._hooks = ExitStack()
        """Removes all hooks: the graph of a loss that the user keeps must not refer to this object."""
        self._stack: list[Call] = []
        self._layout: Layout = lambda tensor: tensor  # samples come first
        self._tracked: dict[Tensor, tuple[Tensor, int]] = {p: (p, 0) for p in names}
        """Parameters and blocks of their rows: the parameter, and the first row."""
        self._shared: set[Tensor] = set()
        """Tensors computed from parameters alone, whose first axis is not the samples, whatever its size."""
        self._marker = torch.empty(0)
        self._times_seen = 0

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Watch within the block: enter the mode and register all hooks.

        Compiled modules run uncompiled meanwhile, since their functions are not seen otherwise.
        """
        with self._hooks:
            for name, module in model.named_modules():
                enter = partial(self._enter, name or "the model")
                self._hooks.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
                self._hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for param in self.names:
                self._hooks.callback(param.register_hook(partial(self._receive, param)).remove)
            with torch.compiler.set_stance("force_eager"):
                self.__enter__()  # type: ignore[no-untyped-call]
                try:
                    yield
                except BaseException as error:
                    close_interrupted_contexts(error)
                    raise
                finally:
                    self._deactivate()

    # Torch takes a mode off its stack while the mode handles a call. A signal that raises may end the code of torch
    # that does so, and leave the mode on the stack too rarely or too often.

    def __exit__(self, *error: Any) -> None:
        """Take the mode off the stack once, if it is there."""
        if self._times_active():
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _deactivate(self) -> None:
        """Take the mode off the stack, however often it is there."""
        while self._times_active():
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _times_active(self) -> int:
        """Return how often the mode is on the stack: each time, it sees the call of a function."""
        self._times_seen = 0
        self._marker.dim()
        return self._times_seen

    def _receive(self, param: Tensor, grad: Tensor) -> None:
        """Remember that a gradient has arrived."""
        if param in self.received:
            raise SampleError("backward ran twice in one recording; add the losses and call backward once")
        # a copy, since the gradient may be clipped or unscaled before the recording ends
        self.received[param] = None if tuple(self.signature) in self._checked else grad.detach().clone()

    def _expect_gradient(self, output: Tensor, take: Callable[[Tensor], None]) -> None:
        """Have `take` called with the gradient of an output. It may arrive once."""
        has_arrived = False

        def arrived(grad: Tensor) -> None:
            nonlocal has_arrived
            if not self._listening:
                return
            if has_arrived:
                raise SampleError("backward ran twice through one forward pass; add the losses and call backward once")
            has_arrived = True
            take(grad.detach())

        self._hooks.callback(output.register_hook(arrived).remove)

    # --- functions ------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and args[0] is self._marker:
            self._times_seen += 1
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._attend(bound(func, args, kwargs))
        if func is F.batch_norm and bound(F.batch_norm, args, kwargs)["training"]:
            raise SampleError(
                f"{self._where()} normalizes over the batch, which mixes the samples; put it into eval mode, "
                "or use GroupNorm or LayerNorm instead of BatchNorm"
            )
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and record it if it depends on parameters."""
        result = func(*args, **kwargs)
        given = [t for t in tensors((args, kwargs)) if t in self._tracked or t in self._shared]
        if given and any(t.requires_grad for t in tensors(result)):
            self._note(func, args, kwargs, result, given)
        return result

    def _attend(self, given: dict[str, Any]) -> Any:
        """Call attention: linear layers around a core without parameters, of which the samples are the second axis.

        A mode does not see what happens within attention. So the linear layers are called here, and the core is torch's
        attention with projections that change nothing.
        """
        query, key, value, bias = (given[name] for name in ("query", "key", "value", "in_proj_bias"))
        if query.dim() != 3:
            raise SampleError(f"{self._where()} was called without a batch axis: its query is {tuple(query.shape)}")
        outer, self._layout = self._layout, lambda t: t.transpose(0, 1)
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
            self._shared.add(identity)
            core = {**given, **dict(zip(("query", "key", "value"), projected, strict=True))}
            core |= dict.fromkeys(("in_proj_weight", "in_proj_bias", "out_proj_bias"))
            core |= {**dict.fromkeys((*PROJECTIONS, "out_proj_weight"), identity), "use_separate_proj_weight": True}
            result, attention = self._call(F.multi_head_attention_forward, (), core)
            with self:
                return F.linear(result, given["out_proj_weight"], given["out_proj_bias"]), attention
        finally:
            self._layout = outer

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor]) -> None:
        """Record a function call that depends on parameters."""
        if self.received:
            raise SampleError(
                "the model was called again after a backward pass; record one forward and one backward pass at a time"
            )
        if func in ROW_VIEWS and given[0] in self._tracked and not kwargs.get("dim") and len(args) < 3:
            param, start = self._tracked[given[0]]
            for view in result:
                self._tracked[view] = param, start
                start += len(view)
        elif not self._handle(func, args, kwargs, result, given):
            for tensor in given:
                if tensor in self._tracked:
                    self._leave_to_module(self._tracked[tensor][0], func)
            if len(given) == sum(1 for _ in tensors((args, kwargs))):
                self._shared.update(tensors(result))

    def _handle(self, func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor]) -> bool:
        """Capture the call of a function that has a handler, if parameters are where the handler expects them."""
        if func not in HANDLERS:
            return False
        data = args[0] if args else kwargs["input"]
        if any(t is data or t in self._shared for t in given):
            return False
        capture = HANDLERS[func](self._layout, *args, **kwargs)
        uses = []
        for tensor, build in capture.builders:
            if tensor is not None and tensor in self._tracked:
                param, lo = self._tracked[tensor]
                uses.append(Use(param, lo, lo + len(tensor), build, tuple(self._stack)))
        self._check_count(capture.samples, self.names[self._tracked[given[0]][0]])
        self.uses += uses
        described = [(self.names[use.param], tuple(result.shape)) for use in uses]
        self.signature += described
        self._expect_gradient(result, partial(self._build_terms, uses))
        self._last_input = self._layout(data)
        if capture.may_be_shared and described[0] not in self._apart:
            self.lookups[described[0]] = result
        return True

    def _check_count(self, count: int, name: str) -> None:
        if self.count is None:
            self.count, self._counted_by = count, name
        elif self.count != count:
            raise SampleError(
                f"parameter {name!r} saw a batch of {count}, but {self._counted_by!r} one of {self.count}; the first "
                "axis of every layer's input must be the same samples (batch_first=True where there is a choice), and "
                "what all samples share, such as positions, must be expanded to the batch"
            )

    def _build_terms(self, uses: list[Use], grad: Tensor) -> None:
        """Build the terms of uses from the gradient of their output."""
        self.epsilon = max(self.epsilon, torch.finfo(grad.dtype).eps)
        for use in uses:
            use.placed = Placed(use.lo, use.hi, use.build(grad))

    # --- module calls ---------------------------------------------------------------------------------------------

    def _leave_to_module(self, param: Tensor, func: Any) -> None:
        """Have the innermost call of a module that owns a parameter, itself or by its parts, replayed."""
        scope = next((c for c in reversed(self._stack) if any(p is param for p in c.module.parameters())), None)
        if scope is None:
            raise SampleError(
                f"parameter {self.names[param]!r} goes into {getattr(func, '__name__', type(func).__name__)} outside "
                "any module call, where samples cannot be separated; use it inside a module's forward (a penalty on "
                "it is weight decay)"
            )
        scope.params[param] = None

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(module, name, args, kwargs, tuple(self._stack))
        self._stack.append(call)
        call.refuse_ambiguity()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record that the innermost call has returned, without an output if it failed."""
        if not self._stack or self._stack[-1].module is not module:
            return  # a signal interrupted this call before it was entered here
        call = self._stack.pop()
        if output is None:
            return
        if not self._stack:
            self._refuse_shared_rows(output)
        if not call.params:
            return
        if all(t in self._shared for t in tensors(output)):
            # the output does not depend on samples, as that of a parametrization; the module around it does
            for param in call.params:
                self._leave_to_module(param, call.module)
        else:
            call.finish(output, self._expect_gradient)
            self.calls.append(call)
            self.signature.append((call.name, tuple(tuple(t.shape) for t in tensors(output))))

    def _refuse_shared_rows(self, output: Any) -> None:
        """Raise SampleError if a row that was looked up went into several samples.

        If half of the samples depend on rows of the other half, all share them, as they share positions. The
        samples are the first axis of the output of the outermost call or, if that is a loss, of the last input.
        """
        found = [t for t in tensors(output) if t.requires_grad and t.dim() and len(t) == self.count]
        if not found and self._last_input is not None and self._last_input.requires_grad:
            found = [self._last_input]
        for (name, _), rows in self.lookups.items():
            if any(self._mixes(values, rows) for values in found):
                raise SampleError(
                    f"the embedding {name!r} was given the positions, or other numbers, that all samples share, so "
                    "their gradients arrive already added up; give each sample its own: "
                    "torch.arange(length).expand(batch, length)"
                )

    def _mixes(self, values: Tensor, rows: Tensor) -> bool:
        """Return whether the first half of the samples depends on rows of the second half."""
        half = len(values) // 2
        weights = torch.zeros_like(values)
        size = weights[:half].numel()
        weights[:half] = torch.arange(1, size + 1, device=values.device).sin().view_as(weights[:half])
        self._listening = False
        try:
            (grad,) = torch.autograd.grad(values, rows, weights, retain_graph=True, allow_unused=True)
        finally:
            self._listening = True
        return grad is not None and bool(grad.isfinite().all()) and bool(grad[half:].any())

    def _where(self) -> str:
        """Return a description of the innermost module."""
        if not self._stack:
            return "the closure"
        return f"module {self._stack[-1].name!r} ({type(self._stack[-1].module).__name__})"


def close_interrupted_contexts(error: BaseException | None) -> None:
    """Close generators that a signal has ended before torch could put a mode back on its stack.

    They would put it back when the traceback is deleted, which refers to them.
    """
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename in (torch.overrides.__file__, contextlib.__file__):
                with suppress(RuntimeError):  # the frame is still running
                    frame.clear()
        error = error.__context__


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
