"""Estimate the gradient noise scale B = tr Σ / |G|², and choose minibatch sizes by it (footnote 1 of the paper).

B is the number of samples whose mean gradient is as much signal as noise. With the rate of eq. 3 the expected gain of a
step is proportional to |G|² n / (n + B), where n is the size of the minibatch and G the mean gradient. A step takes
a + b·n seconds. The gain per second is largest at n = √(B a / b), and nearly as large at a fraction of that.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from vsgd.core import Scalar, ema, variance

if TYPE_CHECKING:
    from vsgd.torch.optimizer import VSGD

HORIZON = 20
"""Steps over which the noise is averaged."""

CERTAIN = 2.0
"""The signal is known if it is at least this number of standard errors above zero."""


class Noise(NamedTuple):
    """Moving averages over steps of the variance and the signal of single steps."""

    variance: Scalar = 0.0
    """tr Σ of a single sample."""
    signal: Scalar = 0.0
    """|G|²"""
    signal_sq: Scalar = 0.0
    """Average of squared estimates of |G|², from which their standard error is computed."""
    steps: int = 0


def observe(noise: Noise, total_variance: Scalar, signal: Scalar) -> Noise:
    """Return the averages updated with the noise of one step."""
    weight = 1 / min(noise.steps + 1, HORIZON)
    return Noise(
        variance=ema(noise.variance, total_variance, weight),
        signal=ema(noise.signal, signal, weight),
        signal_sq=ema(noise.signal_sq, signal * signal, weight),
        steps=noise.steps + 1,
    )


class StepNoise(NamedTuple):
    """Unbiased estimates from the samples of one step."""

    variance: Scalar
    """tr Σ of a sample."""
    signal: Scalar
    """|G|²"""
    samples: float
    """Number of samples."""


def of_samples(mean_of_squares: Scalar, square_of_mean: Scalar, count: float) -> StepNoise:
    """Return the noise of samples from the mean of their squared gradients and their squared mean gradient."""
    total = (mean_of_squares - square_of_mean) * (count / (count - 1))
    return StepNoise(total, square_of_mean - total / count, count)


def is_known(noise: Noise) -> bool:
    """Return whether the signal is significantly above zero."""
    error_sq = variance(noise.signal, noise.signal_sq) / (2 * min(noise.steps, HORIZON) - 1)
    return bool(noise.signal > 0) and bool(noise.signal * noise.signal > CERTAIN * CERTAIN * error_sq)


def noise_scale(noise: Noise) -> float:
    """Return B = tr Σ / |G|²; infinite if the estimated signal is not positive."""
    return float(noise.variance / noise.signal) if noise.signal > 0 else math.inf


# --- the size of a minibatch ------------------------------------------------------------------------------------------

INTERVAL = 20
"""Steps between decisions. A decision at most doubles or halves the minibatch, so that statistics can follow."""

NEARLY = 0.8
"""Use the smallest minibatch that reaches this fraction of the largest gain. The maximum is flat, and the expected gain
of a step assumes samples that are not seen again."""

TIMED_STEPS = 51
"""Number of recent steps of each size whose median is the time of a step."""


def fitted_time(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return a and b of a + b·n, by least squares of the relative error; neither is negative."""
    sizes, times = np.array(list(seconds), float), np.array(list(seconds.values()))
    weights = times**-2
    mean_size, mean_time = (float(np.average(each, weights=weights)) for each in (sizes, times))
    off = sizes - mean_size
    spread = np.average(off**2, weights=weights)
    slope = float(np.average(off * (times - mean_time), weights=weights) / spread) if spread else 0.0
    slope = min(max(slope, 0.0), mean_time / mean_size)
    return mean_time - slope * mean_size, slope


def gain_per_second(n: float, scale: float, fixed: float, each: float) -> float:
    """Return the gain per second of a step with n samples, up to a factor; proportional to n if there is only noise."""
    return (n / (n + scale) if math.isfinite(scale) else n) / (fixed + each * n)


def best_size(sizes: Sequence[int], scale: float, fixed: float, each: float) -> int:
    """Return the smallest of these sizes whose gain per second is at least `NEARLY` of the largest."""
    gains = {n: gain_per_second(n, scale, fixed, each) for n in sizes}
    return min(n for n, gain in gains.items() if gain >= NEARLY * max(gains.values()))


def doublings(smallest: int, largest: int) -> list[int]:
    """Return the sizes to choose from: `smallest`, its doubles, and `largest`."""
    return [*(smallest * 2**k for k in range(math.ceil(math.log2(largest / smallest)))), largest]


def next_size(present: int, wanted: float, smallest: int, largest: int) -> int:
    """Return the present size, doubled or halved if that comes closer to the wanted one."""
    size = present * 2 if wanted >= 2 * present else present // 2 if 2 * wanted <= present else present
    return min(max(size, smallest), largest)


class BatchSizer(Sampler[list[int]]):
    """Batch sampler that chooses the size of minibatches with the largest expected gain per second during training.

        sizer = BatchSizer(dataset, opt)
        for x, y in DataLoader(dataset, batch_sampler=sizer):
            opt.minimize([partial(loss, *half) for half in zip(x.chunk(2), y.chunk(2))])

    Each minibatch must be used for one step, and a step must have several samples: micro-batches, rows or processes.
    Differences between them are noise. Differences between consecutive steps cannot replace them: with optimal rates
    the gradients of these are orthogonal on average, however strong the signal is. Several processes share a
    minibatch: each draws its part.

    Args:
        data: the data set. Only its length is used.
        opt: the optimizer that takes the steps.
        smallest: minimum size of a minibatch, over all processes.
        largest: maximum size, for example what fits into memory; default: a tenth of the data.
        start: the first size.
        seed: seed of the order of the samples; the same in all processes.

    Raises:
        ValueError: if the data set is empty, or `smallest` is not between 1 and the maximum size.
    """

    def __init__(
        self, data: Sized, opt: VSGD, smallest: int = 8, largest: int | None = None, start: int = 32, seed: int = 0
    ):
        if not len(data):
            raise ValueError("the data set is empty")
        limit = min(len(data), max(smallest, len(data) // 10) if largest is None else largest)
        if not 1 <= smallest <= limit:
            raise ValueError(f"smallest is {smallest}, it must be at least 1 and at most {limit}")
        self._limits = smallest, limit
        self._length, self._opt, self._seed, self._epoch = len(data), opt, seed, 0
        self.size = min(max(start, smallest), limit)
        """Size of the next minibatch."""
        self.noise = Noise()
        self._drawn: deque[int] = deque()
        self._ended: float | None = None
        self._seconds: dict[int, deque[float]] = {}
        self._steps = 0
        self._skipped = opt.param_groups[0]["skipped"]
        opt.register_step_post_hook(self._after_step)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the minibatches of one pass over the data, in an order that all processes share."""
        processes = self._opt.processes()
        order = torch.randperm(self._length, generator=torch.Generator().manual_seed(self._seed + self._epoch)).tolist()
        self._epoch += 1
        self._drawn.clear()
        self._ended = None
        start = 0
        while start + (size := max(self.size // processes.size, 1) * processes.size) <= self._length:
            self._drawn.append(size)
            yield order[start + processes.rank : start + size : processes.size]
            start += size

    def seconds(self) -> dict[int, float]:
        """Return the median time of a step, for each size that was used."""
        return {size: statistics.median(times) for size, times in self._seconds.items()}

    def _after_step(self, opt: VSGD, arguments: Any, keywords: Any) -> None:
        now = time.perf_counter()
        if not self._drawn:
            raise RuntimeError("BatchSizer saw a step without a minibatch of its own; use each of them for one step")
        size = self._drawn.popleft()
        if self._ended is not None:
            self._seconds.setdefault(size, deque(maxlen=TIMED_STEPS)).append(now - self._ended)
        self._update_noise(size, opt)
        self._steps += 1
        if self._steps % INTERVAL == 0:
            self._decide()
        self._ended = time.perf_counter()

    def _update_noise(self, size: int, opt: VSGD) -> None:
        """Update the noise with that of the last step. A skipped step has none."""
        found, before = opt.step_noise, self._skipped
        self._skipped = opt.param_groups[0]["skipped"]
        if self._skipped != before:
            return
        if found is None:
            raise RuntimeError(
                "BatchSizer measures the noise between the samples of a step, and this step was one sample: give "
                "halves of the minibatch, opt.minimize([first, second]), or use per_sample=model, or "
                "distributed=Replicas()"
            )
        variance, signal = float(found.variance), float(found.signal)
        if math.isfinite(variance) and math.isfinite(signal):
            self.noise = observe(self.noise, variance * size / found.samples, signal)

    def _decide(self) -> None:
        """Choose the next size, from numbers that are the same in all processes."""
        seconds, processes = self.seconds(), self._opt.processes()
        if not seconds:  # each pass over the data is one step, which is not timed
            return
        sizes = sorted(seconds)
        rows = processes.numbers(
            "batch size", self.noise.variance, self.noise.signal, *(seconds[size] for size in sizes)
        )
        variance, signal, *times = (sum(column) / processes.size for column in zip(*rows, strict=True))
        fixed, each = fitted_time(dict(zip(sizes, times, strict=True)))
        smallest, largest = self._limits
        wanted = best_size(doublings(smallest, largest), noise_scale(Noise(variance, signal)), fixed, each)
        if len(seconds) < 2:  # a line needs the times of two sizes
            wanted = largest if self.size < largest else smallest
        self.size = next_size(self.size, wanted, smallest, largest)
