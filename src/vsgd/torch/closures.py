"""Check closures and their results, and find the user's line and the calling framework on the call stack."""

from __future__ import annotations

import inspect
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vsgd.torch.evaluation import Evaluation
    from vsgd.torch.replay import Closure

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

FORWARD_OUTSIDE = (
    "the closure must run the forward pass itself: it is called a second time with probed parameters, and a loss that "
    "was computed before the step does not depend on them. Move `loss = ...` into the closure; no retain_graph."
)

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
"""Advice by the modules on the call stack. The first match wins: Trainer calls Accelerate, and Lightning a scaler."""

ACCUMULATES = (
    "Accelerate accumulates over {count} batches and calls step() for the last of them only, so the closures of the "
    "others would never run. Leave gradient_accumulation_steps at 1 and pass the micro-batches as a list: "
    "optimizer.step([closure, closure, ...])."
)


# --- the call stack ---------------------------------------------------------------------------------------------------

INTERNAL = ("vsgd", "torch", "contextlib")
"""Packages that are skipped in the search for the user's line."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the user's line, the innermost one that is neither in this package nor in torch."""
    frames = traceback.walk_stack(inspect.currentframe())
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames]
    level = next((k for k, package in enumerate(packages, start=1) if package not in INTERNAL), len(packages))
    warnings.warn(message, category, stacklevel=level)


def is_calling(*names: str) -> bool:
    """Return whether one of these modules, or a submodule, is on the call stack."""
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None)}
    return any(f"{module}.".startswith(f"{name}.") for module in modules for name in names)


def remedy() -> str:
    """Return advice for the framework on the call stack, or an empty text."""
    for names, text in REMEDIES.items():
        if is_calling(*names):
            return f"\n\n{text}"
    return ""


# --- checks -----------------------------------------------------------------------------------------------------------


def check_closures(closure: Closure | Sequence[Closure] | None) -> list[Closure]:
    """Return one closure or several as a list. Raise TypeError, with an example, for anything else."""
    closures = list(closure) if isinstance(closure, Sequence) else [closure]
    if not closures or not all(callable(each) for each in closures):
        raise TypeError(NO_CLOSURE + remedy())
    check_accumulation(len(closures))
    return closures  # type: ignore[return-value]


def check_loss(loss: Any) -> None:
    """Raise TypeError or ValueError unless the result of a closure is a tensor of one element."""
    if not isinstance(loss, Tensor):
        text = f"the closure returned {type(loss).__name__}; it must end with `return loss`, a tensor"
        raise TypeError(text + (remedy() if loss is None else ""))
    if loss.numel() != 1:
        raise ValueError(f"the closure returned a loss of shape {tuple(loss.shape)}; take its mean or sum")


def check_accumulation(count: int) -> None:
    """Raise RuntimeError for a single closure in `Accelerator.accumulate`, which skips the steps of other batches."""
    state = sys.modules.get("accelerate.state")
    steps = 1 if state is None else state.GradientState().num_steps
    if steps > 1 and count == 1 and is_calling("accelerate"):
        raise RuntimeError(ACCUMULATES.format(count=steps))


class NotRepeatable(RuntimeError):
    """A closure did not compute the same loss or gradient twice."""


def check_repeatable(first: Evaluation, again: Evaluation) -> None:
    """Raise NotRepeatable unless two evaluations at the same weights agree, up to the rounding of parallel sums."""
    loss, other = float(first.loss), float(again.loss)
    if not abs(loss - other) <= 1e-3 * abs(loss) + 1e-12:
        raise NotRepeatable(NOT_REPEATABLE.format(what="loss", values=f"{loss:g} and {other:g}"))
    if first.grads.keys() != again.grads.keys():
        raise NotRepeatable(NOT_REPEATABLE.format(what="gradient", values="other parameters have one"))
    longest = max(float(grad.norm()) for grad in first.grads.values())
    for parameter, here in first.grads.items():
        off, size = float(difference(here, again.grads[parameter]).norm()), float(here.norm())
        tolerance = 0.1 if parameter.dtype in (torch.float16, torch.bfloat16) else 0.01
        # a gradient that is only rounding, as that of a bias before BatchNorm, has a relative difference of about 1
        if not off <= tolerance * size + 1e-6 * longest + 1e-12:
            raise NotRepeatable(NOT_REPEATABLE.format(what="gradient", values=f"{off:.2g} off in {size:.2g}"))


def difference(here: Tensor, there: Tensor) -> Tensor:
    """Return the difference of two gradients. It is sparse if both are, since a table may be large."""
    return here - there if here.is_sparse == there.is_sparse else here.to_dense() - there.to_dense()


def check_probe_was_seen(first: Evaluation, probed: Evaluation) -> None:
    """Raise RuntimeError if neither loss nor gradient has changed: the closure did not use the probed parameters."""

    def values(evaluation: Evaluation) -> list[Tensor]:
        return [grad.coalesce().values() if grad.is_sparse else grad for grad in evaluation.grads.values()]

    if any(p.dtype in (torch.float16, torch.bfloat16) for p in first.grads):
        return  # a small probe may be rounded to zero
    same = first.grads.keys() == probed.grads.keys() and torch.equal(first.loss, probed.loss)
    if same and all(map(torch.equal, values(first), values(probed))) and any(map(torch.any, values(first))):
        raise RuntimeError(FORWARD_OUTSIDE)


class LeftGradients:
    """Detects gradients that were accumulated after a step, which the next step would discard."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[ReferenceType[Tensor], int]] = {}
        """Gradient and its version, by the `id` of the parameter."""

    def remember(self, parameters: Iterable[Tensor]) -> None:
        """Store references to the current gradients, and their versions."""
        self._left = {id(p): (ref(p.grad), p.grad._version) for p in parameters if p.grad is not None}

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Raise RuntimeError if one of the parameters has another gradient."""
        for parameter in parameters:
            grad: Tensor | None = getattr(parameter, "grad", None)  # a key that a user has added may be anything
            if grad is None:
                continue
            left, version = self._left.get(id(parameter), (None, -1))
            is_left = left is not None and left() is grad and version == grad._version
            if not is_left and bool(grad.norm() != 0):
                raise RuntimeError(OTHER_GRADIENTS + remedy())
