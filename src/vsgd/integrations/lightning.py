"""Lightning: a mixin for `LightningModule`.

    from lightning.pytorch import LightningModule, Trainer
    from vsgd.integrations.lightning import VSGDMixin
    from vsgd.torch import VSGD

    class Digits(VSGDMixin, LightningModule):
        def training_step(self, batch, batch_idx): ...

        def configure_optimizers(self):
            return VSGD(self.parameters())

Lightning passes a closure to the optimizer. The mixin hides second evaluations of a batch from `self.log`, metrics and
callbacks. With `accumulate_grad_batches`, each batch is a micro-batch. If data are repeated, the mixin sets
`steps_per_epoch` of the optimizer, so that it estimates weight decay.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from vsgd.errors import needs_extra

with needs_extra("vsgd.integrations.lightning", "integrations"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from torch import Tensor
    from torchmetrics import Metric, MetricCollection

from vsgd.integrations.bookkeeping import attributes_restored
from vsgd.torch import VSGD, is_probing
from vsgd.torch.devices import RandomState, random_state, set_random_state
from vsgd.torch.replay import Closure, SavedBuffer, Saving, restore_buffers, saving_state


class NoBackward(Exception):
    """Lightning evaluated a batch without a backward pass, so no step can use it.

    Attributes:
        buffers: buffers of the model with their values after the evaluation.
    """

    def __init__(self, buffers: list[SavedBuffer]):
        super().__init__("Lightning did not call backward")
        self.buffers = buffers


class MicroBatches(Callback):
    """Collects batches whose gradients Lightning computes before the step, at the iterates, as micro-batches.

    Lightning also has passes without backward, such as the update of BatchNorm statistics in
    `StochasticWeightAveraging`. These add no micro-batch, and their changes of buffers remain.
    """

    def __init__(self) -> None:
        self._closures: list[Closure] = []
        self._iterates = ExitStack()
        self._random: RandomState = {}
        self._saved = Saving()
        self._stepped = False
        self.had_backward = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        set_steps_per_epoch(trainer, module)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._stepped = False
        self.had_backward = False
        if (optimizer := accumulating(trainer)) is not None:
            self._iterates.enter_context(optimizer.iterates())
            self._random = random_state(module.parameters())
            self._saved = self._iterates.enter_context(saving_state())

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._iterates.close()
        optimizer = accumulating(trainer)
        if self._stepped or optimizer is None or (outputs and not self.had_backward):
            return
        if optimizer.averages_iterates():
            # running statistics are those of the averaged weights, but this batch was evaluated at the iterates
            restore_buffers(each for each in self._saved.buffers if each.is_statistic)
        if outputs:
            self._closures.append(self._micro_batch(trainer, module, outputs["loss"], batch, batch_idx))

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        self.had_backward = True

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._iterates.close()

    def take(self) -> list[Closure]:
        """Return and forget the micro-batches before the last one, which the optimizer evaluates itself."""
        self._stepped = True
        self._iterates.close()
        closures, self._closures = self._closures, []
        return closures

    def _micro_batch(
        self, trainer: Trainer, module: LightningModule, loss: Tensor, batch: Any, batch_idx: int
    ) -> Closure:
        """Return a closure for a batch that Lightning has evaluated, with gradients averaged over all processes."""
        count, random, optimizer = trainer.accumulate_grad_batches, self._random, trainer.optimizers[0]
        grads = {p: p.grad * count for p in module.parameters() if p.grad is not None}
        grads = {p: trainer.strategy.reduce(grad, reduce_op="mean") for p, grad in grads.items()}
        optimizer.zero_grad()
        arguments = (batch, batch_idx)[: len(inspect.signature(module.training_step).parameters)]

        def closure() -> Any:
            if not is_probing():
                for parameter, grad in grads.items():
                    parameter.grad = grad
                value: Any = loss * count
            else:
                set_random_state(random)
                with leaving_no_trace(module):
                    output = trainer.strategy.training_step(*arguments)
                value = output["loss"] if isinstance(output, Mapping) else output
                trainer.strategy.backward(value, optimizer)
            clip(trainer, module)
            return value

        return closure


class VSGDMixin:
    """A mixin for `LightningModule` that supports `VSGD` in automatic optimization.

        class Digits(VSGDMixin, LightningModule): ...

    In about a tenth of the batches, `training_step` is called a second time, at other parameters. The mixin ignores
    what this call logs, and restores metrics, counters, lists and dictionaries that are attributes of the module.
    `outputs["loss"]` is the first loss. Code that counts elsewhere should check `vsgd.torch.is_probing()`.

    With `accumulate_grad_batches`, each batch is a sample, and `gradient_clip_val` clips the gradient of each batch. A
    step ignores batches for which `training_step` returns None. Passes without backward, as in
    `StochasticWeightAveraging`, take no step. Other optimizers than `VSGD` are not affected.

    When training starts, the mixin sets `steps_per_epoch` of the `VSGD` optimizer, unless you have set it or a
    `weight_decay`. It stays None with a single epoch, with data without a length, with `limit_train_batches`, and in
    manual optimization. `estimates_weight_decay = False` in the module turns the estimate off.
    """

    estimates_weight_decay = True
    """Whether to set `steps_per_epoch`; a module may set it to False."""

    trainer: Any
    parameters: Any
    on_before_optimizer_step: Any

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log in first evaluations only."""
        if not is_probing():
            super().log(*args, **kwargs)  # type: ignore[misc]

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks of the module, and one that collects micro-batches."""
        configured = super().configure_callbacks()  # type: ignore[misc]
        self._vsgd_micro_batches = MicroBatches()
        return [*(configured if isinstance(configured, (list, tuple)) else [configured]), self._vsgd_micro_batches]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: LightningOptimizer, optimizer_closure: Any = None
    ) -> None:
        """Take a step with the micro-batches so far. Other optimizers step as usual."""
        vsgd = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not isinstance(vsgd, VSGD):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)  # type: ignore[misc]
            return
        trainer = self.trainer
        scaler = scaler_of(trainer)

        def closure() -> Any:
            if is_probing():
                with leaving_no_trace(self):
                    loss = optimizer_closure.closure().loss  # unlike a call, leaves the outputs alone
            else:
                with saving_state() as saved:
                    loss = optimizer_closure()
                if loss is None:
                    raise NoBackward([])
                if not self._vsgd_micro_batches.had_backward:
                    raise NoBackward(current_buffers(saved))
            multiply_gradients(self, trainer.accumulate_grad_batches)  # Lightning divides the loss by it
            if not is_probing():
                for each in trainer.callbacks:
                    each.on_before_optimizer_step(trainer, self, vsgd)
                self.on_before_optimizer_step(vsgd)
            clip(trainer, self)
            return loss * trainer.accumulate_grad_batches

        earlier = self._vsgd_micro_batches.take()
        try:
            vsgd.step([*earlier, closure], scaler=scaler)
        except NoBackward as evaluated:  # the step has restored everything
            restore_buffers(evaluated.buffers)
            if not earlier:
                return
            vsgd.step(earlier, scaler=scaler)
        if scaler is not None:
            scaler.update()


def accumulating(trainer: Any) -> VSGD | None:
    """Return the `VSGD` optimizer if gradients are accumulated over batches, else None."""
    optimizer = trainer.optimizers[0] if trainer.accumulate_grad_batches > 1 else None
    return optimizer if isinstance(optimizer, VSGD) else None


def set_steps_per_epoch(trainer: Any, module: Any) -> None:
    """Set `steps_per_epoch` of `VSGD` optimizers that have neither that nor a weight decay."""
    if not (module.estimates_weight_decay and module.automatic_optimization):
        return
    for optimizer in trainer.optimizers:
        groups = optimizer.param_groups if isinstance(optimizer, VSGD) else []
        if not any(group["steps_per_epoch"] is not None or group["weight_decay"] > 0 for group in groups):
            for group in groups:
                group["steps_per_epoch"] = steps_per_epoch_of(trainer)


def steps_per_epoch_of(trainer: Any) -> float | None:
    """Return the number of steps in which all training data are seen once; None if it is unknown or none are repeated.

    With `limit_train_batches`, an epoch is a part of the data, and another one each time if they are shuffled.
    """
    steps = max(1.0, trainer.num_training_batches / trainer.accumulate_grad_batches)
    is_whole = isinstance(trainer.limit_train_batches, float) and trainer.limit_train_batches == 1
    is_repeated = trainer.max_epochs != 1 and not 0 <= trainer.max_steps <= steps
    return steps if math.isfinite(steps) and is_whole and is_repeated else None


def multiply_gradients(module: Any, factor: float) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def scaler_of(trainer: Any) -> Any:
    """Return the gradient scaler of precision="16-mixed"; None with other precisions."""
    return getattr(trainer.precision_plugin, "scaler", None)


def clip(trainer: Any, module: Any) -> None:
    """Clip the gradients by the settings of the trainer."""
    limit, algorithm, scaler = trainer.gradient_clip_val, trainer.gradient_clip_algorithm, scaler_of(trainer)
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    multiply_gradients(module, 1 / scale)
    module.configure_gradient_clipping(trainer.optimizers[0], limit, algorithm)
    multiply_gradients(module, scale)


def current_buffers(saved: Saving) -> list[SavedBuffer]:
    """Return the buffers that an evaluation has saved, with their current values."""
    buffers = [(each.module, each.name, getattr(each.module, each.name)) for each in saved.buffers]
    return [SavedBuffer(module, name, buffer, buffer.detach().clone()) for module, name, buffer in buffers]


@contextmanager
def leaving_no_trace(module: Any) -> Iterator[None]:
    """Hide a second evaluation from a module: its metrics are replaced by copies, and its attributes restored."""
    found = {name: part for name, part in module.named_modules() if isinstance(part, Metric | MetricCollection)}
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in outermost]
    metrics = [getattr(parent, name) for parent, name in places]
    for (parent, name), metric in zip(places, metrics, strict=True):
        setattr(parent, name, copy.deepcopy(metric))
    try:
        with attributes_restored(module):
            yield
    finally:
        for (parent, name), metric in zip(places, metrics, strict=True):
            setattr(parent, name, metric)
