"""Figure 5: how to read the heatmap squares. Figure 6 uses the functions that draw them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from vsgd_bench.baselines import Algorithm, sgd, vsgd_fd
from vsgd_bench.figures.figure import BLUE, ORANGE, RED, Figure, KeyNumber, Request, Results, loss_ratio, run_problems
from vsgd_bench.problems import Elementary
from vsgd_bench.simulate import powers_of_two

PROBLEM = Elementary("quad", 1.0, 1.0)
ALGORITHMS: tuple[tuple[Algorithm, str], ...] = ((sgd(0.01), ORANGE), (sgd(1.0), RED), (vsgd_fd(), BLUE))
TRIALS = 8
MAX_DECADES = 4.0
"""Range of the colors: all losses below 1e-4 of the initial one have the darkest blue."""
COLORS = "RdBu_r"

CAPTION = """Left: learning curves of three algorithms on (θ − ξ)², measured at powers of two: eight trials each (thin)
and their mean (thick). Right: the same data as one square per algorithm. Updates increase to the right on a log₂ scale.
At each update the trials are sorted, with the worst on top. White is the initial loss, blue is lower, red is higher, on
a log scale. A square with a blue right side has learned. A red one has a loss above its initial value. The range of
colors from top to bottom shows how much trials vary."""


def decades(ratio: Any) -> Any:
    """Return log₁₀ of a loss ratio, clipped to the range of the colors."""
    with np.errstate(divide="ignore"):
        return np.clip(np.log10(ratio), -MAX_DECADES, MAX_DECADES)


def square(ratio: Any, height: int) -> Any:
    """Return an image of runs × checkpoints: `height` quantiles over runs at each checkpoint, the worst on top."""
    ranks = np.linspace(0, len(ratio) - 1, height).round().astype(int)
    return decades(np.sort(ratio, axis=0)[::-1][ranks])


def draw(results: Results, request: Request) -> Canvas:
    times = powers_of_two(request.updates)[1:]
    canvas = Canvas(figsize=(11, 4.2), layout="constrained")
    curves, *squares = canvas.subplots(1, 4, width_ratios=(2, 1, 1, 1))
    for (algorithm, color), axis in zip(ALGORITHMS, squares, strict=True):
        ratio = loss_ratio(PROBLEM, results[algorithm.name]["theta"][0])[:, 1:]
        curves.plot(times, ratio.T, color=color, lw=0.7, alpha=0.45)
        curves.plot(times, ratio.mean(axis=0), color=color, lw=3, label=algorithm.name)
        image = axis.imshow(square(ratio, len(ratio)), cmap=COLORS, vmin=-2, vmax=2, aspect="auto")
        axis.set_title(algorithm.name, fontsize=10, color=color)
        ticks = range(0, len(times), 2)
        axis.set_xticks(ticks, [str(times[i]) for i in ticks], rotation=60, fontsize=7)
        axis.set_xlabel("updates")
        axis.set_yticks([])
    squares[0].set_ylabel("trials, sorted: worst on top")
    curves.axhline(1, color="0.5", lw=0.8, ls="--")
    curves.set(yscale="log", xlabel="updates", ylabel="excess loss / initial")
    curves.set_xscale("log", base=2)
    curves.legend(frameon=False, fontsize=9, loc="lower left")
    curves.grid(alpha=0.2)
    bar = canvas.colorbar(image, ax=squares, ticks=[-2, -1, 0, 1, 2], shrink=0.85)
    bar.ax.set_yticklabels(["÷100", "÷10", "start", "×10", "×100"], fontsize=8)
    return canvas


def numbers(results: Results, request: Request) -> list[KeyNumber]:
    def final(name: str) -> float:
        return float(np.mean(loss_ratio(PROBLEM, results[name]["theta"][0][:, -1])))

    return [KeyNumber(f"mean final loss / initial, {a.name}", f"{final(a.name):.3g}") for a, _ in ALGORITHMS]


def compute(algorithm: Algorithm, request: Request) -> dict[str, Any]:
    return {"theta": run_problems((PROBLEM,), algorithm, 1, request._replace(runs=TRIALS))}


FIGURE = Figure(
    name="5",
    title="How to read a square",
    caption=CAPTION,
    parts=lambda request: {a.name: partial(compute, a, request) for a, _ in ALGORITHMS},
    draw=draw,
    numbers=numbers,
)
