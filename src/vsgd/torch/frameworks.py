"""Read the call stack: remedies for frameworks that call the optimizer themselves, and the user's line for warnings."""

from __future__ import annotations

import inspect
import sys
import traceback
import warnings

SCALER = (
    "With a GradScaler, scale the loss in the closure, do not call scaler.unscale_, and hand the scaler over:\n\n"
    "    scaler.scale(loss).backward()       # in the closure\n\n"
    "    opt.step(closure, scaler=scaler)    # instead of scaler.step(opt)\n"
    "    scaler.update()"
)

REMEDIES = {
    ("transformers",): (
        "Trainer calls step() without one. Use vsgd.integrations.transformers.VSGDTrainer instead, or put "
        "VSGDTrainerMixin in front of a Trainer class of your own."
    ),
    ("lightning", "pytorch_lightning"): (
        "In Lightning put vsgd.integrations.lightning.VSGDMixin in front of LightningModule; in manual optimization, "
        "pass a closure that returns the loss: self.optimizers().step(closure)."
    ),
    ("accelerate",): "With Accelerate call accelerator.backward(loss) in the closure: optimizer.step(closure).",
    ("torch.amp.grad_scaler",): SCALER,
}
"""Remedies by the modules on the call stack, outer ones first: Trainer calls Accelerate, and Lightning a scaler."""

ACCUMULATES = (
    "Accelerate accumulates over {count} batches and calls step() for the last of them only, so the closures of the "
    "others would never run. Leave gradient_accumulation_steps at 1 and pass the micro-batches as a list: "
    "optimizer.step([closure, closure, ...])."
)


INTERNAL = ("vsgd", "torch", "contextlib")
"""Packages that are skipped to find the user's line."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: the innermost one that is neither in this package nor in torch."""
    frames = traceback.walk_stack(inspect.currentframe())
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames]
    level = next((k for k, package in enumerate(packages, start=1) if package not in INTERNAL), len(packages))
    warnings.warn(message, category, stacklevel=level)


def is_calling(*names: str) -> bool:
    """Return whether one of these modules, or a part of it, is on the call stack."""
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None)}
    return any(f"{module}.".startswith(f"{name}.") for module in modules for name in names)


def remedy() -> str:
    """Return what to do in the framework on the call stack, or an empty text."""
    for names, text in REMEDIES.items():
        if is_calling(*names):
            return f"\n\n{text}"
    return ""


def check_accumulation(count: int) -> None:
    """Refuse a single closure while `Accelerator.accumulate` skips steps: the closures of these would never run."""
    state = sys.modules.get("accelerate.state")
    steps = 1 if state is None else state.GradientState().num_steps
    if steps > 1 and count == 1 and is_calling("accelerate"):
        raise RuntimeError(ACCUMULATES.format(count=steps))
