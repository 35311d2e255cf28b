"""Hugging Face Trainer: `VSGDTrainer` instead of `Trainer`.

    from vsgd.integrations.transformers import VSGDTrainer

    trainer = VSGDTrainer(model=model, args=args, train_dataset=data)
    trainer.train()
    print(trainer.vsgd.info())

Trainer calls `step()` without a closure, after it has computed the gradients of all micro-batches. `VSGDTrainer`
collects the micro-batches instead. `training_step` of the last one takes the step, with a closure per micro-batch.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import Any

from vsgd.errors import needs_extra

with needs_extra("vsgd.integrations.transformers", "integrations"):
    import torch
    from accelerate.optimizer import AcceleratedOptimizer
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from transformers import SchedulerType, Trainer
    from transformers.trainer_utils import has_length

from vsgd.integrations.bookkeeping import attributes_restored
from vsgd.torch import VSGD, is_probing

IGNORED = ("optim", "optim_args", "optim_target_modules", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Fields of `TrainingArguments` that configure other optimizers."""


class StepTaken(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that Trainer holds. Its `step` does nothing, since `training_step` has taken the step."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def unwrapped(optimizer: Any) -> Any:
    """Return an optimizer without the wrappers of Accelerate."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def ignored_arguments(args: Any) -> list[str]:
    """Return the optimizer settings in `args` that differ from their defaults, as `name=value`."""
    defaults = {field.name: field.default for field in dataclasses.fields(args) if field.name in IGNORED}
    given = {name: getattr(args, name) for name, default in defaults.items() if getattr(args, name) != default}
    return [f"{name}={(value.value if isinstance(value, Enum) else value)!r}" for name, value in given.items()]


class VSGDTrainerMixin:
    """A mixin for subclasses of Trainer that train with `VSGD`.

        class MyTrainer(VSGDTrainerMixin, SFTTrainer): ...

    Pass options of `VSGD` as `optimizer_cls_and_kwargs=(VSGD, {"compact": True})`, or an optimizer as
    `optimizers=(VSGD(...), None)`. `learning_rate`, `optim` and the settings of Adam are ignored with a warning.
    `weight_decay` applies to the parameters that Trainer would decay. If it is 0, training takes more than one epoch,
    and the data have a length, the trainer sets `steps_per_epoch`, and `VSGD` estimates weight decay.
    `optimizer_cls_and_kwargs=(VSGD, {"steps_per_epoch": None})` turns the estimate off.

    With Trainer's default `lr_scheduler_type`, "linear", the schedule is constant after `warmup_steps`. Other types are
    applied. The schedule is a factor on the learning rates and is logged as `lr_factor`.

    Each of the `gradient_accumulation_steps` micro-batches is a sample. `max_grad_norm` clips the gradient of each. The
    logged loss and gradient norm are those of the first evaluations. After a second evaluation of `compute_loss`, the
    attributes of the trainer and of its `state` are restored: counters, lists and dictionaries. Code that counts
    elsewhere should check `vsgd.torch.is_probing()`.

    Raises:
        ValueError: with `fp16=True`, DeepSpeed or FSDP, which are not supported.
    """

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    state: Any
    get_decay_parameter_names: Any
    optimizer_cls_and_kwargs: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    _vsgd_steps_per_epoch: int | None = None
    """Steps per epoch of the training that is about to start; None if no data are repeated."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.fp16:
            raise ValueError(
                "VSGDTrainer does not work with fp16=True, where Trainer unscales gradients itself; use bf16=True"
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "VSGDTrainer works on one device and with DistributedDataParallel, not with sharded weights"
            )
        if (ignored := ignored_arguments(self.args)) and self.args.process_index == 0:
            warnings.warn(
                f"ignored in TrainingArguments: {', '.join(ignored)}. VSGDTrainer trains with VSGD, which chooses its "
                "learning rates itself; leave these arguments out",
                stacklevel=2,
            )

    @property
    def vsgd(self) -> VSGD:
        """Return the optimizer without wrappers, for `trainer.vsgd.info()`."""
        optimizer = unwrapped(self.optimizer)
        if not isinstance(optimizer, VSGD):
            raise TypeError(f"VSGDTrainer trains with VSGD; its optimizer is {type(optimizer).__name__}")
        return optimizer

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any, **kwargs: Any) -> Any:
        """Return the values of Trainer, and remember the number of steps per epoch if data are repeated.

        It counts optimizer steps: Trainer divides the number of batches of a process by that of micro-batches.
        """
        values = super().set_initial_training_values(args, dataloader, *more, **kwargs)  # type: ignore[misc]
        epochs, steps_per_epoch = values[:2]
        self._vsgd_steps_per_epoch = steps_per_epoch if has_length(dataloader) and epochs > 1 else None
        return values

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create `VSGD`, or wrap the given optimizer."""
        self._vsgd_micro_batches: list[Any] = []
        if self.optimizer is None:
            kind, options = self.optimizer_cls_and_kwargs or (VSGD, {})
            groups = self._vsgd_groups(self.model if model is None else model)
            if self.args.weight_decay == 0 and "steps_per_epoch" not in options:
                groups = [{**group, "steps_per_epoch": self._vsgd_steps_per_epoch} for group in groups]
            self.optimizer = kind(groups, **options)
        super().create_optimizer(model)  # type: ignore[misc]
        if self.optimizer is self.vsgd:
            self.optimizer = StepTaken(self.optimizer, device_placement=False)
        return self.optimizer

    def _vsgd_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the named parameters: one group, or with `weight_decay` the two groups of Trainer."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if self.args.weight_decay == 0:
            return [{"params": named}]
        decayed = set(self.get_decay_parameter_names(model))
        groups = [
            {"params": [each for each in named if each[0] in decayed], "weight_decay": self.args.weight_decay},
            {"params": [each for each in named if each[0] not in decayed], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Create the scheduler, which is constant after warm-up instead of Trainer's default."""
        configured = self.args.lr_scheduler_type
        if configured == SchedulerType.LINEAR:
            self.args.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
        try:
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        finally:
            self.args.lr_scheduler_type = configured

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the factor of the scheduler as `lr_factor`, since it is not a learning rate."""
        if "learning_rate" in logs:
            logs = {"lr_factor" if name == "learning_rate" else name: value for name, value in logs.items()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collect a micro-batch. If it is the last one, take the step and return the sum of all losses."""
        self._vsgd_micro_batches.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        micro_batches, self._vsgd_micro_batches = self._vsgd_micro_batches, []
        grads: dict[Tensor, Tensor] = {}
        evaluate = partial(self._vsgd_evaluate, model, num_items_in_batch, len(micro_batches), grads)
        loss: Tensor = self.vsgd.step([partial(evaluate, inputs) for inputs in micro_batches])
        for parameter, grad in grads.items():  # Trainer logs the norm of these
            parameter.grad = grad
        return loss

    def _vsgd_evaluate(
        self, model: nn.Module, items: Any, count: int, grads: dict[Tensor, Tensor], inputs: Any
    ) -> Tensor:
        """Compute the loss of a micro-batch and its gradient. In a first evaluation, add the gradient to `grads`."""
        with attributes_restored(self, self.state) if is_probing() else nullcontext():
            loss: Tensor = super().training_step(model, copy.copy(inputs), items)  # type: ignore[misc]
        for parameter in model.parameters():
            if (grad := parameter.grad) is not None:
                if not is_probing():
                    grads[parameter] = grads[parameter] + grad if parameter in grads else grad.clone()
                grad.mul_(count)  # Trainer divides by the number of micro-batches, and VSGD takes their mean
        if self.args.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        return loss * count


class VSGDTrainer(VSGDTrainerMixin, Trainer):
    """`transformers.Trainer` with `VSGD` as its optimizer. See `VSGDTrainerMixin`.

    trainer = VSGDTrainer(model=model, args=args, train_dataset=data)
    trainer.train()
    """
