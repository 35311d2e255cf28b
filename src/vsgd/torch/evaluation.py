"""The evaluations of one step: closures run once or several times, in all processes together, and are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from vsgd.torch.basis import flop_counter
from vsgd.torch.companions import used_by
from vsgd.torch.distributed import (
    DifferenceError,
    PeerError,
    Processes,
    check_averaged,
    evaluate_on_all_ranks,
    local_of,
    reduce_checks,
)
from vsgd.torch.frameworks import check_accumulation, remedy, warn
from vsgd.torch.per_sample import Recorder
from vsgd.torch.replay import FORWARD_OUTSIDE, Closure, Replay, Saving

MIN_GRADIENT = 1e-15
"""Squares of smaller gradients vanish in float32."""

NO_CLOSURE = """VSGD may need a second gradient of the same batch, so it takes a function that computes the loss:

    opt.minimize(lambda: F.cross_entropy(model(x), y))    # instead of loss.backward() and opt.step()

or, to change gradients before the step (clipping, for example):

    def closure():
        opt.zero_grad()
        loss = ...
        loss.backward()
        return loss

    opt.step(closure)"""

NOT_REPEATABLE = (
    "the closure does not compute the same {what} twice at the same weights ({values}). Usual causes: data are drawn "
    "inside the closure, random numbers come from NumPy, Python or a torch.Generator of your own, or a hidden state is "
    "carried on from call to call. Draw data and noise before the step, outside the closure."
)

OTHER_GRADIENTS = (
    "the parameters have gradients from a backward() outside the closure, which a step would discard. To accumulate, "
    "pass the micro-batches as a list, opt.step([closure, closure, ...]); if these gradients are not needed, call "
    "opt.zero_grad() before the step."
)

TINY_GRADIENT = (
    "the norm of the gradient is {norm:.2g}; below 1e-15, squares of gradients vanish in float32 and nothing is "
    "learned. Multiply the loss by a constant."
)

EQUAL_LOSSES = (
    "all micro-batches have exactly the same loss and gradient. If the closures were made in a loop, each must bind "
    "its own batch: [lambda x=x, y=y: loss(x, y) for x, y in batches]."
)


class NotFinite(Exception):
    """A loss or gradient was infinite or NaN, so the step is skipped."""


def check_closures(closure: Closure | Sequence[Closure] | None) -> list[Closure]:
    """One closure or several, as a list; a TypeError that shows one otherwise."""
    closures = list(closure) if isinstance(closure, Sequence) else [closure]
    if not closures or not all(callable(each) for each in closures):
        raise TypeError(NO_CLOSURE + remedy())
    check_accumulation(len(closures))
    return closures  # type: ignore[return-value]


def check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        text = f"the closure returned {type(loss).__name__}; it must end with `return loss`, a tensor"
        raise TypeError(text + (remedy() if loss is None else ""))
    if loss.numel() != 1:
        raise ValueError(f"the closure returned a loss of shape {tuple(loss.shape)}; take its mean or sum")


class Evaluation(NamedTuple):
    """What one call of a closure gave."""

    loss: Tensor
    grads: dict[Tensor, Tensor]
    """The gradient of each parameter that has one, unscaled."""
    recording: Any


class NotRepeatable(RuntimeError):
    """A closure did not compute the same loss or gradient twice."""


def check_repeatable(first: Evaluation, again: Evaluation) -> None:
    """Two evaluations at the same weights must agree, up to the rounding of parallel sums."""
    loss, other = float(first.loss), float(again.loss)
    if not abs(loss - other) <= 1e-3 * abs(loss) + 1e-12:
        raise NotRepeatable(NOT_REPEATABLE.format(what="loss", values=f"{loss:g} and {other:g}"))
    if first.grads.keys() != again.grads.keys():
        raise NotRepeatable(NOT_REPEATABLE.format(what="gradient", values="other parameters have one"))
    longest = max(float(grad.norm()) for grad in first.grads.values())
    for parameter, here in first.grads.items():
        off, size = float(difference(here, again.grads[parameter]).norm()), float(here.norm())
        tolerance = 0.1 if parameter.dtype in (torch.float16, torch.bfloat16) else 0.01
        # a gradient that is zero but for rounding, as that of a bias before BatchNorm, differs by all of it
        if not off <= tolerance * size + 1e-6 * longest + 1e-12:
            raise NotRepeatable(NOT_REPEATABLE.format(what="gradient", values=f"{off:.2g} off in {size:.2g}"))


def difference(here: Tensor, there: Tensor) -> Tensor:
    """Return the difference of two gradients. That of two sparse ones is sparse: a table may be large."""
    return here - there if here.is_sparse == there.is_sparse else here.to_dense() - there.to_dense()


def check_probe_was_seen(first: Evaluation, probed: Evaluation) -> None:
    """Where neither loss nor gradient changes at all, the closure did not use the probed parameters."""

    def values(evaluation: Evaluation) -> list[Tensor]:
        return [grad.coalesce().values() if grad.is_sparse else grad for grad in evaluation.grads.values()]

    if any(p.dtype in (torch.float16, torch.bfloat16) for p in first.grads):
        return  # a small probe may vanish in rounding
    same = first.grads.keys() == probed.grads.keys() and torch.equal(first.loss, probed.loss)
    if same and all(map(torch.equal, values(first), values(probed))) and any(map(torch.any, values(first))):
        raise RuntimeError(FORWARD_OUTSIDE)


class Run:
    """The closures of one step, and their evaluations."""

    def __init__(
        self,
        closures: list[Closure],
        scaler: Any,
        groups: list[dict[str, Any]],
        recorder: Recorder | None,
        processes: Processes,
    ):
        self._scaler, self._groups, self._recorder = scaler, groups, recorder
        self.parameters = [p for group in groups for p in group["params"]]
        self.processes = processes
        """Processes that train the same model, with the facts that must be equal in all of them."""
        self.replays = [Replay(closure, set(self.parameters)) for closure in closures]
        self.first: list[Evaluation] = []
        """Evaluations at the iterates. Their losses become the mean over all processes once numbers are checked."""
        self._before = [p.grad for p in self.parameters]
        self._gradients: list[Tensor | None] = []
        """Gradients as the first evaluations left them; empty before these."""

    @property
    def scale(self) -> float:
        """Factor of the gradient scaler."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    @property
    def loss(self) -> Tensor:
        """Mean loss of the first evaluations."""
        return self.first[0].loss if len(self.first) == 1 else torch.stack([e.loss for e in self.first]).mean()

    def evaluate(self, candidates: list[Any], known: Any, companions: ExitStack) -> list[Evaluation]:
        """Evaluate the closures at the iterates.

        Networks of companions hold their iterates, too, until `companions` is closed. The evaluations are repeated
        where they show that a closure uses an optimizer that was not known to be a companion.

        Args:
            candidates: optimizers that may be companions.
            known: those that are known to be; what is found is added.
            companions: holds the contexts in which companions show their iterates.
        """
        watched = [p for other in candidates for p in other.parameter_set()]
        for other in known.intersection(candidates):
            companions.enter_context(other.iterates())
        while True:
            self.first = [self._evaluate(partial(replay.first, watched)) for replay in self.replays]
            others = [other for other in candidates if other not in known]
            found = used_by([replay.saved for replay in self.replays], others)
            known.update(found)
            if not found or self.processes.size > 1:  # one process alone must not call its closure again
                break
            for replay in reversed(self.replays):
                replay.rewind()
            for other in found:
                companions.enter_context(other.iterates())
        self._gradients = [p.grad for p in self.parameters]
        return self.first

    def evaluate_again(self, record: bool = True) -> list[Evaluation]:
        """Evaluate the closures once more, without a trace but for the gradients of the parameters."""
        return [self._evaluate(replay.again, record) for replay in self.replays]

    def evaluate_last(self, look: Callable[[Saving], None]) -> None:
        """Evaluate the last closure once more; `look` sees what it did to buffers before they are restored."""
        self._evaluate(partial(self.replays[-1].again, look), record=False)

    def restore_gradients(self) -> None:
        """Let parameters have the gradients that the first evaluations left."""
        for parameter, grad in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = grad

    def unscale(self, optimizer: Any) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def undo(self) -> None:
        """Take back what the closures did to buffers and to gradients of others."""
        for replay in reversed(self.replays):
            replay.undo()

    def rewind(self) -> None:
        """Take back all that the closures did: also to random numbers and to gradients of the parameters."""
        for replay in reversed(self.replays):
            replay.rewind()
        for parameter, grad in zip(self.parameters, self._before, strict=True):
            parameter.grad = grad

    def give_up(self, optimizer: Any) -> NoReturn:
        """Skip this step. The scaler, if there is one, would see the gradients of the last evaluation only."""
        if self._scaler is not None:
            smallest = min((p for p in self.parameters if p.grad is not None), key=Tensor.numel)
            smallest.grad = torch.full_like(smallest, torch.inf)
            self._scaler.unscale_(optimizer)
        raise NotFinite

    def _evaluate(self, run: Callable[[], Any], record: bool = True) -> Evaluation:
        """Run a closure and collect the gradients that it leaves. All processes do so together."""
        evaluate = partial(self._evaluate_here, record=record)
        evaluation, self.processes = evaluate_on_all_ranks(self.processes, run, evaluate, self.parameters)
        return evaluation

    def _evaluate_here(self, run: Callable[[], Any], record: bool) -> Evaluation:
        for parameter in self.parameters:
            parameter.grad = None
        recording: AbstractContextManager[Any] = nullcontext()
        if self._recorder is not None and record:
            recording = self._recorder.record()
        with recording as recorded:
            loss = run()
            check_loss(loss)
        grads = {}
        for group in self._groups:
            scale = self.scale * (-1 if group["maximize"] else 1)
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    grads[parameter] = own_gradient(local_of(parameter.grad), scale)
        if not grads:
            raise RuntimeError(
                "the closure left no gradient: it must call loss.backward(), on a loss that depends on the parameters "
                "given to VSGD" + remedy()
            )
        return Evaluation(loss=loss.detach().clone().reshape(()), grads=grads, recording=recorded)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_first_step(self, optimizer: Any) -> float:
        """Check that the closures repeat themselves. Return the floating-point operations of a gradient."""
        local = list(self.first)
        self.check_finite(self.first, optimizer)
        self._warn_of_suspicious(local)
        # operations are counted in code that is not compiled, and torch would not compile again what ran meanwhile
        counter = flop_counter()
        try:
            with torch.compiler.set_stance("force_eager"), counter:
                again = self.evaluate_again(record=False)
            # compared outside, since the counter slows down every operation
            repeated = self._difference(local, again, optimizer) is None
        except (PeerError, DifferenceError):
            raise
        except RuntimeError:
            repeated = False
        if not self.processes.all("check of the closures", repeated):
            self.check_again(optimizer, local)  # compiled code draws other random numbers than the same uncompiled
        check_averaged(self.processes, self.first[0])
        return self.processes.mean("number of operations", float(counter.get_total_flops()))

    def check_again(self, optimizer: Any, local: list[Evaluation] | None = None) -> None:
        """Check that closures repeat themselves: raise in the first two steps, warn later."""
        local = list(self.first) if local is None else local
        self.check_finite(self.first, optimizer)
        difference = self._difference(local, self.evaluate_again(record=False), optimizer)
        if self._groups[0]["steps"] > 1:
            if difference is not None:
                warn(str(difference))
            return
        with self.processes.sharing_errors("repeatability of the closures"):
            if difference is not None:
                raise difference

    def check_finite(self, evaluations: list[Evaluation], optimizer: Any) -> None:
        """Skip the step if a loss or a gradient is not finite. Replace losses by their mean over all processes."""
        numbers = [n for e in evaluations for n in (e.loss, *(grad.norm() for grad in e.grads.values()))]
        usable, _ = reduce_checks(self.processes, evaluations, all(bool(n.isfinite()) for n in numbers), False)
        if not usable:
            self.give_up(optimizer)

    def check_probe(self, second: list[Evaluation]) -> None:
        """Raise if the second evaluations did not use the probed parameters."""
        with self.processes.sharing_errors("check of the probe"):
            check_probe_was_seen(self.first[0], second[0])

    def _difference(self, first: list[Evaluation], again: list[Evaluation], optimizer: Any) -> NotRepeatable | None:
        """Return the error of a closure that gave something else in another evaluation at the same weights."""
        self.check_finite(list(again), optimizer)
        try:
            for each, other in zip(first, again, strict=True):
                check_repeatable(each, other)
        except NotRepeatable as error:
            return error
        return None

    def _warn_of_suspicious(self, first: list[Evaluation]) -> None:
        """Warn of gradients too small to be squared, and of micro-batches that are all the same."""
        norms = [[float(grad.norm()) for grad in each.grads.values()] for each in first]
        if 0 < max(map(max, norms)) < MIN_GRADIENT and all(p.dtype != torch.float64 for p in self.parameters):
            warn(TINY_GRADIENT.format(norm=max(map(max, norms))))
        if len({(float(each.loss), *norm) for each, norm in zip(first, norms, strict=True)}) == 1 < len(first):
            warn(EQUAL_LOSSES)


def own_gradient(grad: Tensor, scale: float) -> Tensor:
    """Return a gradient, unscaled, in memory that the next evaluation will not write to."""
    if scale != 1:
        return grad.detach() / scale
    is_part = not grad.is_sparse and grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()
    return grad.detach().clone() if is_part else grad.detach()
