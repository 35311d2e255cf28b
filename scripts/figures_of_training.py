"""Draw docs/figures/training.png and docs/figures/stream.png from two runs of a few seconds.

`python scripts/figures_of_training.py` trains a network on handwritten digits, and another one on a stream whose labels
change in the middle. Backgrounds are transparent, and text is gray, so that the figures are readable on light and on
dark pages. Colors are those of Okabe & Ito, which color-blind readers can distinguish; line styles differ, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from vsgd.torch import VSGD

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
GRAY, BLUE, VERMILION, GREEN = "#767676", "#0072b2", "#d55e00", "#009e73"

EPOCHS, BATCH = 12, 32
STREAM_STEPS, CHANGE, INPUTS = 1500, 750, 20
WRONG_LABELS = 0.1
SMOOTHING = 0.95
"""Weight of the past in moving averages of losses."""

ADAMW_RATE = 0.01
"""The best constant learning rate on streams that jump (docs/guides/streams.md)."""

AVERAGED, ITERATE, ADAMW = "vSGD", "vSGD, newest iterate", f"AdamW {ADAMW_RATE:g}"


class Curves(NamedTuple):
    """Values over training, one entry per record.

    Attributes:
        steps: numbers of the steps.
        losses: name and values of each loss.
        rates: 5 %, 50 % and 95 % quantiles of the learning rates of one layer, records × 3.
    """

    steps: list[int]
    losses: dict[str, list[float]]
    rates: list[tuple[float, float, float]]


def train_on_digits(seed: int) -> Curves:
    """Train a network on handwritten digits, and record losses and learning rates every ten steps."""
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x))
    train, held_out = order[:1400], order[1400:]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = VSGD(model.named_parameters())
    curves = Curves([], {"training loss": [], "held-out loss": []}, [])
    step = 0
    for _ in range(EPOCHS):
        for rows in train[torch.randperm(len(train))].split(BATCH):
            opt.minimize(lambda rows=rows: F.cross_entropy(model(x[rows]), y[rows]))
            step += 1
            if step % 10 == 0:
                curves.steps.append(step)
                with torch.no_grad():
                    for name, some in (("training loss", train), ("held-out loss", held_out)):
                        curves.losses[name].append(F.cross_entropy(model(x[some]), y[some]).item())
                curves.rates.append(tuple(opt.info().tensors[2].rate))
    return curves


def stream(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches whose labels depend on a direction that changes once. A tenth of the labels is wrong."""
    rng = torch.Generator().manual_seed(seed)
    directions = torch.randn(2, INPUTS, generator=rng)
    batches = []
    for step in range(STREAM_STEPS):
        x = torch.randn(16, INPUTS, generator=rng)
        wrong = torch.rand(16, generator=rng) < WRONG_LABELS
        batches.append((x, ((x @ directions[int(step >= CHANGE)] > 0) ^ wrong).long()))
    return batches


class StreamCurves(NamedTuple):
    """Values over the stream, one entry per ten steps.

    Attributes:
        steps: numbers of the steps.
        losses: name and moving average of each loss.
        outliers: percentage of the coordinates of the first layer in which a batch is an outlier, mean of ten steps.
    """

    steps: list[int]
    losses: dict[str, list[float]]
    outliers: list[float]


def learn_stream(seed: int) -> StreamCurves:
    """Predict each batch of the stream, then train on it, with vSGD and with AdamW."""
    models = []
    for _ in range(2):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, 2)))
    model, other = models
    vsgd = VSGD(model.named_parameters())
    adamw = torch.optim.AdamW(other.parameters(), lr=ADAMW_RATE)
    curves = StreamCurves([], {AVERAGED: [], ITERATE: [], ADAMW: []}, [])
    means, weight = np.zeros(3), 0.0
    outliers = []
    for step, (x, y) in enumerate(stream(seed), start=1):
        with torch.no_grad():
            averaged, adamw_loss = (F.cross_entropy(each(x), y).item() for each in models)
            with vsgd.iterates():
                iterate = F.cross_entropy(model(x), y).item()
        means = SMOOTHING * means + (1 - SMOOTHING) * np.array([averaged, iterate, adamw_loss])
        weight = SMOOTHING * weight + 1 - SMOOTHING
        vsgd.minimize(lambda x=x, y=y: F.cross_entropy(model(x), y))
        adamw.zero_grad()
        F.cross_entropy(other(x), y).backward()
        adamw.step()
        outliers.append(100 * vsgd.info().tensors[0].outliers)
        if step % 10 == 0:
            curves.steps.append(step)
            for name, mean in zip(curves.losses, means, strict=True):
                curves.losses[name].append(mean / weight)
            curves.outliers.append(float(np.mean(outliers)))
            outliers.clear()
    return curves


def new_figure(titles: tuple[str, str]) -> tuple[Figure, Any, Any]:
    """Return a transparent figure with two panels, one above the other so that labels are readable on phones."""
    figure = Figure(figsize=(5.5, 5.2), dpi=130, layout="constrained", facecolor="none")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, title in zip(panels, titles, strict=True):
        panel.set_facecolor("none")
        panel.set_title(title, color=GRAY, fontsize=10, loc="left")
        panel.tick_params(colors=GRAY, which="both")
        panel.grid(color=GRAY, alpha=0.2, linewidth=0.6)
        for side, spine in panel.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GRAY)
    panels[-1].set_xlabel("step", color=GRAY)
    return figure, *panels


def draw_rates(panel: Any, curves: Curves, color: str, label: str) -> None:
    """Draw the median of the learning rates as a line, and the range from 5 % to 95 % as a band."""
    low, median, high = np.array(curves.rates).T
    panel.fill_between(curves.steps, low, high, color=color, alpha=0.2, linewidth=0)
    panel.plot(curves.steps, median, color=color, label=label)
    panel.set_yscale("log")


def draw_legend(panel: Any) -> None:
    panel.legend(frameon=False, labelcolor=GRAY, fontsize=8)


def draw_training(path: Path, seed: int) -> None:
    """Draw losses and learning rates of the network on digits."""
    curves = train_on_digits(seed)
    figure, upper, lower = new_figure(("Loss on handwritten digits", "Learning rates of the last layer"))
    styles = {"training loss": (BLUE, "-"), "held-out loss": (VERMILION, "--")}
    for name, values in curves.losses.items():
        color, style = styles[name]
        upper.plot(curves.steps, values, color=color, linestyle=style, label=name)
    upper.set_yscale("log")
    draw_rates(lower, curves, GREEN, "median; band: middle 90 % of coordinates")
    lower.set_ylim(1e-4, 1e4)  # some coordinates have almost no signal at first; their rates are below the frame
    draw_legend(upper)
    draw_legend(lower)
    figure.savefig(path, transparent=True)


def draw_stream(path: Path, seed: int) -> None:
    """Draw losses of vSGD and AdamW on the stream, and the outliers that vSGD detects."""
    curves = learn_stream(seed)
    figure, upper, lower = new_figure(
        ("Loss of each batch before it is used for training", "Coordinates of the first layer with an outlier, %")
    )
    styles = {AVERAGED: (BLUE, "-"), ITERATE: (GREEN, "-."), ADAMW: (VERMILION, "--")}
    for name, values in curves.losses.items():
        color, style = styles[name]
        upper.plot(curves.steps, values, color=color, linestyle=style, label=name)
    lower.plot(curves.steps, curves.outliers, color=BLUE)
    lower.set_ylim(bottom=0)
    for panel, height in ((upper, 0.02), (lower, 0.95)):
        panel.axvline(CHANGE, color=GRAY, linewidth=1, linestyle=":")
        panel.text(CHANGE + 20, height, "labels change", color=GRAY, fontsize=8, transform=panel.get_xaxis_transform())
    draw_legend(upper)
    figure.savefig(path, transparent=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of the figures (default: docs/figures)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: 0)")
    arguments = parser.parse_args()
    draw_training(arguments.out / "training.png", arguments.seed)
    draw_stream(arguments.out / "stream.png", arguments.seed)
