"""The evaluations of one step: closures run once or several times, in all processes together, and are checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsgd.algorithms.strategy import distance_to_zero_loss
from vsgd.torch.basis import flop_counter
from vsgd.torch.closures import NotRepeatable, check_loss, check_probe_was_seen, check_repeatable, remedy, warn
from vsgd.torch.distributed.agreement import check_averaged, evaluate_on_all_ranks, reduce_checks
from vsgd.torch.distributed.messages import DifferenceError, PeerError, Processes
from vsgd.torch.distributed.shards import is_sharded, local_of
from vsgd.torch.per_sample import Recorder
from vsgd.torch.per_sample.reduce import largest_of
from vsgd.torch.process import used_by
from vsgd.torch.replay import Closure, KnownParts, Replay

MIN_GRADIENT = 1e-15
"""Squares of smaller gradients vanish in float32."""

RECHECK_INTERVAL = 1000
"""The closure is checked for repeatability in the first two steps and then once in this many."""

TINY_GRADIENT = (
    "the largest value of the gradient is {largest:.2g}; below 1e-15, squares of gradients vanish in float32 and "
    "nothing is learned. Multiply the loss by a constant."
)

EQUAL_LOSSES = (
    "all micro-batches have exactly the same loss and gradient. If the closures were made in a loop, each must bind "
    "its own batch: [lambda x=x, y=y: loss(x, y) for x, y in batches]."
)

RESHAPED = (
    "after the closure, a gradient has shape {} and its parameter {}; a closure must not change the shape of a "
    "parameter"
)


class NotFinite(Exception):
    """A loss or gradient was not finite (infinite or NaN) or not usable, so the step is skipped.

    `blocks.check_numbers` finds such numbers.
    """


class Evaluation(NamedTuple):
    """What one call of a closure gave."""

    loss: Tensor
    grads: dict[Tensor, Tensor]
    """The gradient of each parameter that has one, unscaled."""
    recording: Any


class Run:
    """The closures of one step, and their evaluations."""

    def __init__(
        self,
        optimizer: Optimizer,
        closures: list[Closure],
        scaler: Any,
        recorder: Recorder | None,
        processes: Processes,
        others: list[Any],
        known_parts: KnownParts,
    ):
        """Prepare the evaluations of a step.

        Args:
            optimizer: the optimizer that takes the step.
            closures: one per micro-batch.
            scaler: the gradient scaler, or None.
            recorder: the recorder of the rows of the minibatch, or None.
            processes: the processes that train the same model.
            others: optimizers that may be companions.
            known_parts: parts of the modules that closures called in earlier steps, see `Replay`.
        """
        self.others = others
        self._optimizer, self._scaler, self._recorder = optimizer, scaler, recorder
        self._groups = optimizer.param_groups
        self.parameters = [p for group in self._groups for p in group["params"]]
        self.processes = processes
        """Processes that train the same model, with the facts that must be equal in all of them."""
        self.is_first = not any(optimizer.state.values())
        """Whether no parameter has state yet."""
        self.companions = ExitStack()
        """Contexts in which the networks of other optimizers hold their iterates, until the step ends."""
        self.replays = [Replay(closure, self.parameters, known_parts) for closure in closures]
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

    def evaluate(self, known: Any) -> list[Evaluation]:
        """Evaluate the closures at the iterates, those of companions included.

        If a closure turns out to use another optimizer that was not a known companion, all are repeated.

        Args:
            known: the optimizers that are known to be companions; what is found is added.
        """
        watched = [p for other in self.others for p in other.parameter_set()]
        for other in self.others:
            if other in known:
                self.companions.enter_context(other.iterates())
        while True:
            self.first = [self._evaluate(partial(replay.first, watched)) for replay in self.replays]
            found = used_by([replay.saved for replay in self.replays], [o for o in self.others if o not in known])
            for other in found:
                known.add(other)
            if not found or self.processes.size > 1:  # one process alone must not call its closure again
                break
            for replay in reversed(self.replays):
                replay.rewind()
            for other in found:
                self.companions.enter_context(other.iterates())
        self._gradients = [p.grad for p in self.parameters]
        return self.first

    def check_closures(self) -> None:
        """Check in the first two steps, and now and then, that closures repeat themselves.

        The first step also counts the floating-point operations of a gradient.
        """
        steps = self._groups[0]["steps"]
        if self.is_first:
            flops = self._check_first_step()
            for group in self._groups:
                group["gradient_flops"] = flops
        elif steps == 1 or steps % RECHECK_INTERVAL == 0:
            self._check_again(list(self.first))

    def evaluate_at_probe(self) -> list[Evaluation]:
        """Evaluate the closures at the probed parameters. In the first step, check that they use these."""
        second = self.evaluate_again()
        if self.is_first:
            with self.processes.sharing_errors("check of the probe"):
                check_probe_was_seen(self.first[0], second[0])
        return second

    def evaluate_again(self, record: bool = True) -> list[Evaluation]:
        """Evaluate the closures once more, without a trace but for the gradients of the parameters."""
        return [self._evaluate(replay.again, record) for replay in self.replays]

    def restore_gradients(self) -> None:
        """Let parameters have the gradients that the first evaluations left."""
        for parameter, grad in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = grad

    def unscale(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)

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

    def distance_to_zero_loss(self) -> float:
        """Return the length scale of parameters that are all zero.

        All processes use the mean loss, and the gradient of process 0, which may be sharded over all.
        """
        evaluation = self.first[0]
        squares = {p: float(grad.norm()) ** 2 for p, grad in evaluation.grads.items()}
        sharded = sum(square for p, square in squares.items() if is_sharded(p))
        numbers = float(evaluation.loss), sum(squares.values()) - sharded, sharded
        rows = self.processes.numbers("distance to zero loss", *numbers)
        norm_sq = rows[0][1] + sum(row[2] for row in rows)
        loss = sum(row[0] for row in rows) / len(rows)
        return float(distance_to_zero_loss(loss, norm_sq, sum(p.numel() for p in evaluation.grads)))

    def give_up(self) -> NoReturn:
        """Skip this step. The scaler, if there is one, would see the gradients of the last evaluation only."""
        if self._scaler is not None:
            smallest = min((p for p in self.parameters if p.grad is not None), key=Tensor.numel)
            smallest.grad = torch.full_like(smallest, torch.inf)
            self._scaler.unscale_(self._optimizer)
        raise NotFinite

    def _evaluate(self, run: Callable[[], Any], record: bool = True) -> Evaluation:
        """Run a closure and collect the gradients that it leaves. All processes do so together."""
        evaluate = partial(self._evaluate_here, run, record)
        evaluation, self.processes = evaluate_on_all_ranks(self.processes, evaluate, self.parameters)
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
                    if parameter.grad.shape != parameter.shape:
                        raise RuntimeError(RESHAPED.format(*map(tuple, (parameter.grad.shape, parameter.shape))))
                    grad = parameter.grad if type(parameter.grad) is Tensor else local_of(parameter.grad)
                    grads[parameter] = own_gradient(grad, scale)
        if not grads:
            raise RuntimeError(
                "the closure left no gradient: it must call loss.backward(), on a loss that depends on the parameters "
                "given to VSGD" + remedy()
            )
        return Evaluation(loss=loss.detach().clone().reshape(()), grads=grads, recording=recorded)

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check_first_step(self) -> float:
        """Check that the closures repeat themselves. Return the floating-point operations of a gradient."""
        local = list(self.first)
        self._check_finite(self.first)
        self._warn_of_suspicious(local)
        # operations are counted in code that is not compiled, and torch would not compile again what ran meanwhile
        counter = flop_counter()
        try:
            with torch.compiler.set_stance("force_eager"), counter:
                again = self.evaluate_again(record=False)
            # compared outside, since the counter slows down every operation
            repeated = self._difference(local, again) is None
        except (PeerError, DifferenceError):
            raise
        except RuntimeError:
            repeated = False
        if not self.processes.all("check of the closures", repeated):
            self._check_again(local)  # compiled code draws other random numbers than the same uncompiled
        check_averaged(self.processes, self.first[0])
        return self.processes.mean("number of operations", float(counter.get_total_flops()))

    def _check_again(self, local: list[Evaluation]) -> None:
        """Check that closures repeat their `local` evaluations: raise in the first two steps, warn later."""
        self._check_finite(self.first)
        difference = self._difference(local, self.evaluate_again(record=False))
        if self._groups[0]["steps"] > 1:
            if difference is not None:
                warn(str(difference))
            return
        with self.processes.sharing_errors("repeatability of the closures"):
            if difference is not None:
                raise difference

    def _check_finite(self, evaluations: list[Evaluation]) -> None:
        """Skip the step if a loss or a gradient is not finite. Replace losses by their mean over all processes."""
        numbers = [n for e in evaluations for n in (e.loss, *(grad.norm() for grad in e.grads.values()))]
        usable, _ = reduce_checks(self.processes, evaluations, all(bool(n.isfinite()) for n in numbers), False)
        if not usable:
            self.give_up()

    def _difference(self, first: list[Evaluation], again: list[Evaluation]) -> NotRepeatable | None:
        """Return the error of a closure that gave something else in another evaluation at the same weights."""
        self._check_finite(list(again))
        try:
            for each, other in zip(first, again, strict=True):
                check_repeatable(each, other)
        except NotRepeatable as error:
            return error
        return None

    def _warn_of_suspicious(self, first: list[Evaluation]) -> None:
        """Warn of gradients too small to be squared, and of micro-batches that are all the same."""
        # the largest value of a gradient, since squares within its norm may vanish
        largest = max(largest_of(grad) for each in first for grad in each.grads.values())
        if 0 < largest < MIN_GRADIENT and all(p.dtype != torch.float64 for p in self.parameters):
            warn(TINY_GRADIENT.format(largest=largest))
        numbers = {(float(each.loss), *(float(grad.norm()) for grad in each.grads.values())) for each in first}
        if len(numbers) == 1 < len(first):
            warn(EQUAL_LOSSES)


def own_gradient(grad: Tensor, scale: float) -> Tensor:
    """Return a gradient, unscaled, in memory that the next evaluation will not write to."""
    if scale != 1:
        return grad.detach() / scale
    is_part = not grad.is_sparse and grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()
    return grad.detach().clone() if is_part else grad.detach()
