"""Figure 3: reweighting gradients that do not interfere."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from vsgd.reweight import effective_count, sample_weights
from vsgd_bench.figures.figure import BLUE, GREEN, RED, Figure, KeyNumber, Request, Results
from vsgd_bench.store import Arrays

CENTERS = np.array([[1.0, 0.15], [-0.15, 0.9]])
SIZES = (12, 3)
SPREAD = 0.13

CAPTION = """Sample gradients (thin arrows) come from two noisy clusters, one four times as common as the other.
The mean gradient (red) nearly ignores the rare cluster. The reweighted gradient (blue) takes a full step towards both:
each sample has a weight of one over the number of samples that interfere with it. The result is close to hard
clustering (dotted green), which needs to know the clusters."""


def angle(a: Any, b: Any) -> float:
    return float(np.degrees(np.arccos(a @ b / np.linalg.norm(a) / np.linalg.norm(b))))


def compute(request: Request) -> Arrays:
    rng = np.random.default_rng(request.seed)
    label = np.repeat([0, 1], SIZES)
    gradients = CENTERS[label] + SPREAD * rng.standard_normal((sum(SIZES), 2))
    weights = sample_weights(gradients @ gradients.T)
    return {
        "gradients": gradients,
        "label": label,
        "count": effective_count(weights),
        "mean": gradients.mean(axis=0),
        "reweighted": weights @ gradients,
        "clustered": sum(gradients[label == k].mean(axis=0) for k in (0, 1)),
    }


def draw(results: Results, request: Request) -> Canvas:
    arrays = results["arrows"]
    canvas = Canvas(figsize=(8.2, 4.6), layout="constrained")
    axis = canvas.subplots()

    def arrow(vector: Any, color: str, width: float, label: str | None = None, style: str = "-") -> None:
        properties = {"arrowstyle": "-|>", "color": color, "lw": width, "ls": style, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", xy=vector, xytext=(0, 0), arrowprops=properties)
        axis.plot([], [], color=color, lw=width, ls=style, label=label)

    for gradient, k in zip(arrays["gradients"], arrays["label"], strict=True):
        arrow(gradient, ("#e3b54a", "#85c3e0")[k], 0.9)
    axis.plot([], [], color="#e3b54a", label=f"common cluster ({SIZES[0]} samples)")
    axis.plot([], [], color="#85c3e0", label=f"rare cluster ({SIZES[1]} samples)")
    arrow(arrays["mean"], RED, 2.5, "mean gradient")
    arrow(arrays["reweighted"], BLUE, 2.5, "reweighted gradient")
    arrow(arrays["clustered"], GREEN, 2.0, "hard clustering", ":")
    axis.plot(0, 0, "o", color="0.2", ms=5)
    axis.set(xlim=(-0.45, 1.95), ylim=(-0.12, 1.2), xlabel="θ₁", ylabel="θ₂", aspect="equal")
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    axis.grid(alpha=0.2)
    return canvas


def numbers(results: Results, request: Request) -> list[KeyNumber]:
    arrays = results["arrows"]
    return [
        KeyNumber(
            "angle of the mean gradient to hard clustering", f"{angle(arrays['mean'], arrays['clustered']):.0f}°"
        ),
        KeyNumber(
            "angle of the reweighted gradient to hard clustering",
            f"{angle(arrays['reweighted'], arrays['clustered']):.0f}°",
        ),
        KeyNumber(
            "effective count of the reweighted gradient",
            f"{arrays['count']:.2f}",
            f"between 1, all orthogonal, and {sum(SIZES)}, all aligned",
        ),
    ]


FIGURE = Figure(
    name="3",
    title="Reweighting orthogonal gradients",
    caption=CAPTION,
    parts=lambda request: {"arrows": partial(compute, request)},
    draw=draw,
    numbers=numbers,
)
