"""`VSGD`, a `torch.optim.Optimizer` with no learning rate to choose."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsgd.algorithms.base import require
from vsgd.algorithms.networks import NETWORKS, Networks
from vsgd.algorithms.paper import Paper
from vsgd.reweight import effective_count, sample_weights
from vsgd.tensors import Config, averages_iterates
from vsgd.torch import basis, running
from vsgd.torch.agreement import agreed, check_averaged, checksum, contents_of, facts_of, reduce_checks
from vsgd.torch.checkpoint import checked
from vsgd.torch.closure import (
    Closure,
    Evaluation,
    NotRepeatable,
    Replay,
    check_closures,
    check_gradients,
    check_loss,
    check_probe_was_seen,
    check_repeatable,
    mark_gradients,
)
from vsgd.torch.companions import (
    OPTIMIZERS,
    Turns,
    check_unshared,
    is_last_to_step,
    next_turn,
    trained_in_turn,
    used_by,
)
from vsgd.torch.diagnostics import Diagnosis, diagnose
from vsgd.torch.frameworks import remedy
from vsgd.torch.interrupts import DeferredSignals, interruptible
from vsgd.torch.noise import Noise, StepNoise, observe
from vsgd.torch.parameters import check_initialized, check_listed_once, check_parameters
from vsgd.torch.replicas import ALONE, Replicas, raised_by_all, replicas_of
from vsgd.torch.samples import Recorder
from vsgd.torch.shards import is_sharded, local_of
from vsgd.torch.statistics import SampleTotals, added_up, counts_rows
from vsgd.torch.storage import (
    Dense,
    ParamState,
    Storage,
    Table,
    arranged,
    as_table,
    blank_state,
    check_shapes,
    is_table,
    new_state,
    served,
)
from vsgd.torch.work import (
    Work,
    collect,
    collect_again,
    distance_to_go,
    measure_scales,
    noise_of,
    probe,
    probe_is_due,
    settle,
    take_step,
    verdict,
)

PATIENCE = 10
"""Steps in a row that may be skipped because something was not finite."""

LEFTOVER_LR = 0.05
"""A factor on the rates below this is more likely a learning rate left over from another optimizer."""

LEFTOVER_STEPS = 20
"""A schedule that has kept `lr` below `LEFTOVER_LR` for this many steps was probably made for another optimizer."""

LEFTOVER = (
    "{what} multiplies the learning rates that VSGD finds, so training hardly moves. If it is a learning rate or a "
    "schedule for another optimizer, remove it."
)

RECHECK_INTERVAL = 1000
"""The closure is checked for repeatability in the first two steps and then once in this many."""

MIN_GRADIENT = 1e-15
"""Squares of smaller gradients vanish in float32."""

TINY_GRADIENT = (
    "the norm of the gradient is {norm:.2g}; below 1e-15, squares of gradients vanish in float32 and nothing is "
    "learned. Multiply the loss by a constant."
)

EQUAL_LOSSES = (
    "all micro-batches have exactly the same loss and gradient. If the closures were made in a loop, each must bind "
    "its own batch: [lambda x=x, y=y: loss(x, y) for x, y in batches]."
)


IN_USE = (
    "step() was called during step() of the same optimizer: in its closure, or in another thread. Call step() after it "
    "has ended. To train another network meanwhile, give that a VSGD of its own."
)


class NotFinite(Exception):
    """A loss or gradient was infinite or NaN."""


class Before(NamedTuple):
    """Everything a step changes before it is certain to succeed."""

    states: dict[Tensor, ParamState]
    grads: dict[Tensor, Tensor | None]
    gradient_flops: list[float]


class VSGD(Optimizer):
    """Stochastic gradient descent whose rates set themselves, one for each coordinate (Schaul & LeCun 2013).

    `step(closure)` calls the closure once or twice, the second time with probed parameters, the same random numbers and
    buffers left as they were; with BatchNorm now and then once more, for its statistics. Gradients are cleared before
    each call. Afterwards the parameters are the weights to evaluate and save; there is no mode to switch.

    Args:
        params: parameters or groups of them, as for any optimizer.
        lr: a factor on the rates, for those who want a schedule or groups that learn more slowly. Not needed.
        weight_decay: λ as in AdamW, whose learning rate is about the RMS of its steps: θ ← (θ − Δ) / (1 + λ·RMS(Δ))
            for the step Δ of each tensor.
        algorithm: `vsgd.NETWORKS` by default; `vsgd.PAPER` is the published pseudocode.
        per_sample: a model whose parameters these are. Every row of the minibatch is then a sample, as in the paper;
            otherwise the minibatch is.
        compact: store all statistics in bfloat16: 14 bytes of state per parameter instead of 20, bases not included.
        maximize: climb instead of descend.
        reduction: with `per_sample`, whether the loss is the "mean" or the "sum" over the rows.
        reweight: with `per_sample`, weigh each row by one over the number of others whose gradients interfere with its
            own (section 4.1 of the paper).
        samples: in distributed training, whether the "minibatch" of all processes together is a sample, or its parts:
            with "replicas" each process leaves the gradient of its own part, and VSGD averages them.
        reduce_dtype: with "replicas", `torch.bfloat16` sends their moments in half the bytes of float32.
        process_group: the processes that train this model; default: all.
    """

    turns: Turns
    """When this optimizer has taken steps, among all in the process."""
    _constructing = False
    _met: bool
    """Whether the weights and states of all processes have been compared since they were set from outside."""
    last_loss: Tensor | None
    """The loss that the last `step` returned, for wrappers whose `step` returns None. None before the first step."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        weight_decay: float = 0.0,
        *,
        algorithm: Config = NETWORKS,
        per_sample: nn.Module | None = None,
        compact: bool = False,
        maximize: bool = False,
        reduction: Literal["mean", "sum"] = "mean",
        reweight: bool = False,
        samples: Literal["minibatch", "replicas"] = "minibatch",
        reduce_dtype: torch.dtype | None = None,
        process_group: Any = None,
    ):
        if isinstance(params, nn.Module):
            raise TypeError(
                "VSGD takes parameters: VSGD(model.parameters()); for every row of the minibatch as a sample, "
                "VSGD(model.parameters(), per_sample=model)"
            )
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}, it must be 'mean' or 'sum'")
        if samples not in ("minibatch", "replicas"):
            raise ValueError(f"samples is {samples!r}, it must be 'minibatch' or 'replicas'")
        if samples == "replicas" and per_sample is not None:
            raise ValueError('with per_sample every row is a sample, so leave samples="replicas" out')
        if reduce_dtype not in (None, torch.bfloat16):
            raise ValueError(f"reduce_dtype is {reduce_dtype}, it must be torch.bfloat16 or left out")
        if reduce_dtype is not None and samples != "replicas":
            raise ValueError('reduce_dtype is of what VSGD sends, which are moments only with samples="replicas"')
        if reweight and per_sample is None:
            raise ValueError(
                "reweight=True weighs the rows of the minibatch, so name the model: VSGD(model.parameters(), "
                "per_sample=model, reweight=True)"
            )
        self._recorder = None if per_sample is None else Recorder(per_sample)
        self._reduction = reduction
        self._reweight = reweight
        self._compact = compact
        self._samples = samples
        self._reduce_dtype = reduce_dtype
        self._process_group = process_group
        self._in_use = False
        """Whether a step is running."""
        self._corrections: dict[str, running.Correction] = {}
        """Of running statistics, for each layer that has them."""
        self._forget()
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "algorithm": algorithm,
            "maximize": maximize,
            "steps": 0,
            "unprobed": 0,
            "skipped": 0,
            "skipped_in_a_row": 0,
            "samples": 1.0,
            "gradient_flops": 0.0,
            "averaging": [NETWORKS.min_window, 0.0, 0.0],
            "progress": [0.0, 0.0, 1.0, 0.0],
        }
        self._constructing = True  # all groups are checked at once: one by one would take quadratic time
        super().__init__(params, defaults)
        self._constructing = False
        check_parameters(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        require(group["algorithm"], Networks, Paper)
        check_settings(group)
        if isinstance(group["lr"], float) and 0 < group["lr"] < LEFTOVER_LR:
            self._largest_lr = LEFTOVER_LR  # one warning is enough
            warnings.warn(LEFTOVER.format(what=f"lr={group['lr']:g}"), stacklevel=2)
        if self.param_groups:
            group |= {name: self.param_groups[0][name] for name in ("steps", "unprobed")}
        if not isinstance(group["params"], Tensor | set):  # torch refuses sets
            group["params"] = list(group["params"])
            check_listed_once(group["params"])
        super().add_param_group(group)
        if self._constructing:
            return
        try:
            check_parameters(self.param_groups)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    # --- a step ---------------------------------------------------------------------------------------------------

    @raised_by_all
    def step(self, closure: Closure | Sequence[Closure] | None = None, *, scaler: Any = None) -> Any:
        """Evaluate the closure, learn from it, and move the parameters.

        A step happens as a whole or not at all, also when a signal interrupts it. Handlers of signals, such as that of
        Ctrl-C, run at once while the closure runs. Otherwise they run at the end of the step, which has then succeeded.

        Args:
            closure: clears gradients, computes the loss, calls backward and returns the loss. A list of closures is a
                list of micro-batches: each is a sample, and the step goes along their mean gradient.
            scaler: the `torch.amp.GradScaler` by which the closure multiplies its loss before it calls backward. The
                optimizer unscales; call `scaler.update()` afterwards as usual.

        Returns:
            The loss as it was before the step; with micro-batches or several processes, their mean.
        """
        with DeferredSignals(), torch.no_grad():
            if self._in_use:
                raise RuntimeError(IN_USE)
            self._in_use = True
            try:
                return self._step(check_closures(closure), scaler)
            finally:
                self._in_use = False

    def _step(self, closures: list[Closure], scaler: Any) -> Tensor:
        check_initialized(self._parameters())
        if is_last_to_step(self):  # another one may have left gradients here, as networks do that compete
            check_gradients(self.state)
        check_unshared(self)
        if self._recorder is not None and len(closures) > 1:
            raise TypeError("with per_sample every row is a sample; give one closure, or leave per_sample out")
        before = Before(
            dict(self.state),
            {p: p.grad for p in self._parameters()},
            [group["gradient_flops"] for group in self.param_groups],
        )
        replays = [Replay(each, self.parameter_set()) for each in closures]
        first: list[Evaluation] = []
        taken, within_iterates = False, self._is_open
        companions = ExitStack()
        self._arrange()
        self._meet_replicas(len(closures))
        try:
            self._open()
            first += self._first_evaluations(replays, scaler, companions)
            work = self._learn_from(first, replays, scaler)
            seen = self._seen_at_both(replays, scaler)
            if scaler is not None:
                scaler.unscale_(self)
            self._move_statistics(replays, seen)
            self._update(work, self._objective(first))
            self._close()
            taken = True
        except NotFinite:
            self._take_back(before, replays)
            mark_gradients(self._parameters())
            self._skip(first[0].loss)
        except BaseException:
            if not taken:
                self._take_back(before, replays)
                for replay in reversed(replays):
                    replay.rewind()
                for parameter, grad in before.grads.items():
                    parameter.grad = grad
            raise
        finally:
            companions.close()
            if within_iterates:
                self._open()
        mark_gradients(self._parameters())
        self.turns = next_turn(self.turns)
        self.last_loss = mean_loss(first)
        return self.last_loss

    @interruptible
    def minimize(self, loss: Closure | Sequence[Closure], *, scaler: Any = None) -> Tensor:
        """The short form of `step`, for functions that only return the loss. Gradients are computed here.

            loss = opt.minimize(lambda: F.cross_entropy(model(x), y))

        Args:
            loss: a function that returns the loss, or a list of them, which are micro-batches.
            scaler: a `torch.amp.GradScaler`. The loss is scaled here; call `scaler.update()` afterwards as usual.

        Returns:
            The loss before the step; with micro-batches or several processes, their mean.
        """

        @interruptible
        def closure(compute: Closure) -> Any:
            value = compute()
            check_loss(value)
            (value if scaler is None else scaler.scale(value)).backward()
            return value

        mean: Tensor = self.step([partial(closure, each) for each in check_closures(loss)], scaler=scaler)
        return mean

    def _first_evaluations(self, replays: list[Replay], scaler: Any, companions: ExitStack) -> list[Evaluation]:
        """Evaluate the closures at the iterates, those of the companions included, which stay there until they `close`.

        The evaluations are repeated where they show that a closure uses an optimizer that was not known to be one.
        """
        candidates = trained_in_turn(self)
        watched = [p for other in candidates for p in other.parameter_set()]
        for other in self._companions.intersection(candidates):
            companions.enter_context(other.iterates())
        while True:
            runs = [partial(replay.first, watched) for replay in replays]
            first = [self._evaluate(run, scaler) for run in runs]
            others = [other for other in candidates if other not in self._companions]
            found = used_by([replay.saved for replay in replays], others)
            self._companions.update(found)
            if not found or self._replicas.size > 1:  # one process alone must not call its closure again
                return first
            for replay in reversed(replays):
                replay.rewind()
            for other in found:
                companions.enter_context(other.iterates())

    def _take_back(self, before: Before, replays: list[Replay]) -> None:
        """Restore parameters, state and buffers."""
        self._close()
        for replay in reversed(replays):
            replay.undo()
        if any(self.state.get(p) is not state for p, state in before.states.items()):
            self._storages.clear()  # one became a table
        self.state.clear()
        self.state.update(before.states)
        for group, flops in zip(self.param_groups, before.gradient_flops, strict=True):
            group["gradient_flops"] = flops

    def replicas(self) -> Replicas:
        """The processes that train this model."""
        return replicas_of(self._process_group, self._samples == "replicas", self._reduce_dtype)

    def _meet_replicas(self, closures: int) -> None:
        """Find the other processes, and state what must be equal in all of them in this step."""
        self._replicas = self.replicas()
        if any(map(is_sharded, self._parameters())) and (self._recorder is not None or self._samples == "replicas"):
            raise TypeError("a parameter is sharded, so its gradients come averaged: leave per_sample and samples out")
        if self._replicas.size == 1:
            return
        if self._reweight:
            raise RuntimeError("reweight compares rows of one process only; leave it out in distributed training")
        self._adopt_changes()
        names = ("_samples", "_reduction", "_compact", "_reduce_dtype")
        facts = {name.removeprefix("_"): getattr(self, name) for name in names}
        facts |= {"per_sample": self._recorder is not None, "the number of micro-batches": closures}
        facts |= facts_of(self.param_groups, self.state)
        facts["whether weights or state were set since the last step"] = not self._met
        if not self._met:
            facts |= contents_of(self.param_groups, self.state)
            facts["corrections of running statistics"] = checksum([t for c in self._corrections.values() for t in c])
        self._replicas = self._replicas.with_facts(facts)
        if not self._met:  # before a closure communicates in ways that depend on settings
            self._replicas.numbers("start of the step")
            self._met = True

    def _evaluate(self, run: Callable[[], Any], scaler: Any, record: bool = True) -> Evaluation:
        """Run a closure and collect the gradients that it leaves. All processes do so together."""
        evaluate = partial(self._evaluate_here, scaler=scaler, record=record)
        evaluation, self._replicas = agreed(self._replicas, run, evaluate, self._parameters())
        return evaluation

    def _evaluate_here(self, run: Callable[[], Any], scaler: Any, record: bool) -> Evaluation:
        for parameter in self._parameters():
            parameter.grad = None
        recording = self._recorder.record() if self._recorder is not None and record else nullcontext()
        with recording as recorded:
            loss = run()
            check_loss(loss)
        grads = {}
        for group in self.param_groups:
            scale = scale_of(scaler) * (-1 if group["maximize"] else 1)
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    grads[parameter] = own_gradient(local_of(parameter.grad), scale)
        if not grads:
            raise RuntimeError(
                "the closure left no gradient: it must call loss.backward(), on a loss that depends on the parameters "
                "given to VSGD" + remedy()
            )
        return Evaluation(loss=loss.detach().clone().reshape(()), grads=grads, recording=recorded)

    def _learn_from(self, first: list[Evaluation], replays: list[Replay], scaler: Any) -> list[Work]:
        """Take gradients at θ + δ too if that is due. All that an update needs; nothing of the state has changed."""
        starting, here, steps = not any(self.state.values()), first[0], self.param_groups[0]["steps"]
        raw = {p: p.grad for p in self._parameters()}
        checking = starting or steps == 1 or steps % RECHECK_INTERVAL == 0
        if starting:
            self._check_closures(first, replays, scaler)
        elif checking:
            self._check_again(first, replays, scaler)
        totals = self._sample_totals(first, None, scaler, only_tables=True)
        self._admit(first, totals)
        work = collect(self._storages, first, totals, self._replicas)
        probing = self._replicas.size == 1 and probe_is_due(work)
        if not probing:  # a single process need not wait for the numbers if a probe is due anyway
            probing = self._look_at(first, [], work, scaler)
        second = None
        if probing:
            places = {p: k for k, p in enumerate(self._parameters())}
            work = [probe(w, places) for w in work]
            second = [self._evaluate(replay.again, scaler) for replay in replays]
            if starting:
                with self._replicas.sharing_errors("check of the probe"):
                    check_probe_was_seen(here, second[0])
        if probing or totals is not None:
            totals = self._sample_totals(first, second, scaler)
            work = [collect_again(w, first, second, totals, self._replicas) for w in work]
            self._look_at(first, second or [], work, scaler)
        if probing or checking:
            for parameter, grad in raw.items():
                parameter.grad = grad
        self._check_groups()
        return work

    def _seen_at_both(self, replays: list[Replay], scaler: Any) -> dict[nn.Module, tuple[running.Seen, running.Seen]]:
        """If that is due: what layers with running statistics saw at the iterates, and see at the averaged weights."""
        averaged = any(averages_iterates(group["algorithm"]) for group in self.param_groups)
        if not averaged or not running.is_due(self.param_groups[0]["steps"]):
            return {}
        iterates, averages = running.seen(replays[-1].saved), {}
        if self._replicas.all("layers with running statistics", not iterates):
            return {}
        grads = {p: p.grad for p in self._parameters()}
        self._close()
        again = partial(replays[-1].again, lambda saved: averages.update(running.seen(saved)))
        self._evaluate(again, scaler, record=False)
        self._replicas.numbers("end of an evaluation at the averaged weights")
        self._open(adopt=False)  # a closure may have changed weights, which are not the user's changes between steps
        for parameter, grad in grads.items():
            parameter.grad = grad
        return {module: (iterates[module], average) for module, average in averages.items() if module in iterates}

    def _move_statistics(self, replays: list[Replay], seen: dict[nn.Module, tuple[running.Seen, running.Seen]]) -> None:
        """Let running statistics, as BatchNorm has them, be those of the averaged weights, which are evaluated."""
        moved = running.moved_layers(replay.saved for replay in replays)
        places = {p: k for k, p in enumerate(self._parameters())} if moved else {}
        for layer in moved:
            key = running.key_of(layer.module, places, self._other_layers)
            measured = running.measured(*seen[layer.module], layer.module.eps) if layer.module in seen else None
            if measured is not None:
                self._corrections = {**self._corrections, key: measured}
            correction = self._corrections.get(key)
            if correction is not None and correction.shift.shape == layer.mean.shape:
                running.correct(layer, correction, None if measured is None else seen[layer.module][1])

    def _check_closures(self, first: list[Evaluation], replays: list[Replay], scaler: Any) -> None:
        """Check in the first step that closures repeat themselves, and count their operations."""
        local = list(first)
        self._check_finite(first, scaler)
        self._warn_of_suspicious(local)
        # operations are counted in code that is not compiled, and torch would not compile again what it met meanwhile
        counter = basis.flop_counter()
        try:
            with torch.compiler.set_stance("force_eager"), counter:
                again = self._evaluate_again(replays, scaler)
            # compared outside, since the counter slows down every operation
            repeated = self._difference(local, again, scaler) is None
        except RuntimeError:
            repeated = False
        if not self._replicas.all("check of the closures", repeated):
            self._check_again(
                local, replays, scaler
            )  # compiled code draws other random numbers than the same uncompiled
        check_averaged(self._replicas, first[0])
        flops = self._replicas.mean("number of operations", float(counter.get_total_flops()))
        for group in self.param_groups:
            group["gradient_flops"] = flops

    def _check_again(self, first: list[Evaluation], replays: list[Replay], scaler: Any) -> None:
        """Check that closures repeat themselves: raise in the first two steps, warn later."""
        local = list(first)
        self._check_finite(first, scaler)
        difference = self._difference(local, self._evaluate_again(replays, scaler), scaler)
        if self.param_groups[0]["steps"] > 1:
            if difference is not None:
                warnings.warn(str(difference), stacklevel=4)
            return
        with self._replicas.sharing_errors("repeatability of the closures"):
            if difference is not None:
                raise difference

    def _evaluate_again(self, replays: list[Replay], scaler: Any) -> list[Evaluation]:
        return [self._evaluate(replay.again, scaler, record=False) for replay in replays]

    def _difference(self, first: list[Evaluation], again: list[Evaluation], scaler: Any) -> NotRepeatable | None:
        """Return the error of a closure that gave something else in another evaluation at the same weights."""
        self._check_finite(list(again), scaler)
        try:
            for each, other in zip(first, again, strict=True):
                check_repeatable(each, other)
        except NotRepeatable as error:
            return error
        return None

    def _check_finite(self, evaluations: list[Evaluation], scaler: Any) -> None:
        """Skip the step if a loss or a gradient is not finite. Replace the losses by their mean over all processes."""
        numbers = [n for e in evaluations for n in (e.loss, *(grad.norm() for grad in e.grads.values()))]
        usable, _ = reduce_checks(self._replicas, evaluations, all(bool(n.isfinite()) for n in numbers), False)
        if not usable:
            self._give_up(scaler)

    def _warn_of_suspicious(self, first: list[Evaluation]) -> None:
        """Warn of gradients too small to be squared, and of micro-batches that are all the same."""
        norms = [[float(grad.norm()) for grad in each.grads.values()] for each in first]
        if 0 < max(map(max, norms)) < MIN_GRADIENT and all(p.dtype != torch.float64 for p in self._parameters()):
            warnings.warn(TINY_GRADIENT.format(norm=max(map(max, norms))), stacklevel=5)
        if len({(float(each.loss), *norm) for each, norm in zip(first, norms, strict=True)}) == 1 < len(first):
            warnings.warn(EQUAL_LOSSES, stacklevel=5)

    def _check_groups(self) -> None:
        """Raise if a setting of a group is impossible; warn once of a schedule that was made for another optimizer."""
        for group in self.param_groups:
            check_settings(group)
        self._largest_lr = max(self._largest_lr, *(float(group["lr"]) for group in self.param_groups))
        if self.param_groups[0]["steps"] == LEFTOVER_STEPS and 0 < self._largest_lr < LEFTOVER_LR:
            what = f"an lr of at most {self._largest_lr:g} in the first {LEFTOVER_STEPS} steps"
            warnings.warn(LEFTOVER.format(what=what), stacklevel=4)

    # --- statistics -----------------------------------------------------------------------------------------------

    def _sample_totals(
        self, first: list[Evaluation], second: list[Evaluation] | None, scaler: Any, only_tables: bool = False
    ) -> SampleTotals | None:
        """Sums over single rows, with `per_sample`. They take most of the time; a probe needs only those of tables."""
        if self._recorder is None:
            return None
        only = None
        if only_tables:
            only = {p for e in first for p in e.grads if not self.state.get(p) or is_table(self.state[p])}
        here, there = first[0].recording, None if second is None else second[0].recording
        bases = {p: b for _, s in self._storages if isinstance(s, Dense) for p, b in s.rotated().items()}
        sums = self._recorder.sums(here, there, self._reduction, scale_of(scaler), only=only, bases=bases)
        scale = here.count if self._reduction == "mean" else 1
        if not self._reweight:
            totals = SampleTotals(sums, here.count, scale, {}, here.count)
            return added_up(totals, self._parameters(), second is not None, self._reduction, self._replicas)
        weights = sample_weights(self._recorder.gram(here))
        signs = {p: -1 if group["maximize"] else 1 for group in self.param_groups for p in group["params"]}
        dense = {p for p in first[0].grads if not self.state.get(p) or not is_table(self.state[p])}
        factor = scale / scale_of(scaler)
        directions = {p: d * (signs[p] * factor) for p, d in self._recorder.weighted(here, weights, dense).items()}
        return SampleTotals(sums, here.count, scale, directions, float(effective_count(weights)))

    def _look_at(self, first: list[Evaluation], second: list[Evaluation], work: list[Work], scaler: Any) -> bool:
        """Return whether any process wants to probe. The losses of `first` become the mean over all processes.

        This is the only device synchronization in a step.

        Raises:
            NotFinite: a number is not usable, in any process.
        """
        usable, long = verdict(work, [evaluation.loss for evaluation in (*first, *second)])
        usable, probing = reduce_checks(self._replicas, first, usable, probe_is_due(work, long))
        if not usable:
            self._give_up(scaler)
        return probing

    def _give_up(self, scaler: Any) -> NoReturn:
        """Skip this step. The scaler, if there is one, would look at the gradients of the last evaluation only."""
        if scaler is not None:
            least = min((p for p in self._parameters() if p.grad is not None), key=Tensor.numel)
            least.grad = torch.full_like(least, torch.inf)
            scaler.unscale_(self)
        raise NotFinite

    def _update(self, work: list[Work], loss: Tensor) -> None:
        """Take the step."""
        self._settle()
        for w in work:
            gains, outliers = take_step(w)
            self._gains.setdefault(id(w.group), []).append(gains)
            self._outliers.update(outliers)
        self._loss = loss
        self.step_noise: StepNoise | None = noise_of(work)
        if self.step_noise is not None:
            self._noise: Noise = observe(self._noise, self.step_noise.variance, self.step_noise.signal)
        probed = any(w.delta is not None for w in work)
        if probed:
            measure_scales(self._storages)
        for group in self.param_groups:
            group["steps"] += 1
            group["unprobed"] = 0 if probed else group["unprobed"] + 1
            group["skipped_in_a_row"] = 0

    def _objective(self, first: list[Evaluation]) -> Tensor:
        """The loss in the unit of the gradients that are learned from: a mean over rows, if these are the samples."""
        is_sum = self._recorder is not None and self._reduction == "sum"
        return mean_loss(first) / (self._replicas.mean("number of rows", first[0].recording.count) if is_sum else 1)

    def _settle(self) -> None:
        """Let window and horizon follow the last step; only now, so as not to wait for a device then."""
        for group in self.param_groups:
            gains = self._gains.pop(id(group), None)
            if gains and averages_iterates(group["algorithm"]):
                has_tables = any(each is group and isinstance(storage, Table) for each, storage in self._storages)
                settle(group, gains, float(self._loss) * (-1 if group["maximize"] else 1), has_tables)

    def _skip(self, loss: Tensor) -> None:
        """Leave a step out; too many in a row are an error."""
        for group in self.param_groups:
            group["skipped"] += 1
            group["skipped_in_a_row"] += 1
        if self.param_groups[0]["skipped_in_a_row"] >= PATIENCE:
            raise FloatingPointError(
                f"the loss or its gradient was infinite, NaN or too large to be squared in {PATIENCE} steps in a row "
                f"(loss {float(loss):g}); nothing has been changed in them. Look at the data, or at the last layers."
            )

    def iterates(self) -> Iterates:
        """Let the parameters hold the newest iterates instead of their average, in a `with` block or a function.

        Use it wherever data are generated by the network that learns from them, as the episodes of a policy are:

            @opt.iterates()
            def rollout(): ...

        Closures need it only for copies of a network: a closure that uses a network of another `VSGD` gets its iterates
        by itself. Blocks may be nested, and may contain steps. Changes of parameters within are lost.
        """
        return Iterates(self)

    def info(self) -> Diagnosis:
        """Return rates, memory and noise of every tensor, the batch size worth using, and the bytes of the state.

        `print` shows it as a table.
        """
        rows = self._recorder is not None
        unit = "samples" if rows else "micro-batches" if self._samples == "minibatch" else "batches of a process"
        buffers = sum(storage.buffer_bytes() for _, storage in self._storages if isinstance(storage, Dense))
        return diagnose(self.param_groups, self.state, self._outliers, self._noise, unit, buffers)

    # --- state ----------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def parameter_set(self) -> set[Tensor]:
        """Return the parameters of all groups as a set."""
        return set(self._parameters())

    def _forget(self) -> None:
        """Drop what is not worth saving."""
        self._replicas = ALONE
        self._met = False
        self._storages: list[tuple[dict[str, Any], Storage]] = []
        self._largest_lr = 0.0
        self._is_open = False
        """Whether the parameters hold the iterates."""
        self.turns = Turns()
        self._companions: WeakSet[VSGD] = WeakSet()
        """Optimizers whose parameters a closure has used."""
        OPTIMIZERS.add(self)
        self._other_layers: list[nn.Module] = []
        self._outliers: dict[Tensor, Tensor] = {}
        self._noise = Noise()
        self.step_noise = None
        """Of the last step that was taken, if it had several samples."""
        self._gains: dict[int, list[list[Any]]] = {}
        self._loss = torch.zeros(())
        self.last_loss = None

    def __getstate__(self) -> dict[str, Any]:
        with DeferredSignals():
            self._settle()
        kept = ("_recorder", "_reduction", "_reweight", "_compact", "_samples", "_reduce_dtype", "_corrections")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_process_group", None)  # groups cannot be copied
        self.__dict__.setdefault("_reduce_dtype", None)
        self.__dict__.setdefault("_corrections", {})
        self._in_use = False
        self._forget()

    def _arrange(self) -> None:
        """Let storages serve all parameters that have state, as these are now."""
        for group in self.param_groups:
            require(group["algorithm"], Networks, Paper)
        if not served(self._storages, self.state):
            check_shapes(self.state)
            was_open = self._is_open
            if was_open:
                self._close()
            self._adopt_changes()
            self._storages = arranged(self.param_groups, self.state, self._compact)
            if was_open:
                self._open()

    def _open(self, adopt: bool = True) -> None:
        """Let parameters hold the iterates, after adopting what the user has set since the last step."""
        if not self._is_open:
            if adopt:
                self._adopt_changes()
            self._is_open = True
            for _, storage in self._storages:
                storage.open()

    def _adopt_changes(self) -> None:
        if self._is_open:
            return
        for _, storage in self._storages:
            if not storage.is_untouched():
                storage.adopt()
                # a table may be written without being changed, and a part of a tensor be changed in one process only
                self._met = self._met and (isinstance(storage, Table) or is_sharded(storage.parameters[0]))

    def _close(self) -> None:
        for _, storage in self._storages:
            storage.close()
        self._is_open = False

    def _admit(self, evaluations: list[Evaluation], totals: SampleTotals | None) -> None:
        """Make state for parameters that have their first gradient, or are found to have rows that count apart."""
        grads = {p: grad for e in evaluations for p, grad in e.grads.items()}
        tables = {p for p, grad in grads.items() if counts_rows(p, grad, totals)}
        fresh = [p for p in grads if not self.state.get(p)]
        turned = [p for p in tables if self.state.get(p) and not is_table(self.state[p])]
        if not fresh and not turned:
            return
        groups = {p: group for group in self.param_groups for p in group["params"]}
        self._close()
        blocks = self._plan([p for p in fresh if p not in tables])
        for p in fresh:
            self.state[p] = new_state(p, groups[p]["algorithm"], p in tables, self._compact, blocks.get(p, (1, 1)))
        for p in turned:
            self.state[p] = as_table(self.state[p], p)
        self._storages = []
        self._arrange()
        measure_scales(self._storages, distance_to_go(evaluations[0], self._replicas))
        self._open()

    def _plan(self, fresh: list[Tensor]) -> dict[Tensor, tuple[int, int]]:
        """Block sizes of the bases of new parameters, within what rotation may cost."""
        groups = {p: group for group in self.param_groups for p in group["params"]}
        spent = sum(basis.cost_of(p, state) for p, state in self.state.items())
        wanted = [p for p in fresh if getattr(groups[p]["algorithm"], "eigenbasis", False) and not is_sharded(p)]
        return basis.plan(wanted, self.param_groups[0]["gradient_flops"], spent)

    def state_dict(self) -> dict[str, Any]:
        """The state, of numbers, text and tensors only.

        Sharded parameters have one before their first step too, for `torch.distributed.checkpoint` to load into.
        """
        with DeferredSignals():
            self._settle()
        saved = super().state_dict()
        saved["statistics"] = {key: list(correction) for key, correction in self._corrections.items()}
        for own, group in zip(self.param_groups, saved["param_groups"], strict=True):
            for p, index in zip(own["params"], group["params"], strict=True):
                if is_sharded(p) and index not in saved["state"]:
                    saved["state"][index] = blank_state(p, own["algorithm"], self._compact)
            group["algorithm"] = {"name": type(group["algorithm"]).__name__, **group["algorithm"]._asdict()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where `state_dict` left off, to the bit. A state of another model is refused and nothing changes."""
        checkpoint = checked(state_dict, self.param_groups)
        with DeferredSignals():
            super().load_state_dict(state_dict)
            for group, algorithm in zip(self.param_groups, checkpoint.algorithms, strict=True):
                group["algorithm"] = algorithm
            self.state.clear()
            self.state.update(checkpoint.states)
            self._corrections = checkpoint.corrections
            self._forget()


def check_settings(group: dict[str, Any]) -> None:
    """Raise unless `lr` and `weight_decay` of a group are finite numbers that are not negative."""
    for name in ("lr", "weight_decay"):
        try:
            value = float(group[name])
        except (TypeError, ValueError):
            raise ValueError(f"{name} is {group[name]!r}, it must be a number") from None
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value:g}, it must be finite and at least 0")


class Iterates(AbstractContextManager[None], ContextDecorator):
    """Context in which parameters hold the iterates. Signals interrupt its block, but not its beginning or end."""

    def __init__(self, optimizer: VSGD):
        self._optimizer = optimizer
        self._entered: list[tuple[DeferredSignals, bool]] = []
        """For each block that has begun: its signals, and whether the parameters held the averaged weights before."""

    def __enter__(self) -> None:
        signals, opt = DeferredSignals(), self._optimizer
        signals.__enter__()
        self._entered.append((signals, not opt._is_open))
        if not opt._is_open:
            try:
                with torch.no_grad():
                    opt._arrange()
                    opt._open()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        signals, held_average = self._entered.pop()
        try:
            if held_average:
                with torch.no_grad():
                    self._optimizer._close()
        finally:
            signals.__exit__()


def own_gradient(grad: Tensor, scale: float) -> Tensor:
    """A gradient, unscaled, in memory that the next evaluation will not write to."""
    if scale != 1:
        return grad.detach() / scale
    is_part = not grad.is_sparse and grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()
    return grad.detach().clone() if is_part else grad.detach()


def mean_loss(evaluations: list[Evaluation]) -> Tensor:
    return evaluations[0].loss if len(evaluations) == 1 else torch.stack([e.loss for e in evaluations]).mean()


def scale_of(scaler: Any) -> float:
    return 1.0 if scaler is None else float(scaler.get_scale())
