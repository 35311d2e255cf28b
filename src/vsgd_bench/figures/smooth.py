"""Figure 4: the expectation over non-smooth losses is smooth."""

from __future__ import annotations

from functools import partial

import numpy as np
from matplotlib.figure import Figure as Canvas

from vsgd_bench.figures.figure import BLUE, PURPLE, Figure, KeyNumber, Request, Results
from vsgd_bench.problems import Elementary
from vsgd_bench.store import Arrays

LOSSES = (Elementary("abs", 1.0, 1.0), Elementary("rectlin", 1.0, 1.0))
SHOWN = 8
DRAWN = 100_000

CAPTION = """Each sample loss (dotted) has a kink at a random position from N(0, 1). The expected loss (thick, in closed
form) is smooth and has a curvature, although the second derivative of every sample is zero where it exists. Curvature
is therefore measured by finite differences over the length of a step. Left: absolute value. Right: rectified linear."""


def compute(request: Request) -> Arrays:
    rng = np.random.default_rng(request.seed)
    theta = np.linspace(-3, 3, 301)
    xi = rng.standard_normal(DRAWN)
    expected = np.array([p.excess_loss(theta) + p.scale * least(p) for p in LOSSES])
    drawn = np.array([[p.sample_loss(t - xi).mean() for t in theta[::30]] for p in LOSSES])
    return {"theta": theta, "xi": xi[:SHOWN], "expected": expected, "drawn": drawn}


def least(problem: Elementary) -> float:
    """Return the infimum of the expected loss divided by A, which `excess_loss` subtracts."""
    return problem.sigma * float(np.sqrt(2 / np.pi)) if problem.shape == "abs" else 0.0


def draw(results: Results, request: Request) -> Canvas:
    arrays = results["curves"]
    canvas = Canvas(figsize=(9, 3.6), layout="constrained")
    axes = canvas.subplots(1, 2, sharey=True)
    for axis, problem, expected in zip(axes, LOSSES, arrays["expected"], strict=True):
        for i, xi in enumerate(arrays["xi"]):
            label = "single samples" if i == 0 else None
            axis.plot(arrays["theta"], problem.sample_loss(arrays["theta"] - xi), ":", color=BLUE, lw=1.1, label=label)
        axis.plot(arrays["theta"], expected, color=PURPLE, lw=3.5, label="expectation")
        axis.set(xlabel="θ", ylim=(-0.1, 4), title={"abs": "|θ − ξ|", "rectlin": "max(θ − ξ, 0)"}[problem.shape])
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("loss")
    axes[1].legend(frameon=False, fontsize=9, loc="upper left")
    return canvas


def numbers(results: Results, request: Request) -> list[KeyNumber]:
    arrays = results["curves"]
    gap = np.abs(arrays["drawn"] - arrays["expected"][:, ::30]).max()
    return [KeyNumber(f"largest gap between closed form and the mean of {DRAWN:,} samples", f"{gap:.4f}", "near 0")]


FIGURE = Figure(
    name="4",
    title="Non-smooth samples, smooth expectation",
    caption=CAPTION,
    parts=lambda request: {"curves": partial(compute, request)},
    draw=draw,
    numbers=numbers,
)
