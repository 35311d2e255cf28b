"""Figure 1: diminishing returns of minibatches."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure as Canvas

from vsgd_bench.figures.figure import COLORS, Figure, KeyNumber, Request, Results
from vsgd_bench.gain import counted, relative_gain, simulated_relative_gain
from vsgd_bench.store import Arrays

PRESENCES = (1.0, 0.1, 0.01)
NOISES = (0.01, 0.1, 1.0, 10.0)
SIZES = np.unique(np.logspace(0, 3, 61).astype(int))
SIMULATED_SIZES = np.array([1, 3, 10, 30, 100])
SAMPLES = 1_000_000
"""Number of samples per dot. Small minibatches are repeated more often."""

CAPTION = """Gain per sample gradient in a minibatch of n, relative to n = 1, on a noisy quadratic with the optimal
learning rate. Lines are the closed form. Dots are simulations with the rate of the algorithm; error bars are one
standard error. Left: dense gradients. With little noise, a second sample adds almost no information, so large
minibatches waste gradients. With much noise, they are efficient. Middle and right: one gradient in 10 or in 100 is
non-zero. If the rate depends on the number of non-zero samples, minibatches of up to about this size are efficient. The
gain is −log of the expected loss ratio. The expectation is over sparsity and noise."""


def compute(request: Request) -> Arrays:
    shape = (len(PRESENCES), len(NOISES))
    curves = np.empty((*shape, len(SIZES)))
    dots = np.empty((*shape, len(SIMULATED_SIZES), 3))
    rng = np.random.default_rng(request.seed)
    for i, presence in enumerate(PRESENCES):
        for j, noise in enumerate(NOISES):
            step = counted(noise)
            curves[i, j] = [relative_gain(int(n), presence, noise, step) for n in SIZES]
            for k, n in enumerate(SIMULATED_SIZES):
                estimate = simulated_relative_gain(int(n), presence, noise, SAMPLES // int(n), rng)
                dots[i, j, k] = (*estimate, relative_gain(int(n), presence, noise, step))
    return {"curves": curves, "dots": dots}


def draw(results: Results, request: Request) -> Canvas:
    curves, dots = results["gain"]["curves"], results["gain"]["dots"]
    canvas = Canvas(figsize=(11, 3.8), layout="constrained")
    axes = canvas.subplots(1, len(PRESENCES), sharey=True)
    colors = colormaps["viridis"](np.linspace(0, 0.85, len(NOISES)))
    for axis, presence, lines, points in zip(axes, PRESENCES, curves, dots, strict=True):
        for color, noise, line, point in zip(colors, NOISES, lines, points, strict=True):
            axis.plot(SIZES, line, color=color, lw=1.8, label=f"σ² = {noise:g}")
            axis.errorbar(SIMULATED_SIZES, point[:, 0], point[:, 1], fmt="o", ms=3.5, color=color, capsize=2)
        axis.set(xscale="log", xlabel="minibatch size n", ylim=(-0.02, 1.15))
        axis.set_title("dense" if presence == 1 else f"{presence:.0%} of gradients non-zero", fontsize=10)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("relative gain per sample")
    axes[0].legend(frameon=False, fontsize=8, title="noise", title_fontsize=8)
    return canvas


def numbers(results: Results, request: Request) -> list[KeyNumber]:
    value, error, exact = np.moveaxis(results["gain"]["dots"], -1, 0)
    dense = relative_gain(100, 1.0, 0.01, counted(0.01)), relative_gain(100, 1.0, 10.0, counted(10.0))
    return [
        KeyNumber("dense, n = 100, σ² = 0.01", f"{dense[0]:.4f}", "0.02 in the paper"),
        KeyNumber("dense, n = 100, σ² = 10", f"{dense[1]:.3f}", "about 1/5 in the paper"),
        KeyNumber(
            f"largest of {value.size} distances between simulation and closed form",
            f"{np.max(np.abs(value - exact) / error):.1f} standard errors",
            "about 3 or less",
        ),
    ]


def data(results: Results, request: Request) -> dict[str, Any]:
    return {"noises": NOISES, "presences": PRESENCES, "sizes": SIZES.tolist(), "colors": COLORS}


FIGURE = Figure(
    name="1",
    title="Diminishing returns of minibatches",
    caption=CAPTION,
    parts=lambda request: {"gain": partial(compute, request)},
    draw=draw,
    numbers=numbers,
    data=data,
)
