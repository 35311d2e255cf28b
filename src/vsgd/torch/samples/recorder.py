"""Records forward and backward passes, and turns two of them into sums over samples."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vsgd.eigenbasis import Basis
from vsgd.torch.samples.check import check_totals
from vsgd.torch.samples.errors import SampleError
from vsgd.torch.samples.gram import gram_matrix, weighted_sums
from vsgd.torch.samples.reduce import parameter_sums, replayed_sums, rotated_sums
from vsgd.torch.samples.replay import Call
from vsgd.torch.samples.sums import RowSums, SampleSums
from vsgd.torch.samples.terms import Terms, scaled
from vsgd.torch.samples.watch import Seen, Use, Watch

Sums = dict[Tensor, SampleSums | RowSums]


class Recording:
    """What one forward and backward pass left behind; complete when the `with` block has ended."""

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
        """Install what is needed to see, and take it away again whatever happens."""
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
        recording.count = settle_count(seen, calls)
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
        """Sums over samples for each parameter that got a gradient; parameters that got none have no entry.

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
        """Inner products between the gradients of all samples, over all parameters, up to a common factor."""
        return gram_matrix(recording.terms, recording.calls, recording.count)

    @torch.no_grad()
    def weighted(self, recording: Recording, weights: Tensor, params: Collection[Tensor]) -> dict[Tensor, Tensor]:
        """Sums over samples of these parameters' gradients, as they came from the loss, each sample with its weight."""
        return weighted_sums(list(params), recording.terms, recording.calls, recording.count, weights)


def follow(watch: Watch, module: nn.Module, name: str) -> Iterator[Any]:
    """Tell the watch when this module is entered and left."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        watch.enter(Call(module, name or "the model", args, kwargs, tuple(watch.stack)))

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watch.leave(output)

    yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    yield module.register_forward_hook(leave, with_kwargs=True, always_call=True)


def settle_count(seen: Seen, calls: Sequence[Call]) -> int:
    """The number of samples, from a replayed call if no other layer told it."""
    if seen.count is not None:
        return seen.count
    return calls[0].leading_size() if calls else 0


def outermost(calls: Sequence[Call]) -> list[Call]:
    """A replayed call covers all that happens to a parameter inside it, so calls within it need no replay for it."""
    inner = {call: {p for scope in call.scopes if scope in calls for p in scope.params} for call in calls}
    for call in calls:
        call.params = call.params - inner[call]
    return [call for call in calls if call.params]


def replayed(use: Use, calls: Sequence[Call]) -> bool:
    """Is this use inside a call that is replayed for its parameter?"""
    return any(scope in calls and use.param in scope.params for scope in use.scopes)
