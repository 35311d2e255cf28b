"""Sensitivity of vSGD to its constants: the final loss with each constant halved and doubled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure as Canvas

from vsgd import NETWORKS
from vsgd_bench.compare import pages
from vsgd_bench.compare.curves import png
from vsgd_bench.compare.judging import Comparison, compared, effect
from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.ours import DEFAULT, constant_changed
from vsgd_bench.compare.suites import Suite
from vsgd_bench.compare.table import Table
from vsgd_bench.compare.tables import Grid
from vsgd_bench.compare.unseen import UNSEEN_WORKLOADS
from vsgd_bench.compare.workloads import WORKLOADS
from vsgd_bench.figures.figure import BLUE, GREY, ORANGE

NAMES = ("digits-mlp", "digits-autoencoder", "rotated", "vae", "mixer", "waves")
"""Six workloads that need no files."""

FACTORS = (0.5, 2.0)
COLORS = {0.5: BLUE, 2.0: ORANGE}
COARSE_TICKS, FINE_TICKS = (0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10), (0.5, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 2)
MARKERS = {0.5: "o", 2.0: "s"}

CONSTANTS = tuple(name for name in NETWORKS._fields if not isinstance(getattr(NETWORKS, name), bool))
"""The numeric constants. Switches cannot be halved."""


def name_of(constant: str, factor: float) -> str:
    return f"vsgd-{constant}-x{factor:g}"


def variants() -> tuple[Method, ...]:
    return tuple(constant_changed(name_of(name, factor), name, factor) for name in CONSTANTS for factor in FACTORS)


SENSITIVITY = Suite(
    "sensitivity",
    tuple(workload for workload in (*WORKLOADS, *UNSEEN_WORKLOADS) if workload.name in NAMES),
    (DEFAULT, *variants()),
    3,
    shared=("small", "unseen"),
)


def ratios(table: Table, constant: str, factor: float) -> dict[str, float]:
    """Return the final loss with a changed constant divided by that of the default, by workload."""
    found = {
        workload.name: compared(table, workload, name_of(constant, factor), Comparison("final", "updates"))
        for workload in table.workloads
    }
    return {name: 1 / each.ratio for name, each in found.items() if each is not None}


def sensitivity_table(table: Table) -> Grid:
    rows = []
    for constant in CONSTANTS:
        for factor in FACTORS:
            found = ratios(table, constant, factor)
            texts = [f"{found[w.name]:.3f}" if w.name in found else "not run" for w in table.workloads]
            value = f"{factor * getattr(NETWORKS, constant):g}"
            rows.append([f"`{constant}`", f"×{factor:g}", value, *texts, str(effect(list(found.values())))])
    words = (
        "Final held-out loss with one changed constant, divided by that of the default; a geometric mean over seeds. "
        "Below 1, the change helps. The last column is the geometric mean over workloads, with its bootstrap interval."
    )
    head = ["constant", "factor", "value", *(workload.name for workload in table.workloads), "mean ratio"]
    return Grid("Final loss relative to the default", words, head, rows)


def spread_of(values: Iterable[float]) -> float:
    """Return the largest change in either direction."""
    return max((abs(math.log(value)) for value in values), default=0.0)


def draw_sensitivity(table: Table) -> Canvas:
    """Draw a dot for each constant, factor and workload, and vertical bars at geometric means."""
    found = {(name, factor): ratios(table, name, factor) for name in CONSTANTS for factor in FACTORS}
    order = sorted(CONSTANTS, key=lambda name: max(spread_of(found[name, factor].values()) for factor in FACTORS))
    canvas = Canvas(figsize=(9, 0.42 * len(order) + 1.4), layout="constrained")
    axes = canvas.subplots()
    axes.axvline(1, color=GREY, lw=1)
    for row, name in enumerate(order):
        for factor in FACTORS:
            values = list(found[name, factor].values())
            height = row + (0.17 if factor > 1 else -0.17)
            style: dict[str, Any] = {
                "color": COLORS[factor],
                "marker": MARKERS[factor],
                "ls": "",
                "ms": 5,
                "alpha": 0.65,
            }
            axes.plot(values, [height] * len(values), **style, label=f"×{factor:g}" if row == 0 else None)
            if values:
                axes.plot([effect(values).mean], [height], color=COLORS[factor], marker="|", ms=13, mew=2.5)
    limit = 1.1 * max(spread_of(values.values()) for values in found.values()) or 0.1
    axes.set_xscale("log")
    axes.set_xlim(math.exp(-limit), math.exp(limit))
    candidates = COARSE_TICKS if limit > math.log(2) else FINE_TICKS
    ticks = [tick for tick in candidates if abs(math.log(tick)) <= limit]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel("final held-out loss, relative to the default (a dot per workload, a bar at the geometric mean)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="constant", loc="lower right", frameon=False)
    return canvas


def sensitivity_pages(table: Table) -> dict[str, str | bytes]:
    return {
        "results.md": pages.tables_only(table, pages.SENSITIVITY, [sensitivity_table(table)]),
        "sensitivity.png": png(draw_sensitivity(table)),
    }
