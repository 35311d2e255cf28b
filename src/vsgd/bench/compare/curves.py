"""Drawings: losses as they fall, and shares of workloads solved."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator

from vsgd.bench.compare.judging import AXES, profiles, targets
from vsgd.bench.compare.methods import Method
from vsgd.bench.compare.ours import OURS
from vsgd.bench.compare.table import Table
from vsgd.bench.compare.train import Run
from vsgd.bench.compare.workloads import Workload
from vsgd.bench.figures.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, RED

TEAL, PINK, BROWN, BLACK = "#12a5a5", "#e26ab0", "#8a5a2b", "#2b2f36"
OLIVE, GOLD = "#7a8b1c", "#c9a000"
STYLES = {
    "vsgd": (BLUE, "-"),
    "vsgd-paper": (BLUE, ":"),
    "sgd": (BLACK, "-"),
    "momentum": (BLACK, "--"),
    "adam": (RED, "-"),
    "adam-default": (RED, "--"),
    "adamw-cosine": (RED, "-."),
    "momentum-cosine": (BLACK, "-."),
    "soap-cosine": (OLIVE, "-."),
    "muon-cosine": (GOLD, "-."),
    "adagrad": (BROWN, "-"),
    "prodigy": (GREEN, "-"),
    "prodigy-cosine": (GREEN, "-."),
    "schedulefree-adamw": (ORANGE, "-"),
    "schedulefree-adamw-warmup": (ORANGE, ":"),
    "schedulefree-sgd": (ORANGE, "--"),
    "dadapt-adam": (PURPLE, "-"),
    "dadapt-sgd": (PURPLE, "--"),
    "dog": (TEAL, "-"),
    "cocob": (PINK, "-"),
}
"""Relatives share a color; what has a schedule is dash-dotted."""
COLUMNS = 3
MOST_TIMES = 100.0
"""Profiles end where an optimizer takes so many times as long as the fastest."""


def _style(method: Method) -> dict[str, Any]:
    color, dashes = STYLES.get(method.name, (GREY, "-"))
    ours = method.name == OURS
    return {"color": color, "ls": dashes, "lw": 3.2 if ours else 1.3, "zorder": 5 if ours else 3}


def _column(runs: list[Run], field: str, missing: float) -> Any:
    """Seeds × evaluation points; runs that ended early are filled up."""
    longest = max(len(run.updates) for run in runs)
    return np.array([getattr(run, field) + [missing] * (longest - len(run.updates)) for run in runs], float)


def _panel(axes: Axes, table: Table, workload: Workload, axis: str) -> None:
    axes.set_title(workload.title, fontsize=10, loc="left", weight="bold")
    starts, lowest = [], []
    for method in table.methods:
        cell = table.cells.get((workload.name, method.name))
        runs = [] if cell is None else [run for run in cell.runs.values() if run.updates]
        if not runs:
            continue
        x = np.nanmean(_column(runs, axis, math.nan), axis=0)
        losses = _column(runs, "held_out", math.inf)
        if workload.online:
            losses = losses.cumsum(axis=1) / np.arange(1, losses.shape[1] + 1)
        mean = losses.mean(axis=0)
        shown = np.isfinite(mean)
        style = _style(method)
        axes.plot(x[shown], mean[shown], **style)
        bounds = losses.min(axis=0)[shown], losses.max(axis=0)[shown]
        axes.fill_between(x[shown], *bounds, color=style["color"], alpha=0.10, lw=0)
        if shown.any():
            starts.append(mean[shown][0])
            lowest.append(mean[shown].min())
    goals = list(targets(table, workload).values())
    if goals and not workload.online:
        axes.axhline(float(np.mean(goals)), color=GREY, lw=0.8, ls=(0, (1, 2)))
    if starts:
        axes.set_yscale("log")
        bottom = min(lowest) * 0.9
        top = max(starts) * 1.1
        axes.set_ylim(bottom, top)  # what diverges leaves the picture
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5, 7) if top < 50 * bottom else ()))
        axes.yaxis.set_major_formatter("{x:g}")  # 0.02, not 2 × 10⁻²
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlim(left=0)
    else:
        axes.text(0.5, 0.5, "not run", ha="center", transform=axes.transAxes, color=GREY)
        axes.set_yticks([])
    axes.set_xlabel(AXES[axis] if axis != "seconds" else "seconds of one core", fontsize=8, color="#646c78")
    axes.tick_params(labelsize=8, which="both", color="#b8bec7")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes, methods: list[Method]) -> None:
    axes.axis("off")
    for method in methods:
        axes.plot([], [], label=method.title, **_style(method))
    if methods:
        axes.legend(loc="center left", frameon=False, fontsize=9, ncols=2, handlelength=2.6)


def draw_curves(table: Table, axis: str) -> Canvas:
    """Held-out losses of all workloads, one panel each."""
    rows = math.ceil((len(table.workloads) + 1) / COLUMNS)
    canvas = Canvas(figsize=(13, 3.1 * rows), layout="constrained")
    panels = canvas.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axes, workload in zip(panels, table.workloads, strict=False):
        _panel(axes, table, workload, axis)
    shown = {name for _, name in table.cells}
    _legend(panels[len(table.workloads)], [method for method in table.methods if method.name in shown])
    for axes in panels[len(table.workloads) + 1 :]:
        axes.axis("off")
    return canvas


def draw_profiles(table: Table, axis: str) -> Canvas:
    """The share of workloads and seeds on which the target was reached, against how much longer than the fastest."""
    canvas = Canvas(figsize=(11, 5), layout="constrained")
    axes = canvas.subplots()
    found = profiles(table, axis)
    solved = {name: float(np.isfinite(ratios).mean()) for name, ratios in found.items()}
    for method in sorted((m for m in table.methods if m.name in found), key=lambda method: -solved[method.name]):
        ratios = found[method.name]
        times = np.concatenate([[1.0], ratios[ratios <= MOST_TIMES], [MOST_TIMES]])
        shares = [(ratios <= time).mean() for time in times]
        label = f"{method.title}: {solved[method.name]:.0%} solved"
        axes.step(times, shares, where="post", label=label, **_style(method))
    axes.set_xscale("log")
    axes.set_xlim(1, MOST_TIMES)
    axes.set_ylim(0, 1.02)
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1×", "2×", "5×", "10×", "20×", "50×", "100×"])
    axes.set_yticks(np.linspace(0, 1, 6), [f"{share:.0%}" for share in np.linspace(0, 1, 6)])
    axes.set_xlabel(f"{AXES[axis]} to the target, times those of the fastest optimizer")
    axes.set_ylabel("share of workloads and seeds solved")
    axes.spines[["top", "right"]].set_visible(False)
    if found:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9, handlelength=2.6)
    return canvas


def png(canvas: Canvas) -> bytes:
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
