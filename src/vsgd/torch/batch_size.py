"""A minibatch that grows and shrinks to where the expected gain per second is largest (footnote 1 of the paper).

With the rate of eq. 3 the expected gain of a step is proportional to |G|² n / (n + B), where n is the size of the
minibatch, G the mean gradient and B = tr Σ / |G|² the gradient noise scale. A step takes a + b·n seconds. The gain per
second is largest at n = √(B a / b).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from vsgd.torch.noise import Noise, from_pair, noise_scale, observe
from vsgd.torch.shards import local_of

if TYPE_CHECKING:
    from vsgd.torch.optimizer import VSGD

INTERVAL = 20
"""Steps between decisions. Each at most doubles or halves the minibatch: statistics need some steps to follow."""

TIMED_STEPS = 51
"""The newest steps of each size whose median is the time of a step."""


def fitted_time(seconds: Mapping[int, float]) -> tuple[float, float]:
    """a and b of a + b·n, by least squares of the relative error; neither is negative."""
    weights = {n: 1 / s**2 for n, s in seconds.items()}
    total = sum(weights.values())
    mean_n, mean_s = (sum(w * v for w, v in zip(weights.values(), each, strict=True)) / total for each in
                      (seconds.keys(), seconds.values()))  # fmt: skip
    spread = sum(w * (n - mean_n) ** 2 for n, w in weights.items())
    slope = sum(w * (n - mean_n) * (seconds[n] - mean_s) for n, w in weights.items()) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean_s / mean_n)
    return mean_s - slope * mean_n, slope


def best_size(scale: float, fixed: float, each: float) -> float:
    """n with the largest gain per second, n / (n + B) / (a + b·n)."""
    return math.sqrt(scale * fixed / each) if each > 0 and fixed > 0 else (0.0 if each > 0 else math.inf)


def next_size(present: int, wanted: float, smallest: int, largest: int) -> int:
    """The power of two nearest to what is wanted, but at most one doubling or halving away."""
    steps = math.log2(max(wanted, 1.0) / present) if math.isfinite(wanted) else 1.0
    size = present * 2 ** min(max(round(steps), -1), 1)
    return min(max(int(size), smallest), largest)


class BatchSizer(Sampler[list[int]]):
    """A batch sampler whose minibatches have the size with the largest expected gain per second, measured on the way.

        sizer = BatchSizer(dataset, opt)
        for x, y in DataLoader(dataset, batch_sampler=sizer):
            opt.minimize(lambda: F.cross_entropy(model(x), y))

    Each minibatch must be used for one step. Several processes share a minibatch of the same size: each draws its part.

    Args:
        data: the data set, of which only the length is asked.
        opt: the optimizer that takes the steps.
        smallest: the size that a minibatch has at least, over all processes.
        largest: at most, such as memory allows; default: a tenth of the data.
        start: the first size.
        seed: of the order of the samples; the same in all processes.
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
        """Of the next minibatch."""
        self.noise = Noise()
        self._drawn: deque[int] = deque()
        self._last: tuple[int, list[Tensor]] | None = None
        self._ended: float | None = None
        self._seconds: dict[int, deque[float]] = {}
        self._steps = 0
        opt.register_step_post_hook(self._after_step)

    def __iter__(self) -> Iterator[list[int]]:
        """One pass over the data, in an order that all processes share; what fills no minibatch is left out."""
        replicas = self._opt.replicas()
        order = torch.randperm(self._length, generator=torch.Generator().manual_seed(self._seed + self._epoch)).tolist()
        self._epoch += 1
        self._drawn.clear()
        self._last = self._ended = None
        start = 0
        while start + (size := max(self.size // replicas.size, 1) * replicas.size) <= self._length:
            self._drawn.append(size)
            yield order[start + replicas.rank : start + size : replicas.size]
            start += size

    def seconds(self) -> dict[int, float]:
        """The median time of a step, for each size so far."""
        return {size: statistics.median(times) for size, times in self._seconds.items()}

    def _after_step(self, opt: VSGD, arguments: Any, keywords: Any) -> None:
        now = time.perf_counter()
        if not self._drawn:
            raise RuntimeError("BatchSizer saw a step without a minibatch of its own; use each of them for one step")
        size = self._drawn.popleft()
        if self._ended is not None:
            self._seconds.setdefault(size, deque(maxlen=TIMED_STEPS)).append(now - self._ended)
        self._notice(size, opt)
        self._steps += 1
        if self._steps % INTERVAL == 0:
            self._decide()
        self._ended = time.perf_counter()

    @torch.no_grad()
    def _notice(self, size: int, opt: VSGD) -> None:
        """Compare the gradient with that of the step before."""
        replicas = opt.replicas()
        rows = size // replicas.size if replicas.are_samples else size
        parameters = [p for group in opt.param_groups for p in group["params"]]
        grads = [local_of(p.grad).clone() for p in parameters if p.grad is not None and not p.grad.is_sparse]
        if self._last is not None and len(grads) == len(self._last[1]):
            before, others = self._last
            products = [
                float(torch.stack([(g.double() * h.double()).sum().cpu() for g, h in zip(*each, strict=True)]).sum())
                for each in ((grads, grads), (others, others), (grads, others))
            ]
            if all(map(math.isfinite, products)):
                squares = products[0], products[1]
                self.noise = observe(self.noise, *from_pair(squares, products[2], (rows, before)))
        self._last = rows, grads

    def _decide(self) -> None:
        """Choose the next size, from numbers that are the same in all processes."""
        seconds, replicas = self.seconds(), self._opt.replicas()
        sizes = sorted(seconds)
        rows = replicas.numbers(self.noise.variance, self.noise.signal, *(seconds[size] for size in sizes))
        variance, signal, *times = (sum(column) / replicas.size for column in zip(*rows, strict=True))
        fixed, each = fitted_time(dict(zip(sizes, times, strict=True)))
        wanted = best_size(noise_scale(Noise(variance, signal)), fixed, each)
        if len(seconds) < 2:  # the time of a step is a line, and one point of it is known
            wanted = math.inf if self.size < self._limits[1] else 0.0
        self.size = next_size(self.size, wanted, *self._limits)
