"""Per-coordinate sums over the samples of a minibatch, computed without storing per-sample gradients.

A `Recorder` watches the parameters of a model in two passes: at the parameters and at the shifted ones. The gradient of
one sample is a product of small factors that backpropagation computes anyway: the input of a layer and the gradient of
its output. Sums of its square and of its change follow from these factors.

A result is right, or an error is raised. Two assumptions are not checked. All functions in one recording must process
the same samples in the same order. If a loss mixes samples, as a contrastive loss does, the gradient of sample j is the
part that flows through the activations of sample j.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vsgd.eigenbasis import Basis
from vsgd.torch.per_sample.fallback import Call, Recording
from vsgd.torch.per_sample.reduce import check_totals, parameter_gram, parameter_sums, placed_total, written_sums
from vsgd.torch.per_sample.terms import RowSums, SampleError, SampleSums, scaled
from vsgd.torch.per_sample.watch import Watch

__all__ = ["Recorder", "Recording", "RowSums", "SampleError", "SampleSums"]

Sums = dict[Tensor, SampleSums | RowSums]


class Recorder:
    """Records the uses of a model's parameters.

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

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record one forward and one backward pass over one minibatch, whose samples are the first axis."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        watch, recording = Watch(names, self._checked, self._apart), Recording()
        with watch.installed(self.model):
            yield recording
        with torch.no_grad():
            self._complete(recording, watch)

    def _complete(self, recording: Recording, watch: Watch) -> None:
        """Fill a recording with what was seen. In a pass of a new kind, check that samples add up to the gradient."""
        if not watch.received:
            raise SampleError("no gradient arrived: call the model and loss.backward() inside the recording")
        calls = [call for call in watch.calls if call.grads]
        recording.count = watch.count or 0
        if watch.count is None and calls:  # no layer shows the number of samples
            recording.count = calls[0].leading_size()
        if recording.count == 0:
            raise SampleError("the minibatch is empty: there is no row to take the gradient of")
        recording.calls = outermost(calls)
        for call in recording.calls:
            call.freeze(recording.count)
        for use in watch.uses:
            is_replayed = any(scope in recording.calls and use.param in scope.params for scope in use.scopes)
            if use.placed is not None and not is_replayed:
                recording.terms.setdefault(use.param, []).append(use.placed)
        covered = {*recording.terms, *recording.replayed()}
        for param in watch.received:
            if param not in covered:
                raise SampleError(
                    f"parameter {watch.names[param]!r} got a gradient from something that was not recorded, such as a "
                    "custom autograd function or reentrant checkpointing; call it through ordinary functions of torch"
                )
        signature = tuple(watch.signature)
        if signature not in self._checked:
            check_totals(recording, watch.received, watch.names, watch.epsilon)
            self._checked.add(signature)
        self._apart.update(watch.lookups)

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
            reduction: whether the loss is the mean or the sum of the losses of the samples.
            loss_scale: factor by which the loss was multiplied, as for half precision.
            only: parameters to sum for; default: all.
            bases: coordinates of those parameters whose sums are wanted in other coordinates than their own.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
        recordings, bases = [here] if there is None else [here, there], bases or {}
        if any(recording.count == 0 for recording in recordings):
            raise SampleError("the recording is not complete, or had no samples")
        if there is not None and here.count != there.count:
            raise SampleError(
                f"the two recordings saw {here.count} and {there.count} samples; record the same minibatch twice"
            )
        factor = (here.count if reduction == "mean" else 1) / loss_scale
        replayed = dict.fromkeys(p for recording in recordings for p in recording.replayed())
        result: Sums = {}
        for param in dict.fromkeys(p for recording in recordings for p in recording.terms):
            if param not in replayed and (only is None or param in only):
                terms = [[scaled(item, factor) for item in r.terms.get(param, [])] for r in recordings]
                result[param] = parameter_sums(param, terms, here.count, bases.get(param))
        if only is None or any(param in only for param in replayed):
            result.update(written_sums(list(replayed), recordings, factor, bases))
        return result

    @torch.no_grad()
    def gram(self, recording: Recording) -> Tensor:
        """Return ⟨g_i, g_j⟩ over all parameters, n × n, up to a common factor."""
        replayed, count = set(recording.replayed()), recording.count
        parts = [parameter_gram(p, placed, count) for p, placed in recording.terms.items() if p not in replayed]
        if replayed:
            grads = recording.sample_grads(recording.replayed(), slice(0, count))
            parts += [grad.flatten(1) @ grad.flatten(1).T for grad in grads.values()]
        return torch.stack([part.to(parts[0].dtype) for part in parts]).sum(0)

    @torch.no_grad()
    def weighted(self, recording: Recording, weights: Tensor, params: Collection[Tensor]) -> dict[Tensor, Tensor]:
        """Return Σ_j w_j g_j of these parameters, in the unit of the gradients."""
        replayed, result = set(recording.replayed()), {}
        for param in params:
            if param not in replayed:
                placed = [scaled(item, weights) for item in recording.terms[param]]
                result[param] = placed_total(param, placed, sparse=False)
        if not replayed.isdisjoint(params):
            grads = recording.sample_grads(recording.replayed(), slice(0, recording.count))
            result.update({param: torch.tensordot(weights.to(grad.dtype), grad, 1) for param, grad in grads.items()})
        return result


def outermost(calls: Sequence[Call]) -> list[Call]:
    """Return the calls to replay. A call covers all uses of its parameters inside it, in inner calls too."""
    inner = {call: {p for scope in call.scopes if scope in calls for p in scope.params} for call in calls}
    for call in calls:
        call.params = {param: None for param in call.params if param not in inner[call]}
    return [call for call in calls if call.params]
