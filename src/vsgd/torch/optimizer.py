"""`VSGD`, a `torch.optim.Optimizer` with no learning rate to choose."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsgd.algorithms.base import require
from vsgd.algorithms.networks import NETWORKS, Networks
from vsgd.algorithms.paper import Paper
from vsgd.reweight import effective_count, sample_weights
from vsgd.tensors import Config, averages_iterates
from vsgd.torch import basis, running
from vsgd.torch.checkpoint import checked
from vsgd.torch.closure import (
    Closure,
    Evaluation,
    Replay,
    check_closures,
    check_gradients,
    check_loss,
    check_probe_was_seen,
    check_repeatable,
    mark_gradients,
)
from vsgd.torch.diagnostics import Diagnosis, diagnose
from vsgd.torch.interrupts import DeferredSignals, interruptible
from vsgd.torch.noise import Noise, StepNoise, observe
from vsgd.torch.replicas import ALONE, Replicas, agreed, check_averaged, check_models, replicas_of
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
    check_parameters,
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


IN_USE = (
    "step() was called during {use} of the same optimizer: in its closure or block, or in another thread. Call step() "
    "after it has ended. To train another network meanwhile, give that a VSGD of its own."
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
        weight_decay: λ, pulls parameters towards zero with the rate η of each: θ ← (θ − η∇) / (1 + ηλ).
        algorithm: `vsgd.NETWORKS` by default; `vsgd.PAPER` is the published pseudocode.
        per_sample: a model whose parameters these are. Every row of the minibatch is then a sample, as in the paper;
            otherwise the minibatch is.
        compact: keep all statistics in bfloat16: half the memory.
        maximize: climb instead of descend.
        reduction: with `per_sample`, whether the loss is the "mean" or the "sum" over the rows.
        reweight: with `per_sample`, weigh each row by one over the number of others whose gradients interfere with its
            own (section 4.1 of the paper).
        samples: in distributed training, whether the "minibatch" of all processes together is a sample, or its parts:
            with "replicas" each process leaves the gradient of its own part, and VSGD averages them.
        reduce_dtype: with "replicas", `torch.bfloat16` sends their moments in half the bytes of float32.
        process_group: the processes that train this model; default: all.
    """

    _last_to_step: ClassVar[int] = 0
    _met: bool
    """Have the processes been compared?"""

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
        if isinstance(lr, float) and 0 < lr < LEFTOVER_LR:
            warnings.warn(
                f"lr={lr:g} multiplies the rates that VSGD finds, which are right as they are; leave lr out",
                stacklevel=2,
            )
        self._recorder = None if per_sample is None else Recorder(per_sample)
        self._reduction = reduction
        self._reweight = reweight
        self._compact = compact
        self._samples = samples
        self._reduce_dtype = reduce_dtype
        self._process_group = process_group
        self._in_use = ""
        """What is running that lets parameters hold the iterates: a step, or a block of `iterates`."""
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
            "progress": [0.0, 0.0, 1.0],
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        require(group["algorithm"], Networks, Paper)
        for name in ("lr", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]}, it must be at least 0")
        if self.param_groups:
            group |= {name: self.param_groups[0][name] for name in ("steps", "unprobed")}
        super().add_param_group(group)
        try:
            check_parameters(self._parameters())
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    # --- a step ---------------------------------------------------------------------------------------------------

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
                raise RuntimeError(IN_USE.format(use=self._in_use))
            self._in_use = "step()"
            try:
                return self._step(check_closures(closure), scaler)
            finally:
                self._in_use = ""

    def _step(self, closures: list[Closure], scaler: Any) -> Any:
        if VSGD._last_to_step == id(self):  # another one may have left gradients here, as networks do that compete
            check_gradients(self.state)
        if self._recorder is not None and len(closures) > 1:
            raise TypeError("with per_sample every row is a sample; give one closure, or leave per_sample out")
        self._meet_replicas()
        before = Before(
            dict(self.state),
            {p: p.grad for p in self._parameters()},
            [group["gradient_flops"] for group in self.param_groups],
        )
        replays = [Replay(each, {p.device for p in self._parameters()}) for each in closures]
        first: list[Evaluation] = []
        taken = False
        self._arrange()
        try:
            self._open()
            first += [self._evaluate(replay.first, scaler, closures=len(replays)) for replay in replays]
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
        mark_gradients(self._parameters())
        VSGD._last_to_step = id(self)
        return mean_loss(first)

    @interruptible
    def minimize(self, loss: Closure | Sequence[Closure], *, scaler: Any = None) -> Any:
        """The short form of `step`, for functions that only return the loss. Gradients are computed here.

            loss = opt.minimize(lambda: F.cross_entropy(model(x), y))

        Args:
            loss: a function that returns the loss, or a list of them, which are micro-batches.
            scaler: a `torch.amp.GradScaler`. The loss is scaled here; call `scaler.update()` afterwards as usual.
        """

        @interruptible
        def closure(compute: Closure) -> Any:
            value = compute()
            check_loss(value)
            (value if scaler is None else scaler.scale(value)).backward()
            return value

        return self.step([partial(closure, each) for each in check_closures(loss)], scaler=scaler)

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

    def _meet_replicas(self) -> None:
        """Find the other processes, and check once that they train the same model."""
        self._replicas = self.replicas()
        if self._reweight and self._replicas.size > 1:
            raise RuntimeError("reweight compares rows of one process only; leave it out in distributed training")
        if not self._met:
            if any(map(is_sharded, self._parameters())) and (self._recorder is not None or self._samples == "replicas"):
                raise TypeError(
                    "a parameter is sharded, so its gradients come averaged: leave per_sample and samples out"
                )
            check_models(self._replicas, self._parameters(), self.param_groups[0]["steps"])
            self._met = True

    def _evaluate(self, run: Callable[[], Any], scaler: Any, record: bool = True, closures: int = 0) -> Evaluation:
        """Run a closure, one of so many, and collect the gradients that it leaves. All processes do so together."""
        evaluate = partial(self._evaluate_here, scaler=scaler, record=record)
        return agreed(self._replicas, run, evaluate, self._parameters(), closures)

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
                "given to VSGD"
            )
        return Evaluation(loss=loss.detach().clone().reshape(()), grads=grads, recording=recorded)

    def _learn_from(self, first: list[Evaluation], replays: list[Replay], scaler: Any) -> list[Work]:
        """Take gradients at θ + δ too if that is due. All that an update needs; nothing of the state has changed."""
        starting = not self.state
        raw = {p: p.grad for p in self._parameters()}
        if starting:
            self._check_closures(first, replays, scaler)
        totals = self._sample_totals(first, None, scaler, only_tables=True)
        self._admit(first, totals)
        work = collect(self._storages, first, totals, self._replicas)
        probing = probe_is_due(work)
        if not probing:  # a probe that is due anyway needs no look at the numbers first
            probing = probe_is_due(work, long=self._look_at(first, work, scaler))
        second = None
        if probing:
            places = {p: k for k, p in enumerate(self._parameters())}
            work = [probe(w, places) for w in work]
            second = [self._evaluate(replay.again, scaler) for replay in replays]
            if starting:
                with self._replicas.sharing_errors():
                    check_probe_was_seen(first[0], second[0])
        if probing or totals is not None:
            totals = self._sample_totals(first, second, scaler)
            work = [collect_again(w, first, second, totals, self._replicas) for w in work]
            self._look_at([*first, *(second or [])], work, scaler)
        if probing:
            for parameter, grad in raw.items():
                parameter.grad = grad
        for group in self.param_groups:  # a mistake is told before anything moves
            float(group["lr"]), float(group["weight_decay"])
        return work

    def _seen_at_both(self, replays: list[Replay], scaler: Any) -> dict[nn.Module, tuple[running.Seen, running.Seen]]:
        """If that is due: what layers with running statistics saw at the iterates, and see at the averaged weights."""
        averaged = any(averages_iterates(group["algorithm"]) for group in self.param_groups)
        if not averaged or not running.is_due(self.param_groups[0]["steps"]):
            return {}
        iterates, averages = running.seen(replays[-1].saved), {}
        if self._replicas.all(not iterates):
            return {}
        grads = {p: p.grad for p in self._parameters()}
        self._close()
        again = partial(replays[-1].again, lambda saved: averages.update(running.seen(saved)))
        self._evaluate(again, scaler, record=False)
        for _, storage in self._storages:  # what a closure does to weights is not what `_open` looks for
            storage.open()
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
        """In the first step: do closures repeat themselves, and how much do they compute?"""

        def check_finite(evaluations: list[Evaluation]) -> None:
            numbers = [n for e in evaluations for n in (e.loss, *(grad.norm() for grad in e.grads.values()))]
            if not self._replicas.all(all(bool(number.isfinite()) for number in numbers)):
                self._give_up(scaler)

        def repeat() -> None:
            again = [self._evaluate(replay.again, scaler, record=False) for replay in replays]
            check_finite(again)
            with self._replicas.sharing_errors():
                for each, other in zip(first, again, strict=True):
                    check_repeatable(each, other)

        check_finite(first)
        # operations are counted in code that is not compiled, and torch would not compile again what it met meanwhile
        with torch.compiler.set_stance("force_eager"), basis.flop_counter() as counter:
            try:
                repeat()
                repeated = True
            except RuntimeError:
                repeated = False
        if not repeated:  # compiled code draws other random numbers, so it is asked to repeat itself
            repeat()
        check_averaged(self._replicas, first[0])
        flops = self._replicas.mean(float(counter.get_total_flops()))
        for group in self.param_groups:
            group["gradient_flops"] = flops

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
        with self._replicas.sharing_errors():
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

    def _look_at(self, evaluations: list[Evaluation], work: list[Work], scaler: Any) -> bool:
        """Is a gradient unusually long? `NotFinite` if a number is not usable. Only here a device is waited for."""
        usable, long = verdict(work, [evaluation.loss for evaluation in evaluations])
        if not usable:
            self._give_up(scaler)
        return long

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
        return mean_loss(first) / (first[0].recording.count if is_sum else 1)

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

    def iterates(self) -> AbstractContextManager[None]:
        """Within, parameters hold the newest iterates instead of their average.

        For networks that train against each other: each should meet the other as it is, not as it was on average.

            with generator_opt.iterates():
                discriminator_opt.step(closure)
        """
        return Iterates(self)

    def info(self) -> Diagnosis:
        """Rates, memory and noise of every tensor, and the batch size worth using. `print` shows it as a table."""
        return diagnose(self.param_groups, self.state, self._outliers, self._noise)

    # --- state ----------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _forget(self) -> None:
        """Drop what is not worth saving."""
        self._replicas = ALONE
        self._met = False
        self._storages: list[tuple[dict[str, Any], Storage]] = []
        self._other_layers: list[nn.Module] = []
        self._outliers: dict[Tensor, Tensor] = {}
        self._noise = Noise()
        self.step_noise = None
        """Of the last step that was taken, if it had several samples."""
        self._gains: dict[int, list[list[Any]]] = {}
        self._loss = torch.zeros(())

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
        self._in_use = ""
        self._forget()

    def _arrange(self) -> None:
        """Let storages serve all parameters that have state, as these are now."""
        for group in self.param_groups:
            require(group["algorithm"], Networks, Paper)
        if not served(self._storages, self.state):
            check_shapes(self.state)
            self._adopt_changes()
            self._storages = arranged(self.param_groups, self.state, self._compact)

    def _open(self) -> None:
        """Let parameters hold the iterates; go on from what the user has set since the last step."""
        self._adopt_changes()
        for _, storage in self._storages:
            storage.open()

    def _adopt_changes(self) -> None:
        for _, storage in self._storages:
            if not storage.is_untouched():
                storage.adopt()

    def _close(self) -> None:
        for _, storage in self._storages:
            storage.close()

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


class Iterates(AbstractContextManager[None]):
    """Context manager in which parameters hold the iterates. Signals interrupt its block, not its beginning or end."""

    def __init__(self, optimizer: VSGD):
        self._optimizer = optimizer
        self._signals = DeferredSignals()
        self._is_needed = False

    def __enter__(self) -> None:
        self._signals.__enter__()
        opt = self._optimizer
        self._is_needed = not opt._in_use  # otherwise parameters hold them already
        if self._is_needed:
            opt._in_use = "iterates()"
            try:
                with torch.no_grad():
                    opt._arrange()
                    opt._open()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._is_needed:
                self._optimizer._in_use = ""
                with torch.no_grad():
                    self._optimizer._close()
        finally:
            self._signals.__exit__()


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
