"""`VSGD`, a `torch.optim.Optimizer` with no learning rate to choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsgd.algorithms.base import require
from vsgd.algorithms.networks import NETWORKS, Networks
from vsgd.algorithms.paper import Paper
from vsgd.algorithms.strategy import Config, strategy_of
from vsgd.torch.averaging import PendingReports
from vsgd.torch.batchnorm import average_statistics
from vsgd.torch.block import Update
from vsgd.torch.blocks import Blocks, blank_state, check_numbers, noise_of, probe_is_due
from vsgd.torch.checkpoint import checked
from vsgd.torch.closures import LeftGradients, check_closures, check_loss
from vsgd.torch.diagnostics import Diagnosis, diagnose
from vsgd.torch.distributed.agreement import Agreement, reduce_checks
from vsgd.torch.distributed.messages import Processes, Replicas, processes_of, raised_by_all
from vsgd.torch.distributed.shards import is_sharded
from vsgd.torch.evaluation import Evaluation, NotFinite, Run
from vsgd.torch.moments import MicroBatches, Minibatch, RowSamples, RowSettings, Sampling
from vsgd.torch.noise import Noise, StepNoise, observe
from vsgd.torch.per_sample import Recorder
from vsgd.torch.process import (
    DeferredSignals,
    Iterates,
    Turns,
    check_unshared,
    interruptible,
    is_last_to_step,
    next_turn,
    register,
    trained_in_turn,
)
from vsgd.torch.replay import Closure, KnownParts
from vsgd.torch.settings import (
    LearningRateWatch,
    Rows,
    check_flag,
    check_initialized,
    check_listed_once,
    check_parameters,
    check_sampling,
    check_settings,
)
from vsgd.torch.state import FORMAT, ParamState, is_table

PATIENCE = 10
"""Steps in a row that may be skipped because a number was not finite."""

IN_USE = (
    "step() was called during step() of the same optimizer: in its closure, or in another thread. Call step() after it "
    "has ended. To train another network meanwhile, give that a VSGD of its own."
)

DAMAGED = (
    "a step of this VSGD was applied in part, because the update failed{cause}. Reload model and optimizer from the "
    "last checkpoint."
)


class VSGD(Optimizer):
    """Stochastic gradient descent that estimates a learning rate for each coordinate (Schaul & LeCun 2013).

    `step(closure)` calls the closure at the parameters. In about one of ten steps it calls it again at slightly
    perturbed parameters, with the same random numbers and without changing buffers. Gradients are cleared before each
    call. Between steps, the parameters hold the weights to evaluate and to save. There is no train or eval mode.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        lr: factor on the learning rates that are computed, for schedules or for groups that learn more slowly.
        weight_decay: λ with the meaning of AdamW. Each tensor is updated by θ ← (θ − Δ) / (1 + λ·RMS(Δ)), where Δ is
            its step. RMS(Δ) replaces the learning rate of AdamW.
        steps_per_epoch: number of steps in which all training data are seen once: `len(loader)`, divided by the number
            of micro-batches per step. Weight decay is then estimated for each matrix, from the noise of its
            gradients; `info` shows it. Leave it out for data that are seen once. A `weight_decay` above 0 replaces
            the estimate.
        algorithm: the algorithm and its constants. `vsgd.PAPER` is the published algorithm.
        per_sample: the model, or `Rows(model, ...)`. Every row of the minibatch is then a sample, as in the paper;
            otherwise the minibatch is one sample.
        compact: whether all statistics are stored in bfloat16: 14 bytes of state per parameter instead of 20, bases
            not included.
        maximize: whether to maximize the objective instead of minimizing it.
        distributed: `Replicas(...)`, settings of distributed training. By default, the global minibatch of all
            processes is one sample, and the gradients must be averaged over all processes, as by
            DistributedDataParallel.

    Raises:
        TypeError: if an argument has the wrong type, or a parameter is not supported.
        ValueError: if a setting is outside its range, or parameters share memory.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> opt = VSGD(model.parameters())
        >>> loss = opt.minimize(lambda: model(torch.ones(4, 3)).square().mean())
    """

    turns: Turns
    """When this optimizer has taken steps, among all in the process."""
    _constructing = False
    _blocks: Blocks
    _reports: PendingReports
    _lr_watch: LearningRateWatch
    _noise: Noise
    _in_use: bool
    """Whether a step is running."""
    _is_damaged: bool
    """Whether an update has begun and has not ended. After an error in it this stays so."""
    last_loss: Tensor | None
    """The loss that the last `step` returned, for wrappers whose `step` returns None. None before the first step."""
    step_noise: StepNoise | None
    """Noise of the last step that was taken, if it had several samples."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        weight_decay: float = 0.0,
        *,
        steps_per_epoch: float | None = None,
        algorithm: Config = NETWORKS,
        per_sample: nn.Module | Rows | None = None,
        compact: bool = False,
        maximize: bool = False,
        distributed: Replicas | None = None,
        **deprecated: Any,
    ):
        if isinstance(params, nn.Module):
            raise TypeError(
                "VSGD takes parameters: VSGD(model.parameters()); for every row of the minibatch as a sample, "
                "VSGD(model.parameters(), per_sample=model)"
            )
        check_flag("compact", compact)
        rows, self._distributed = check_sampling(per_sample, distributed, deprecated)
        self._rows = None if rows is None else RowSettings(Recorder(rows.model), rows.reduction, rows.reweight)
        self._compact = compact
        self._reset()
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "steps_per_epoch": steps_per_epoch,
            "algorithm": algorithm,
            "maximize": maximize,
            "steps": 0,
            "unprobed": 0,
            "skipped": 0,
            "skipped_in_a_row": 0,
            "samples": 1.0,
            "gradient_flops": 0.0,
            "averaging": [NETWORKS.min_window, 0.0, 0.0],  # replaced in `add_param_group`
            "progress": [0.0, 0.0, 1.0, 0.0],
        }
        self._constructing = True  # all groups are checked at once: one by one would take quadratic time
        super().__init__(params, defaults)
        self._constructing = False
        check_parameters(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        require(group["algorithm"], Networks, Paper)
        if "averaging" not in param_group:
            group["averaging"] = [strategy_of(group["algorithm"]).first_window(group["algorithm"]), 0.0, 0.0]
        check_settings(group)
        self._lr_watch.see_new_group(group["lr"])
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
        """Evaluate the closure and update the parameters.

        An interrupted step either is complete or has no effect. While the closure runs, signal handlers, such as that
        of Ctrl-C, run immediately. In the other parts of a step, they run when the step is complete. If the update
        itself fails, for example for lack of memory, the step is applied in part. The next step then raises an error.
        Reload state and parameters from a checkpoint in this case.

        A step with a non-finite loss or gradient changes nothing and is counted in `info().skipped`.

        Args:
            closure: a function that clears the gradients, computes the loss, calls backward and returns the loss. A
                list contains one closure per micro-batch. Each micro-batch is then a sample, and the step is taken
                along their mean gradient.
            scaler: the `torch.amp.GradScaler` with which the closure scales its loss before it calls backward. The
                optimizer unscales the gradients. Call `scaler.update()` after the step as usual.

        Returns:
            The loss at the iterate before the step; with micro-batches or several processes, the mean loss.

        Raises:
            TypeError: if there is no closure.
            FloatingPointError: if the loss or gradient was not finite in ten steps in a row.
        """
        with DeferredSignals(), torch.no_grad():
            with self._transaction(check_closures(closure), scaler) as run:
                run.evaluate(self._companions)
                run.check_closures()
                sampling = self._sampling(run)
                updates = self._collect(run, sampling)
                second = None
                if self._probe_is_due(run, updates):
                    updates = self._probe(updates)
                    second = run.evaluate_at_probe()
                updates = self._complete(run, updates, sampling, second)
                self._reports.update_groups(self.param_groups, self._blocks)
                self._update_batchnorm(run)
                self._apply(run, updates)
            return self.last_loss

    @interruptible
    def minimize(self, loss: Closure | Sequence[Closure], *, scaler: Any = None) -> Tensor:
        """Take a step with a function that only returns the loss.

            loss = opt.minimize(lambda: F.cross_entropy(model(x), y))

        `minimize` clears the gradients and calls backward itself.

        Args:
            loss: a function that returns the loss, or a list of functions, one per micro-batch.
            scaler: a `torch.amp.GradScaler`. `minimize` scales the loss and unscales the gradients. Call
                `scaler.update()` after the step as usual.

        Returns:
            The loss at the iterate before the step; with micro-batches or several processes, the mean loss.

        Raises:
            TypeError: if `loss` is not a function, or does not return a tensor.
            FloatingPointError: if the loss or gradient was not finite in ten steps in a row.
        """

        @interruptible
        def closure(compute: Closure) -> Any:
            value = compute()
            check_loss(value)
            (value if scaler is None else scaler.scale(value)).backward()
            return value

        mean: Tensor = self.step([partial(closure, each) for each in check_closures(loss)], scaler=scaler)
        return mean

    @contextmanager
    def _transaction(self, closures: list[Closure], scaler: Any) -> Iterator[Run]:
        """Let the parameters hold the iterates within. Undo everything if an exception ends the block.

        A step with numbers that are not finite is skipped: its exception ends here.
        """
        self._check_undamaged()
        if self._in_use:
            raise RuntimeError(IN_USE)
        self._in_use = True
        try:
            run = self._start(closures, scaler)
            states, was_open = dict(self.state), self._blocks.are_open
            flops = [group["gradient_flops"] for group in self.param_groups]
            taken = False
            try:
                if not was_open:
                    self._open()
                with run.companions:
                    yield run
                self._blocks.close()
                taken, self._is_damaged = True, False
            except NotFinite:
                self._restore(states, flops)
                run.undo()
                self._left.remember(run.parameters)
                self._skip(run.first[0].loss)
            except BaseException as error:
                if not taken:
                    self._restore(states, flops)
                    run.rewind()
                if self._is_damaged:
                    raise RuntimeError(DAMAGED.format(cause=f" ({type(error).__name__}: {error})")) from error
                raise
            finally:
                if was_open:
                    self._open()
            self._left.remember(run.parameters)
            self.turns = next_turn(self.turns)
            self.last_loss = run.loss
        finally:
            self._in_use = False

    def _start(self, closures: list[Closure], scaler: Any) -> Run:
        """Check that a step can be taken, and return its evaluations. Nothing has been evaluated yet."""
        parameters = self._parameters()
        if len(self.state) < len(parameters):
            check_initialized(parameters)
        others = trained_in_turn(self)
        if is_last_to_step(self, others):  # another one may have left gradients here, as networks do that compete
            self._left.check(self.state)
        check_unshared(self, others)
        if self._rows is not None and len(closures) > 1:
            raise TypeError("with per_sample every row is a sample; give one closure, or leave per_sample out")
        self._update_blocks()
        processes = self._connect_processes(len(closures))
        return Run(self, closures, scaler, self._rows and self._rows.recorder, processes, others, self._known_parts)

    def _restore(self, states: dict[Tensor, ParamState], flops: list[float]) -> None:
        """Restore parameters and state."""
        self._blocks.close()
        if any(self.state.get(p) is not state for p, state in states.items()):
            self._blocks.clear()  # one became a table
        self.state.clear()
        self.state.update(states)
        for group, before in zip(self.param_groups, flops, strict=True):
            group["gradient_flops"] = before

    def _check_undamaged(self) -> None:
        if self._is_damaged:
            raise RuntimeError(DAMAGED.format(cause=""))

    def _skip(self, loss: Tensor) -> None:
        """Count a skipped step; too many in a row are an error."""
        for group in self.param_groups:
            group["skipped"] += 1
            group["skipped_in_a_row"] += 1
        if self.param_groups[0]["skipped_in_a_row"] >= PATIENCE:
            raise FloatingPointError(
                f"the loss or its gradient was infinite, NaN or too large to be squared in {PATIENCE} steps in a row "
                f"(loss {float(loss):g}); nothing has been changed in them. Look at the data, or at the last layers."
            )

    def _sampling(self, run: Run) -> Sampling:
        """Return what the samples of this step are."""
        first = run.first
        if self._rows is not None:
            signs = {p: -1 if group["maximize"] else 1 for group in self.param_groups for p in group["params"]}
            tables = {p for p in first[0].grads if not self.state.get(p) or is_table(self.state[p])}
            return RowSamples(first, self._rows, run.scale, signs, tables, run.processes)
        if len(first) > 1 or run.processes.are_samples:
            return MicroBatches(first, run.processes)
        return Minibatch(first)

    def _collect(self, run: Run, sampling: Sampling) -> list[Update]:
        """Return the updates of all blocks from the first gradients; new parameters get their state."""
        grads = run.first[0].grads
        for evaluation in run.first[1:]:
            grads = {**grads, **evaluation.grads}
        if self._blocks.create_states(grads, sampling, self.param_groups, self.state):
            self._blocks.measure_scales(run.distance_to_zero_loss())
            self._blocks.open()
        return self._blocks.collect(sampling)

    def _probe_is_due(self, run: Run, updates: list[Update]) -> bool:
        """Return whether any process needs a second gradient."""
        is_due = probe_is_due(updates)
        if is_due and run.processes.size == 1:
            return True  # a single process need not wait for the numbers
        return self._check_numbers(run, updates, [], is_due)

    def _probe(self, updates: list[Update]) -> list[Update]:
        """Let the parameters hold the probed iterates. Return the updates with the offsets."""
        indices = {p: k for k, p in enumerate(self._parameters())}
        return [update.block.probe(update, indices) for update in updates]

    def _complete(
        self, run: Run, updates: list[Update], sampling: Sampling, second: list[Evaluation] | None
    ) -> list[Update]:
        """Return the updates with what is known after the second gradients, if there were any."""
        if sampling.finish(second, self._blocks):
            updates = [update.block.complete(update, sampling) for update in updates]
            self._check_numbers(run, updates, second or [])
        run.restore_gradients()
        return updates

    def _check_numbers(
        self, run: Run, updates: list[Update], second: list[Evaluation], probe_is_planned: bool = False
    ) -> bool:
        """Return whether any process wants to probe. The losses of the run become the mean over all processes.

        This synchronizes with the device. A step without `per_sample` and second gradient does so only here.

        Args:
            run: the evaluations.
            updates: of all blocks.
            second: the evaluations at the probed iterates, if there were any.
            probe_is_planned: whether a probe is due even if no gradient is long.

        Raises:
            NotFinite: a number is not usable, in any process.
        """
        losses = [evaluation.loss for evaluation in (*run.first, *second)]
        usable, long, pending = check_numbers(updates, losses, self._reports.numbers())
        self._reports.set_numbers(pending)
        probing = probe_is_planned or (long and probe_is_due(updates, long))
        usable, probing = reduce_checks(run.processes, run.first, usable, probing)
        if not usable:
            run.give_up()
        return probing

    def _update_batchnorm(self, run: Run) -> None:
        groups = [group for other in (*run.others, self) for group in other.param_groups]
        savings = [replay.saved for replay in run.replays]
        average_statistics(savings, groups, self.param_groups[0], several_processes=run.processes.size > 1)

    def _apply(self, run: Run, updates: list[Update]) -> None:
        """Take the step."""
        self._lr_watch.see_step(self.param_groups)
        run.unscale()
        objective = self._objective(run)
        self._is_damaged = True  # until the step is complete
        reports = [(update.block.group, update.block.apply(update)) for update in updates]
        self._reports.put(reports, objective)
        for _, report in reports:
            self._outliers.update(report.outliers)
        self.step_noise = noise_of(updates)
        if self.step_noise is not None:
            self._noise = observe(self._noise, self.step_noise.variance, self.step_noise.signal)
        probed = any(update.delta is not None for update in updates)
        if probed:
            self._blocks.measure_scales()
        for group in self.param_groups:
            group["steps"] += 1
            group["unprobed"] = 0 if probed else group["unprobed"] + 1
            group["skipped_in_a_row"] = 0

    def _objective(self, run: Run) -> Tensor:
        """Return the loss in the unit of the gradients: a mean over rows, if these are the samples."""
        if self._rows is None or self._rows.reduction == "mean":
            return run.loss
        return run.loss / run.processes.mean("number of rows", run.first[0].recording.count)

    # --- between steps --------------------------------------------------------------------------------------------

    def iterates(self) -> Iterates:
        """Let the parameters hold the newest iterates instead of their average, in a `with` block or a function.

        Use it if the network generates the data that it is trained on, for example the episodes of a policy:

            @opt.iterates()
            def rollout(): ...

        Also use it to copy a network. It is not needed in closures: if a closure uses a network that another `VSGD`
        trains, that network holds its newest iterate while the closure runs. Blocks may be nested, and may contain
        steps. Changes to the parameters inside a block are lost.

        Returns:
            A context manager that is also a decorator.
        """
        return Iterates(self)

    def info(self) -> Diagnosis:
        """Return the learning rates, EMA horizon and noise of every tensor, the useful batch size, and bytes of state.

        Returns:
            A `Diagnosis`. `print` shows it as a table.
        """
        unit = "batches of a process" if self._distributed.as_samples else "micro-batches"
        unit = unit if self._rows is None else "samples"
        return diagnose(self.param_groups, self.state, self._outliers, self._noise, unit, self._blocks.buffer_bytes())

    def averages_iterates(self) -> bool:
        """Return whether the weights to evaluate are an average of the iterates, in any group."""
        return any(strategy_of(each["algorithm"]).averages_iterates(each["algorithm"]) for each in self.param_groups)

    def processes(self) -> Processes:
        """Return the processes that train this model."""
        return processes_of(self._distributed)

    def parameter_set(self) -> set[Tensor]:
        """Return the parameters of all groups as a set."""
        return set(self._parameters())

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _update_blocks(self) -> None:
        """Let blocks serve all parameters that have state, as these are now."""
        for group in self.param_groups:
            require(group["algorithm"], Networks, Paper)
        self._agreement.add_changes(self._blocks.update_blocks(self.param_groups, self.state))

    def _open(self) -> None:
        """Let the parameters hold the iterates, after adopting weights that the user has set since the last step."""
        if not self._blocks.are_open:
            self._agreement.add_changes(self._blocks.adopt_changes())
            self._blocks.open()

    def _connect_processes(self, closures: int) -> Processes:
        """Return the other processes, with what must be equal in all of them in this step."""
        processes, rows = self.processes(), self._rows
        if (rows is not None or self._distributed.as_samples) and any(map(is_sharded, self._parameters())):
            raise TypeError(
                "a parameter is sharded, so its gradients come averaged: leave per_sample out, and distributed too"
            )
        if processes.size > 1:
            if rows is not None and rows.reweight:
                raise RuntimeError("reweight compares rows of one process only; leave it out in distributed training")
            self._agreement.add_changes(self._blocks.adopt_changes())
        settings = {
            "as_samples": self._distributed.as_samples,
            "reduce_dtype": self._distributed.reduce_dtype,
            "compact": self._compact,
            "per_sample": rows is not None,
            "reduction": rows and rows.reduction,
            "the number of micro-batches": closures,
        }
        return self._agreement.begin(processes, settings, self.param_groups, self.state)

    # --- state ----------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Reset everything that is not saved."""
        self._in_use = False
        self._is_damaged = False
        self._agreement = Agreement()
        self._blocks = Blocks(self._compact)
        self._lr_watch = LearningRateWatch()
        self._reports = PendingReports()
        self._left = LeftGradients()
        self._known_parts: KnownParts = {}
        self._companions: WeakSet[VSGD] = WeakSet()
        self._outliers: dict[int, Any] = {}
        self._noise = Noise()
        self.step_noise = None
        self.last_loss = None
        self.turns = Turns()
        register(self)

    def __getstate__(self) -> dict[str, Any]:
        self._update_groups()
        return {
            **super().__getstate__(),
            "_rows": self._rows,
            "_compact": self._compact,
            "_distributed": self._distributed._replace(process_group=None),  # groups cannot be copied
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def _update_groups(self) -> None:
        """Let window and horizon follow the last step, before the state is saved."""
        self._check_undamaged()
        with DeferredSignals():
            self._reports.update_groups(self.param_groups, self._blocks)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary that contains only numbers, text and tensors.

        Sharded parameters have a state even before the first step, so that `torch.distributed.checkpoint` can load
        into it.

        Returns:
            The state of all parameters and groups.
        """
        self._update_groups()
        saved = super().state_dict()
        saved["format"] = FORMAT
        for own, group in zip(self.param_groups, saved["param_groups"], strict=True):
            for p, index in zip(own["params"], group["params"], strict=True):
                if is_sharded(p) and index not in saved["state"]:
                    saved["state"][index] = blank_state(p, own, self._compact)
            group["algorithm"] = {"name": type(group["algorithm"]).__name__, **group["algorithm"]._asdict()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Training continues bit-for-bit as without the interruption.

        Args:
            state_dict: the state.

        Raises:
            ValueError: if the state belongs to another model or version, or is damaged. The optimizer is unchanged.
        """
        checkpoint = checked(state_dict, self.param_groups)
        with DeferredSignals():
            super().load_state_dict(state_dict)
            for group, algorithm in zip(self.param_groups, checkpoint.algorithms, strict=True):
                group["algorithm"] = algorithm
            self.state.clear()
            self.state.update(checkpoint.states)
            self._reset()
