"""Figure 2: rates for the number of non-zero samples of each minibatch, or for its average."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from vsgd_bench.figures.figure import COLORS, GREEN, ORANGE, RED, Figure, KeyNumber, Request, Results
from vsgd_bench.gain import averaged, counted, fixed, relative_gain
from vsgd_bench.store import Arrays

SETTINGS = ((0.1, 0.01), (0.01, 0.01), (0.1, 10.0), (0.01, 10.0))
"""Fraction of non-zero gradients and noise σ² of each panel."""
SIZES = np.unique(np.logspace(0, 3, 43).astype(int))
FIXED_RATES = np.logspace(-2, 2, 40)

CAPTION = """Relative gain for sparse gradients, as in Figure 1. Green: the rate depends on the number of non-zero
samples in the current minibatch. Red: it depends on their average number. Dots: 40 fixed learning rates from 0.01 to
100; negative gains are below the frame. Near n = 1/p, a minibatch has about one non-zero sample. If it has two, the red
rate is too large, which causes the dip of the red curve. The dip is smaller with more noise. The green curve is above
all fixed rates everywhere."""


def compute() -> Arrays:
    count = np.empty((len(SETTINGS), len(SIZES)))
    average = np.empty_like(count)
    plain = np.empty((*count.shape, len(FIXED_RATES)))
    for i, (presence, noise) in enumerate(SETTINGS):
        for j, n in enumerate(SIZES.tolist()):
            count[i, j] = relative_gain(n, presence, noise, counted(noise))
            average[i, j] = relative_gain(n, presence, noise, averaged(noise, n, presence))
            plain[i, j] = [relative_gain(n, presence, noise, fixed(eta, n)) for eta in FIXED_RATES]
    return {"count": count, "average": average, "fixed": plain}


def draw(results: Results, request: Request) -> Canvas:
    arrays = results["gain"]
    canvas = Canvas(figsize=(12, 3.6), layout="constrained")
    axes = canvas.subplots(1, len(SETTINGS), sharey=True)
    for i, (axis, (presence, noise)) in enumerate(zip(axes, SETTINGS, strict=True)):
        sizes = np.repeat(SIZES[:, None], len(FIXED_RATES), axis=1)
        axis.plot(sizes.ravel(), arrays["fixed"][i].ravel(), ".", ms=2, color=ORANGE, alpha=0.5)
        axis.plot([], [], "o", ms=4, color=ORANGE, label="40 fixed rates")
        axis.plot(SIZES, arrays["average"][i], color=RED, lw=2, label="average sparsity")
        axis.plot(SIZES, arrays["count"][i], color=GREEN, lw=2, label="count of this minibatch")
        axis.axvline(1 / presence, color="0.6", lw=0.8, ls=":")
        axis.text(1 / presence, 0.02, " n = 1/p", fontsize=7, color="0.4")
        axis.set(xscale="log", xlabel="minibatch size n", ylim=(0, 1.08))
        axis.set_title(f"p = {presence:g}, {'low' if noise < 1 else 'high'} noise (σ² = {noise:g})", fontsize=10)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("relative gain per sample")
    axes[2].legend(framealpha=0.9, fontsize=8, loc="lower left", bbox_to_anchor=(0, 0.08))
    return canvas


def numbers(results: Results, request: Request) -> list[KeyNumber]:
    arrays = results["gain"]
    presence, noise = SETTINGS[0]
    best = max(relative_gain(10, presence, noise, fixed(eta, 10)) for eta in FIXED_RATES)
    return [
        KeyNumber("count, n = 1/p = 10, low noise", f"{relative_gain(10, presence, noise, counted(noise)):.3f}"),
        KeyNumber(
            "average sparsity, the same", f"{relative_gain(10, presence, noise, averaged(noise, 10, presence)):.3f}"
        ),
        KeyNumber("best of 40 fixed rates, the same", f"{best:.3f}"),
        KeyNumber(
            "smallest advantage of the count over the best fixed rate, all panels and sizes",
            f"{np.min(arrays['count'] - arrays['fixed'].max(axis=-1)):.1e}",
            "not below 0",
        ),
    ]


def data(results: Results, request: Request) -> dict[str, Any]:
    return {"settings": SETTINGS, "sizes": SIZES.tolist(), "rates": FIXED_RATES.tolist(), "colors": COLORS}


FIGURE = Figure(
    name="2",
    title="Counting the non-zero samples of every minibatch",
    caption=CAPTION,
    parts=lambda request: {"gain": compute},
    draw=draw,
    numbers=numbers,
    data=data,
)
