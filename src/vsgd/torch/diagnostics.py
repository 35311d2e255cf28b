"""Diagnosis of the optimizer: rates, memory and noise of each tensor, and the batch size worth using."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vsgd.algorithms.strategy import ROUNDING, strategy_of, strength_of_decay
from vsgd.core import variance
from vsgd.torch.basis import describe
from vsgd.torch.block import estimates_decay, rates_of
from vsgd.torch.blocks import engine_for, learning_coordinates
from vsgd.torch.coordinates import Coordinates, spread
from vsgd.torch.devices import sum_dtype
from vsgd.torch.distributed import local_of
from vsgd.torch.noise import Noise, is_known, noise_scale
from vsgd.torch.state import ParamState, is_table
from vsgd.torch.update import learning_rates, rule_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vsgd.torch.optimizer import VSGD

QUANTILE_SAMPLE = 1_000_000
"""Quantiles of larger tensors are computed from this many of their coordinates, evenly spread."""


NO_EFFECT = "no effect on the loss: the gradient is rounding"
"""Shown for a bias before BatchNorm, for example. Its rate, which means nothing, is shown as 0."""


class Quantiles(NamedTuple):
    low: float
    """Five in a hundred coordinates are below."""
    median: float
    high: float
    """Five in a hundred are above."""


class TensorInfo(NamedTuple):
    name: str
    coordinates: int
    """Those that have seen enough samples to learn."""
    basis: str
    """What was rotated, and why not all of it."""
    rate: Quantiles
    memory: Quantiles
    signal_to_noise: Quantiles
    """ḡ² / σ² of a single sample."""
    outliers: float
    """The share of coordinates that found the last minibatch unusual."""
    weight_decay: float
    """Estimated strength λ of the penalty ½λ‖θ‖², in the unit of the curvature; 0 if it is not estimated."""
    effective_parameters: float
    """γ = Σ h / (h + λ): the number of coordinates that the data determine."""


class Diagnosis(NamedTuple):
    tensors: list[TensorInfo]
    noise_scale: float
    """tr Σ / |G|²: about the number of samples at which a batch is as much signal as noise.

    From the samples of the last steps; infinite if these cannot tell the signal from zero. If a step is one sample,
    a rough upper estimate, Σσ² / Σḡ².
    """
    samples_per_step: float
    skipped: int
    """Steps left out because something was not finite."""
    sample: str
    """What a sample is, in the plural: "samples" are rows of the minibatch; otherwise micro-batches, for instance."""
    parameters: int
    """Coordinates that have state, those of this process if parameters are sharded."""
    state_bytes: int
    """Memory of the tensors in `opt.state`, which are what a checkpoint holds."""
    buffer_bytes: int
    """Further memory that is kept between steps: averaged weights, and buffers for gradients of many tensors."""

    @property
    def batch_worth_using(self) -> float:
        """Noise scale in present batches: larger ones mostly repeat themselves, smaller ones are mostly noise."""
        return self.noise_scale / self.samples_per_step

    def __str__(self) -> str:
        titles = ("rate: 5 %", "median", "95 %", "memory", "signal/noise", "outliers", "decay λ", "γ", "  coordinates")
        width = max(28, *(len(t.name) + 2 for t in self.tensors)) if self.tensors else 28
        lines = [
            f"{t.name:<{width}}{t.rate.low:>13.2g}{t.rate.median:>13.2g}{t.rate.high:>13.2g}{t.memory.median:>13.1f}"
            f"{t.signal_to_noise.median:>13.2g}{t.outliers:>13.1%}"
            f"{t.weight_decay:>13.2g}{t.effective_parameters:>13.0f}  {t.basis}"
            for t in self.tensors
        ]
        head = f"{'tensor':<{width}}" + "".join(f"{title:>13}" for title in titles)
        if not self.tensors:
            tail = "still starting: no tensor has learned yet"
        elif self.samples_per_step == 1:  # the averages of a single sample cannot show how small the signal is
            tail = "the batch size worth using is known with several samples a step: per_sample, or micro-batches"
        elif math.isinf(self.noise_scale):
            tail = "the gradient is lost in noise: larger batches would help, how much larger cannot be told"
        else:
            batches = self.batch_worth_using
            tail = f"noise scale {self.noise_scale:.3g} {self.sample}, {batches:.3g} times the present batch"
        return "\n".join([head, *lines, f"{tail}; {self.skipped} steps skipped", self._memory_line()])

    def _memory_line(self) -> str:
        sizes = {"state": self.state_bytes, "buffers": self.buffer_bytes}
        parameters = max(1, self.parameters)
        return "; ".join(f"{name} {size:,} bytes, {size / parameters:.1f} a parameter" for name, size in sizes.items())


def diagnose(
    groups: list[dict[str, Any]],
    states: dict[Tensor, dict[str, Tensor]],
    outliers: dict[Tensor, Tensor],
    noise: Noise,
    sample: str,
    buffer_bytes: int,
) -> Diagnosis:
    """Return the diagnosis. All but the noise is read off the state; training computes nothing else for it."""
    tensors: list[TensorInfo] = []
    norms_sq: list[float] = []
    variance_sum, signal_sum = 0.0, 0.0
    for number, group in enumerate(groups):
        config = group["algorithm"]
        uses_basis, scales = strategy_of(config).rotates(config), rates_of(group)
        for index, parameter in enumerate(group["params"]):
            if not states.get(parameter):
                continue
            names = group.get("param_names")
            saved = placed_like(parameter, states[parameter])
            block = learning_coordinates(parameter, saved, group)
            rule, state = rule_of(engine_for(parameter.device), config), block.state(block.seen)
            sigma_sq = variance(state.mean.grad, state.mean.grad_sq)
            strength, curv = decay_strengths(parameter, saved, block, group), state.mean.curv.abs()
            variance_sum += float(sigma_sq.sum())
            signal_sum += float((state.mean.grad**2).sum())
            norms_sq.append(float(state.mean.grad_sq.sum()))
            tensors.append(
                TensorInfo(
                    name=names[index] if names else f"group {number}, parameter {index}",
                    coordinates=len(block.theta),
                    basis=describe(parameter, saved) if uses_basis else "as it is",
                    rate=_quantiles(learning_rates(block, group["samples"], rule, scales.horizon) * scales.lr),
                    memory=_quantiles(state.memory),
                    signal_to_noise=_quantiles(state.mean.grad**2 / (sigma_sq + config.epsilon)),
                    outliers=float(outliers.get(parameter, 0)) / max(1, len(block.theta)),
                    weight_decay=float(strength.mean()) if len(strength) else 0.0,
                    effective_parameters=float((curv / (curv + spread(strength, block) + (curv == 0))).sum()),
                )
            )
    scale = noise_scale(Noise(variance_sum, signal_sum))
    if noise.steps:
        scale = noise_scale(noise) if is_known(noise) else math.inf
    least = ROUNDING**2 * max(norms_sq, default=0.0)
    return Diagnosis(
        tensors=[
            tensor if norm_sq >= least else tensor._replace(rate=Quantiles(0.0, 0.0, 0.0), basis=NO_EFFECT)
            for tensor, norm_sq in zip(tensors, norms_sq, strict=True)
        ],
        noise_scale=scale,
        samples_per_step=max(group["samples"] for group in groups),
        skipped=groups[0]["skipped"],
        sample=sample,
        parameters=sum(local_of(parameter).numel() for parameter, state in states.items() if state),
        state_bytes=sum(local_of(value).nbytes for state in states.values() for value in state.values()),
        buffer_bytes=buffer_bytes,
    )


def placed_like(parameter: Tensor, state: ParamState) -> ParamState:
    """Return the state on the device of its parameter, and the counts of a dense one on the CPU.

    A loaded state and that of a model that was moved are on another device until the next step. Counts and totals may
    have a precision that the device of the parameter does not have.
    """
    sums, counts_device = sum_dtype(parameter.device), parameter.device if is_table(state) else torch.device("cpu")
    result = {}
    for name, value in state.items():
        dtype = sums if name in ("seen", "steps", "totals") else value.dtype
        result[name] = value.to(counts_device if name in ("seen", "steps") else parameter.device, dtype)
    return result


def decay_strengths(parameter: Tensor, state: dict[str, Tensor], block: Coordinates, group: dict[str, Any]) -> Tensor:
    """Return the estimated strength of weight decay of each segment; 0 if it is not estimated."""
    totals = block.total_columns()
    if not estimates_decay(group) or parameter.dim() < 2:
        return torch.zeros_like(totals.rms)
    samples = block.seen / max(1, group["steps"]) if is_table(state) else torch.full_like(totals.rms, group["samples"])
    samples = samples.to(totals.rms) * group["steps_per_epoch"]
    strength: Tensor = strength_of_decay(totals, torch.tensor(block.whole_lengths).to(totals.rms), samples)
    return strength


def _quantiles(values: Tensor) -> Quantiles:
    values = values.flatten()
    if not len(values):
        return Quantiles(math.nan, math.nan, math.nan)
    values = values[:: math.ceil(len(values) / QUANTILE_SAMPLE)].to(sum_dtype(values.device))
    return Quantiles(*torch.quantile(values, values.new_tensor([0.05, 0.5, 0.95])).tolist())


def step_number(param_groups: list[dict[str, Any]]) -> int:
    """Return the number of calls of `step` since the beginning of the run, skipped steps included."""
    return int(param_groups[0]["steps"] + param_groups[0]["skipped"])


class TensorBoard:
    """Write the diagnosis to a `SummaryWriter` after every `every` steps.

    Steps are counted by the optimizer, so a run that resumes from a checkpoint continues the count.

    opt.register_step_post_hook(TensorBoard(SummaryWriter(), every=100))
    """

    def __init__(self, writer: Any, every: int = 100):
        self._writer, self._every = writer, every

    def __call__(self, opt: VSGD, arguments: Any = (), keywords: Any = None) -> None:
        step = step_number(opt.param_groups)
        if step % self._every:
            return
        diagnosis = opt.info()
        self._writer.add_scalar("vsgd/noise_scale", diagnosis.noise_scale, step)
        self._writer.add_scalar("vsgd/skipped", diagnosis.skipped, step)
        for tensor in diagnosis.tensors:
            for what in ("rate", "memory", "signal_to_noise"):
                self._writer.add_scalar(f"vsgd/{what}/{tensor.name}", getattr(tensor, what).median, step)
            self._writer.add_scalar(f"vsgd/outliers/{tensor.name}", tensor.outliers, step)


def plot(diagnosis: Diagnosis) -> Figure:
    """Plot rates, memory and signal-to-noise of every tensor: the median, and the span of nine coordinates in ten."""
    from matplotlib.figure import Figure

    shown = [tensor for tensor in diagnosis.tensors if tensor.coordinates]
    figure = Figure(figsize=(11, 1.2 + 0.32 * len(shown)), layout="constrained")
    places = range(len(shown))
    columns = {"rate": "learning rate", "memory": "memory τ, in samples", "signal_to_noise": "signal / noise"}
    for axis, (field, title) in zip(figure.subplots(1, 3, sharey=True), columns.items(), strict=True):
        quantiles = [getattr(tensor, field) for tensor in shown]
        axis.hlines(places, [max(q.low, 1e-12) for q in quantiles], [q.high for q in quantiles], color="#9db8d6", lw=6)
        axis.plot([q.median for q in quantiles], places, "o", color="#2563a8")
        axis.set(xscale="log", title=title)
        axis.tick_params(axis="x", which="minor", labelbottom=False)  # they overlap where a span is short
        axis.grid(alpha=0.25)
    figure.axes[0].set_yticks(list(places), [tensor.name for tensor in shown])
    figure.axes[0].invert_yaxis()
    return figure
