"""Learning curves for the page, and a plot of the fraction of workloads solved."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from vsgd_bench.compare.judging import AXES, profiles, races, targets
from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.ours import OURS
from vsgd_bench.compare.table import Table
from vsgd_bench.compare.train import Run
from vsgd_bench.compare.workloads import Workload
from vsgd_bench.figures.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, RED

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
    "schedulefree-radam": (ORANGE, "-."),
    "adamw-ema": (RED, ":"),
    "kron": (OLIVE, "-"),
    "adan": (BROWN, "--"),
    "adopt": (BROWN, ":"),
    "lbfgs": (GREY, "-"),
}
"""Related methods share a color. Methods with a schedule are dash-dotted."""
TUNING_DASHES = {"single": "--", "default": ":"}
"""Line styles of rows that are not tuned on each workload."""
MAX_TIMES = 100.0
"""Right end of profiles: the time of an optimizer divided by that of the fastest."""


def _style(method: Method) -> dict[str, Any]:
    name, _, tuning = method.name.partition("/")
    color, dashes = STYLES.get(name, (GREY, "-"))
    dashes = TUNING_DASHES.get(tuning, dashes)
    ours = method.name == OURS
    return {"color": color, "ls": dashes, "lw": 3.2 if ours else 1.3, "zorder": 5 if ours else 3}


def _dashes(method: Method) -> str | None:
    """Return the lengths of dashes and gaps in the format of SVG."""
    return {"-": None, "--": "7 4", "-.": "8 3 2 3", ":": "2 3"}[_style(method)["ls"]]


def _column(runs: list[Run], field: str, missing: float) -> Any:
    """Return an array of seeds × evaluation points. Runs that ended early are padded with `missing`."""
    longest = max(len(run.updates) for run in runs)
    return np.array([getattr(run, field) + [missing] * (longest - len(run.updates)) for run in runs], float)


def _rounded(values: Any) -> list[float]:
    """Return the values with five digits, which is enough for curves."""
    return [float(f"{value:.5g}") for value in values]


def _curve(workload: Workload, runs: list[Run]) -> dict[str, list[float]]:
    """Return the budget spent and the held-out loss: mean, minimum and maximum over seeds."""
    losses = _column(runs, "held_out", math.inf)
    if workload.online:
        losses = losses.cumsum(axis=1) / np.arange(1, losses.shape[1] + 1)
    spent = {axis: _rounded(np.nanmean(_column(runs, axis, math.nan), axis=0)) for axis in AXES}
    bounds = {"mean": losses.mean(axis=0), "low": losses.min(axis=0), "high": losses.max(axis=0)}
    return {**spent, **{name: _rounded(values) for name, values in bounds.items()}}


def _curves(table: Table, workload: Workload) -> dict[str, dict[str, list[float]]]:
    cells = {name: cell for (where, name), cell in table.cells.items() if where == workload.name}
    runs = {name: [run for run in cell.runs.values() if run.updates] for name, cell in cells.items()}
    return {name: _curve(workload, found) for name, found in runs.items() if found}


def _target(table: Table, workload: Workload) -> float | None:
    goals = list(targets(table, workload).values())
    return float(np.mean(goals)) if goals and not workload.online else None


def data(table: Table) -> dict[str, Any]:
    """Return the data of the plots on the page (`vsgd_bench/web/compare.js`)."""
    return {
        "axes": AXES,
        "most": MAX_TIMES,
        "workloads": [{"name": w.name, "title": w.title, "target": _target(table, w)} for w in table.workloads],
        "methods": [
            {"name": m.name, "title": m.title, "ours": m.name == OURS, "color": _style(m)["color"], "dash": _dashes(m)}
            for m in table.methods
        ],
        "curves": {w.name: _curves(table, w) for w in table.workloads},
        "times": {axis: [race._asdict() for race in races(table, axis)] for axis in AXES},
    }


def draw_profiles(table: Table, axis: str) -> Canvas:
    """Draw the fraction of workloads and seeds solved against the time relative to the fastest method.

    For methods with a grid, only the tuned rows are drawn.
    """
    table = table._replace(methods=tuple(method for method in table.methods if "/" not in method.name))
    canvas = Canvas(figsize=(11, 5), layout="constrained")
    axes = canvas.subplots()
    found = profiles(table, axis)
    solved = {name: float(np.isfinite(ratios).mean()) for name, ratios in found.items()}
    for method in sorted((m for m in table.methods if m.name in found), key=lambda method: -solved[method.name]):
        ratios = found[method.name]
        times = np.concatenate([[1.0], ratios[ratios <= MAX_TIMES], [MAX_TIMES]])
        shares = [(ratios <= time).mean() for time in times]
        label = f"{method.title}: {solved[method.name]:.0%} solved"
        axes.step(times, shares, where="post", label=label, **_style(method))
    axes.set_xscale("log")
    axes.set_xlim(1, MAX_TIMES)
    axes.set_ylim(0, 1.02)
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1×", "2×", "5×", "10×", "20×", "50×", "100×"])
    axes.set_yticks(np.linspace(0, 1, 6), [f"{share:.0%}" for share in np.linspace(0, 1, 6)])
    axes.set_xlabel(f"{AXES[axis]} to the target, relative to the fastest optimizer")
    axes.set_ylabel("fraction of workloads and seeds solved")
    axes.spines[["top", "right"]].set_visible(False)
    if found:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9, handlelength=2.6)
    return canvas


def png(canvas: Canvas) -> bytes:
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
