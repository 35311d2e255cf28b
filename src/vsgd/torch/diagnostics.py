"""Report rates, memory and noise of each tensor, and the batch size worth using."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vsgd.algorithms.networks import TensorContext
from vsgd.algorithms.strategy import ROUNDING, strategy_of, strength_of_decay
from vsgd.core import variance
from vsgd.torch.basis import describe
from vsgd.torch.block import Rule, estimates_decay, rates_of
from vsgd.torch.blocks import learning_coordinates, rule_for
from vsgd.torch.coordinates import Coordinates, lengths_of, spread
from vsgd.torch.devices import sum_dtype
from vsgd.torch.distributed.shards import local_of
from vsgd.torch.noise import Noise, is_known, noise_scale
from vsgd.torch.state import ParamState, is_table, placed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vsgd.torch.optimizer import VSGD

QUANTILE_SAMPLE = 1_000_000
"""Quantiles of larger tensors are computed from this number of their coordinates, evenly spread."""

NO_EFFECT = "no effect on the loss: the gradient is rounding"
"""Shown for a bias before BatchNorm, for example. Its rate has no meaning and is shown as 0."""


class Quantiles(NamedTuple):
    """The 5 %, 50 % and 95 % quantiles over the coordinates of a tensor."""

    low: float
    median: float
    high: float


class TensorInfo(NamedTuple):
    """Values of one tensor.

    Attributes:
        name: name of the tensor.
        coordinates: number of coordinates that have seen enough samples to learn.
        basis: the coordinates in which the tensor learns.
        rate: learning rates.
        memory: τ, in samples.
        signal_to_noise: ḡ² / σ² of a single sample.
        outliers: fraction of coordinates with an outlier in the last minibatch.
        weight_decay: estimated strength λ of the penalty ½λ‖θ‖², in the unit of the curvature; 0 if not estimated.
        effective_parameters: γ = Σ h / (h + λ), the number of coordinates that the data determine.
    """

    name: str
    coordinates: int
    basis: str
    rate: Quantiles
    memory: Quantiles
    signal_to_noise: Quantiles
    outliers: float
    weight_decay: float
    effective_parameters: float


class Diagnosis(NamedTuple):
    """Values of the optimizer that `VSGD.info` returns. `print` shows them as a table.

    Attributes:
        tensors: values of each tensor that learns.
        noise_scale: tr Σ / |G|², about the number of samples at which a batch is as much signal as noise. It is
            computed from the samples of the last steps, and infinite if their signal is not significantly above zero.
            If a step is one sample, it is a rough upper estimate, Σσ² / Σḡ².
        samples_per_step: number of samples of a step.
        skipped: number of steps skipped because a value was not finite.
        sample: what a sample is, in the plural, for example "micro-batches"; "samples" are rows of the minibatch.
        parameters: number of coordinates that have state, in this process if parameters are sharded.
        state_bytes: memory of the tensors in `opt.state`, which a checkpoint contains.
        buffer_bytes: further memory between steps: averaged weights, gradients, and intermediate results.
    """

    tensors: list[TensorInfo]
    noise_scale: float
    samples_per_step: float
    skipped: int
    sample: str
    parameters: int
    state_bytes: int
    buffer_bytes: int

    @property
    def batch_worth_using(self) -> float:
        """Return the noise scale in units of the current batch size. Larger batches are mostly redundant."""
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
        elif self.samples_per_step == 1:
            tail = "the batch size worth using is known with several samples a step: per_sample, or micro-batches"
        elif math.isinf(self.noise_scale):
            tail = "the gradient is much smaller than its noise: larger batches would help, by an unknown factor"
        else:
            batches = self.batch_worth_using
            tail = f"noise scale {self.noise_scale:.3g} {self.sample}, {batches:.3g} times the current batch"
        sizes = {"state": self.state_bytes, "buffers": self.buffer_bytes}
        count = max(1, self.parameters)
        memory = [f"{name} {size:,} bytes, {size / count:.1f} a parameter" for name, size in sizes.items()]
        return "\n".join([head, *lines, f"{tail}; {self.skipped} steps skipped", "; ".join(memory)])


def diagnose(
    groups: list[dict[str, Any]],
    states: dict[Tensor, ParamState],
    outliers: dict[int, Any],
    noise: Noise,
    sample: str,
    buffer_bytes: int,
) -> Diagnosis:
    """Return the diagnosis. Training computes nothing for it except the noise.

    Args:
        groups: parameter groups.
        states: state of each parameter.
        outliers: number of outliers of each parameter in the last minibatch, by the `id` of the parameter.
        noise: noise of the last steps.
        sample: what a sample is, in the plural.
        buffer_bytes: memory of the optimizer besides its state.
    """
    found: list[tuple[TensorInfo, Noise, float]] = []
    for number, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            if states.get(parameter):
                names = group.get("param_names") or {index: f"group {number}, parameter {index}"}
                count = float(outliers.get(id(parameter), 0))
                found.append(tensor_info(names[index], parameter, states[parameter], group, count))
    scale = noise_scale(Noise(sum(each.variance for _, each, _ in found), sum(each.signal for _, each, _ in found)))
    if noise.steps:
        scale = noise_scale(noise) if is_known(noise) else math.inf
    least = ROUNDING**2 * max((square for *_, square in found), default=0.0)
    return Diagnosis(
        tensors=[
            info if square >= least else info._replace(rate=Quantiles(0.0, 0.0, 0.0), basis=NO_EFFECT)
            for info, _, square in found
        ],
        noise_scale=scale,
        samples_per_step=max(group["samples"] for group in groups),
        skipped=groups[0]["skipped"],
        sample=sample,
        parameters=sum(local_of(parameter).numel() for parameter, state in states.items() if state),
        state_bytes=sum(local_of(value).nbytes for state in states.values() for value in state.values()),
        buffer_bytes=buffer_bytes,
    )


def tensor_info(
    name: str, parameter: Tensor, state: ParamState, group: dict[str, Any], outliers: float
) -> tuple[TensorInfo, Noise, float]:
    """Return the values of a tensor, and over its coordinates the noise Σσ² and Σḡ², and Σv̄."""
    config, scales = group["algorithm"], rates_of(group)
    state = placed(state, parameter.device)
    block = learning_coordinates(parameter, state, group)
    mean, memory = block.state(block.seen)[:2]
    rates = learning_rates(block, group["samples"], rule_for(parameter.device, config), scales.horizon)
    sigma_sq, signal, curv = variance(mean.grad, mean.grad_sq), mean.grad**2, mean.curv.abs()
    strength = decay_strengths(parameter, state, block, group)
    info = TensorInfo(
        name=name,
        coordinates=len(block.theta),
        basis=describe(parameter, state) if strategy_of(config).rotates(config) else "not rotated",
        rate=_quantiles(rates * scales.lr),
        memory=_quantiles(memory),
        signal_to_noise=_quantiles(signal / (sigma_sq + config.epsilon)),
        outliers=outliers / max(1, len(block.theta)),
        weight_decay=float(strength.mean()) if len(strength) else 0.0,
        effective_parameters=float((curv / (curv + spread(strength, block) + (curv == 0))).sum()),
    )
    return info, Noise(float(sigma_sq.sum()), float(signal.sum())), float(mean.grad_sq.sum())


def learning_rates(coordinates: Coordinates, count: float, rule: Rule, horizon: float) -> Tensor:
    """Return η* of every coordinate for a minibatch of `count` samples, from the statistics so far."""
    shared = rule.strategy.context(coordinates.total_columns(), lengths_of(coordinates), rule.config, horizon)
    tensor = TensorContext(*(spread(torch.as_tensor(part), coordinates) for part in shared))
    rate: Tensor = rule.strategy.rate(
        coordinates.state(coordinates.seen), count, rule.config, tensor, coordinates.decoupled
    )
    return rate


def decay_strengths(parameter: Tensor, state: ParamState, block: Coordinates, group: dict[str, Any]) -> Tensor:
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
    """Write the diagnosis to TensorBoard.

        opt.register_step_post_hook(TensorBoard(SummaryWriter(), every=100))

    Steps are counted by the optimizer, so a run that resumes from a checkpoint continues the count.

    Args:
        writer: a `SummaryWriter`.
        every: number of steps between two writes.
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
    """Plot rates, memory and signal-to-noise ratio of every tensor: the median, and the 5 % and 95 % quantiles.

    Args:
        diagnosis: the result of `opt.info()`.

    Returns:
        A Matplotlib figure.
    """
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
        axis.tick_params(axis="x", which="minor", labelbottom=False)  # they overlap on short axes
        axis.grid(alpha=0.25)
    figure.axes[0].set_yticks(list(places), [tensor.name for tensor in shown])
    figure.axes[0].invert_yaxis()
    return figure
