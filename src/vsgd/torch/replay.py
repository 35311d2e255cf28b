"""Evaluate a closure again as if it were the first time: same random numbers, buffers and gradients of others kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vsgd.torch.closures import FORWARD_OUTSIDE, SCALER
from vsgd.torch.devices import RandomState, random_state, set_random_state
from vsgd.torch.process import call_before_forward, call_user, registrations

Closure = Callable[[], Any]

NORMALIZATIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers whose buffers are statistics of what passes through them, used only when the model is evaluated."""

_PROBING: ContextVar[bool] = ContextVar("vsgd_probing", default=False)

_SAVING: ContextVar[tuple[Saving, ...]] = ContextVar("vsgd_saving", default=())
"""Where buffers are being saved, the outermost first."""


def is_probing() -> bool:
    """Return whether a minibatch is being evaluated again, at other parameters. Loggers and counters may skip it."""
    return _PROBING.get()


def updates_statistics(module: Any) -> bool:
    """Return whether a normalization updates its running statistics when it is called."""
    statistics = (module.running_mean, module.running_var, module.num_batches_tracked)
    return module.training and not any(value is None or nn.parameter.is_lazy(value) for value in statistics)


class Normalization(NamedTuple):
    """The running statistics of a normalization before it was called in training, and the number of calls."""

    mean: Tensor
    var: Tensor
    updates: Tensor
    """`num_batches_tracked`."""
    calls: int


class SavedBuffer(NamedTuple):
    """A buffer of a module before the module was called."""

    module: nn.Module
    name: str
    buffer: Tensor
    value: Tensor

    @property
    def is_statistic(self) -> bool:
        """Return whether this is part of the running statistics that a normalization updates in training."""
        return isinstance(self.module, NORMALIZATIONS) and updates_statistics(self.module)


def restore_buffers(saved: Iterable[SavedBuffer]) -> None:
    """Restore buffers, also those that a module replaced by others."""
    for module, name, buffer, value in saved:
        buffer.detach().copy_(value)
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)


class SavedGradient(NamedTuple):
    """The gradient of a parameter of another optimizer, or of none, before a closure ran."""

    parameter: Tensor
    grad: Tensor | None
    value: Tensor | None

    def has_changed(self) -> bool:
        """Return whether the closure has replaced or changed the gradient."""
        if self.grad is None or self.value is None or self.parameter.grad is not self.grad:
            return self.parameter.grad is not self.grad
        return self.grad.is_sparse or not torch.equal(self.grad, self.value)


class Parts(NamedTuple):
    """What there is to save of a module that closures call."""

    modules: list[nn.Module]
    """The module and its parts."""
    buffers: list[tuple[nn.Module, str]]
    """Modules and names of their buffers."""
    parameters: list[Tensor]
    registrations: int
    """See `process.registrations`. The parts are listed again if the number has changed."""


def parts_of(module: nn.Module) -> Parts:
    """Return what there is to save of a module."""
    modules = list(module.modules())
    has_buffers = next(module.buffers(), None) is not None
    buffers = [(part, name) for part in modules if has_buffers for name, _ in part.named_buffers(recurse=False)]
    return Parts(modules, buffers, list(module.parameters()), registrations())


KnownParts = dict[int, Parts]
"""The parts of modules that closures called, by the `id` of the module."""


class Saving:
    """What an evaluation may change besides the gradients of the optimizer's own parameters, as it was before."""

    def __init__(self, own: Iterable[Tensor] = (), known: KnownParts | None = None):
        """Save nothing yet.

        Args:
            own: the optimizer's parameters, whose gradients will not be saved.
            known: parts of modules from an earlier evaluation. The walk through a module takes long in a small network.
        """
        self.called: KnownParts = {}
        """Parts of the modules that were called."""
        self._known = known or {}
        self._skipped = set(map(id, own))
        """The `id` of tensors whose gradients are the optimizer's own, or are saved already."""
        self.modules: dict[int, nn.Module] = {}
        """Modules that were called, and their parts, by `id`."""
        self.buffers: list[SavedBuffer] = []
        self.gradients: list[SavedGradient] = []
        self.normalizations: dict[nn.Module, Normalization] = {}
        """Normalizations that were called in training; not known in compiled code."""

    def save_module(self, module: nn.Module) -> None:
        """Save the buffers and gradients of a module that is about to be called, and of its parts."""
        parts = self._known.get(id(module))
        if parts is None or parts.modules[0] is not module or parts.registrations != registrations():
            parts = parts_of(module)
        self.called[id(module)] = parts
        self.save_gradients(parts.parameters)
        for part, name in parts.buffers:
            buffer = getattr(part, name, None)
            # a part that was called before the whole was saved then, and may have changed since
            if id(part) in self.modules or not isinstance(buffer, Tensor) or nn.parameter.is_lazy(buffer):
                continue
            self.buffers.append(SavedBuffer(part, name, buffer, buffer.detach().clone()))
        self.modules.update(zip(map(id, parts.modules), parts.modules, strict=True))

    def count_call(self, module: Any) -> None:
        """Count a call of a normalization, and save its statistics before the first one.

        They may differ from those before the call of the whole model, because DistributedDataParallel then copies the
        buffers of process 0.
        """
        if not updates_statistics(module):
            return
        if module in self.normalizations:
            before = self.normalizations[module]
            self.normalizations[module] = before._replace(calls=before.calls + 1)
        else:
            statistics = (module.running_mean, module.running_var, module.num_batches_tracked)
            mean, var, updates = (value.detach().clone() for value in statistics)
            self.normalizations[module] = Normalization(mean, var, updates, 1)

    def save_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Save the gradients of leaf tensors that are not the optimizer's own."""
        for tensor in tensors:
            if tensor.requires_grad and id(tensor) not in self._skipped:
                self._skipped.add(id(tensor))
                value = None if tensor.grad is None else tensor.grad.detach().clone()
                self.gradients.append(SavedGradient(tensor, tensor.grad, value))

    def restore(self) -> None:
        """Restore buffers and gradients."""
        restore_buffers(self.buffers)
        for parameter, grad, saved in self.gradients:
            parameter.grad = grad
            if grad is not None and saved is not None and grad.layout == torch.strided:
                grad.detach().copy_(saved)
            else:
                parameter.grad = saved


def save_module(module: nn.Module, args: Any) -> None:
    """Save what a call of `module` may change."""
    if torch.compiler.is_compiling():
        return  # a compiled module saves that of all its parts when it is called, before its graph runs
    for saving in _SAVING.get():
        if id(module) not in saving.modules:
            saving.save_module(module)
        if isinstance(module, NORMALIZATIONS):
            saving.count_call(module)


@contextmanager
def saving_state(own: Iterable[Tensor] = (), known: KnownParts | None = None) -> Iterator[Saving]:
    """Save what closures may change within, as it is before the first call of each module in this thread."""
    call_before_forward(save_module)
    saving = Saving(own, known)
    token = _SAVING.set((*_SAVING.get(), saving))
    try:
        yield saving
    finally:
        _SAVING.reset(token)


def leaves_of(loss: Any) -> list[Tensor]:
    """Return the leaf tensors that a loss was computed from, as far as its graph is known."""
    found, seen = [], set()
    nodes = [loss.grad_fn] if isinstance(loss, Tensor) else []
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
            if hasattr(node, "variable"):
                found.append(node.variable)
    return found


class Replay:
    """The evaluations of one minibatch: `first` runs the closure, `again` runs it without leaving a trace."""

    def __init__(self, closure: Closure, own: Sequence[Tensor], known: KnownParts):
        """Prepare the evaluations of a closure.

        Args:
            closure: the function that computes the loss.
            own: the optimizer's parameters.
            known: parts of the modules that closures called in earlier steps. `again` updates it, so that a buffer
                that was added to a known module is restored after every second evaluation.
        """
        self._closure = closure
        self._own = own
        self._known = known
        self._random_before: RandomState = {}
        self._loss: Any = None
        self.saved = Saving()
        """Buffers and gradients as they were before the first evaluation."""

    def first(self, others: Iterable[Tensor] = ()) -> Any:
        """Run the closure. Parameters of other optimizers are among `others` if their gradients may change."""
        self._random_before = random_state(self._own)
        torch.clear_autocast_cache()  # autocast around several steps holds casts of earlier weights
        with saving_state(self._own, self._known) as self.saved, torch.enable_grad():
            self.saved.save_gradients(others)
            self._loss = call_user(self._closure)
            return self._loss

    def again(self) -> Any:
        """Run the closure once more, and restore buffers and gradients of others."""
        random_after, was_probing = random_state(self._own), _PROBING.get()
        set_random_state(self._random_before)
        torch.clear_autocast_cache()  # it holds casts of the unprobed parameters
        try:
            _PROBING.set(True)
            with saving_state(self._own) as saved, torch.enable_grad():
                try:
                    saved.save_gradients(leaves_of(self._loss))
                    return call_user(self._closure)
                finally:
                    saved.restore()
                    self._known.clear()
                    self._known.update(saved.called)
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                raise RuntimeError(FORWARD_OUTSIDE) from error
            if "unscale_() has already been called" in str(error):
                raise RuntimeError(SCALER) from error
            raise
        finally:
            _PROBING.set(was_probing)
            set_random_state(random_after)

    def undo(self) -> None:
        """Restore buffers and gradients of others as they were before the first evaluation."""
        self._loss = None  # its graph belongs to weights that the closure may have replaced
        self.saved.restore()

    def rewind(self) -> None:
        """Take back the first evaluation as a whole, if it has begun: what `undo` restores, and random numbers."""
        self.undo()
        set_random_state(self._random_before)
