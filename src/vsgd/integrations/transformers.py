"""Hugging Face Trainer: `VSGDTrainer` instead of `Trainer`.

    from vsgd.integrations.transformers import VSGDTrainer

    trainer = VSGDTrainer(model=model, args=args, train_dataset=data)
    trainer.train()
    print(trainer.vsgd.info())

Trainer calls `step()` without a closure, after it has computed the gradients of all micro-batches. Here micro-batches
are collected, and the last of them takes the step: every call of `training_step` is a closure.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from vsgd.errors import needs_extra

with needs_extra("vsgd.integrations.transformers", "integrations"):
    import torch
    from accelerate.optimizer import AcceleratedOptimizer
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from transformers import SchedulerType, Trainer

from vsgd.torch import VSGD, is_probing


class StepTaken(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer as Trainer sees it. Its step has been taken when Trainer asks for it."""

    def step(self, closure: Any = None) -> None:
        pass


def unwrapped(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


class VSGDTrainerMixin:
    """In front of a Trainer class, lets it train with `VSGD`: `class MyTrainer(VSGDTrainerMixin, SFTTrainer): ...`

    Options of `VSGD` are given as `optimizer_cls_and_kwargs=(VSGD, {"compact": True})`, or an optimizer as
    `optimizers=(VSGD(...), None)`. `learning_rate` is not used. The scheduler is constant, after a warm-up if one is
    asked for, unless `lr_scheduler_type` names one other than Trainer's default, "linear".

    Each of the `gradient_accumulation_steps` micro-batches is a sample; `max_grad_norm` clips the gradient of each. The
    loss and the norm of the gradient that are logged are those of the first evaluations. A `compute_loss` that counts
    or logs should ask `vsgd.torch.is_probing()`.
    """

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

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

    @property
    def vsgd(self) -> VSGD:
        """The optimizer itself, for `trainer.vsgd.info()`."""
        optimizer = unwrapped(self.optimizer)
        if not isinstance(optimizer, VSGD):
            raise TypeError(f"VSGDTrainer trains with VSGD; its optimizer is {type(optimizer).__name__}")
        return optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        self._vsgd_micro_batches: list[Any] = []
        self.optimizer_cls_and_kwargs = self.optimizer_cls_and_kwargs or (VSGD, {})
        if self.optimizer is None and self.args.weight_decay == 0:  # one group instead of Trainer's two
            kind, options = self.optimizer_cls_and_kwargs
            named = (self.model if model is None else model).named_parameters()
            self.optimizer = kind([(name, p) for name, p in named if p.requires_grad], **options)
        super().create_optimizer(model)  # type: ignore[misc]
        if self.optimizer is self.vsgd:
            self.optimizer = StepTaken(self.optimizer, device_placement=False)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        asked = self.args.lr_scheduler_type
        if asked == SchedulerType.LINEAR:
            self.args.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
        try:
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        finally:
            self.args.lr_scheduler_type = asked

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep a micro-batch, or take the step if it is the last. The losses of all are returned with the last."""
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
        """The loss of a micro-batch and its gradient. Adds the latter to `grads` in a first evaluation."""
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
    """`transformers.Trainer` with `VSGD`, which has no learning rate to choose. See `VSGDTrainerMixin`."""
