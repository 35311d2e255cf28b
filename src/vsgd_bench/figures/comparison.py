"""Figure 6: every algorithm on every elementary problem."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure as Canvas

from vsgd_bench.baselines import Algorithm, adagrad, natural_gradient, sgd, vsgd, vsgd_fd
from vsgd_bench.figures.figure import COLORS as LINE_COLORS
from vsgd_bench.figures.figure import Figure, KeyNumber, Request, Results, loss_ratio, run_problems
from vsgd_bench.figures.squares import COLORS, MAX_DECADES, square
from vsgd_bench.problems import ELEMENTARY, SHAPES, Elementary
from vsgd_bench.simulate import powers_of_two
from vsgd_bench.store import Arrays

RATES = (0.01, 0.1, 1.0, 10.0)
GROUPS: dict[str, tuple[Algorithm, ...]] = {
    "SGD\nη₀": tuple(sgd(rate, 0.0) for rate in RATES),
    "SGD\nη₀ / (1+t)": tuple(sgd(rate, 1.0) for rate in RATES),
    "AdaGrad": tuple(adagrad(rate) for rate in RATES),
    "natural\ngradient": tuple(natural_gradient(rate) for rate in RATES),
    "vSGD": (vsgd(),),
    "vSGD-fd": (vsgd_fd(),),
}
MINIBATCHES = (1, 10)
CELL, GAP, BREAK = 22, 2, 10
"""Width of a square, of the gap between squares, and of the gap between groups, in pixels."""
FRAME = (0.145, 0.075, 0.845, 0.87)
"""Position of the squares in the picture: left, bottom, width and height as fractions of the picture."""
QUANTILES = (0.1, 0.5, 0.9)
MAX_SAMPLES = 32
"""The largest minibatch that can be simulated on the page."""

CAPTION = """Each square shows all runs of one algorithm on one problem, drawn as in Figure 5.
Columns are problems: four shapes of loss, noise σ² decreasing from left to right, and for each noise level the
curvature setting A = 10, 1, 0.1. Rows are algorithms and their settings. Each has two rows, for minibatches of n = 1
(upper) and n = 10 (lower). Blue is a loss below the initial one, red is above, white is equal. Each column has its own
logarithmic scale, symmetric around the initial loss. It ends at the best final median of the column, or at four
decades. SGD, AdaGrad and the natural gradient need different settings for different columns. vSGD fails on abs,
whose samples have no curvature. vSGD-fd, at the bottom, has no setting. It fails once, on gauss with A = 10, σ² = 0.1
and n = 1: the probe δ = ḡ reaches beyond the bowl and measures a flat loss, so the step is too long. Two patterns come
from starting at a distance of exactly 1. Steps of fixed length on abs return to the start at every even update
(white). AdaGrad's first step with η = 1 happens to reach the optimum (a dark first column)."""


class Row(NamedTuple):
    group: str
    algorithm: Algorithm
    n: int

    @property
    def key(self) -> str:
        return f"{self.algorithm.name} n={self.n}"


ROWS = [Row(group, a, n) for group, algorithms in GROUPS.items() for a in algorithms for n in MINIBATCHES]


def compute(row: Row, request: Request) -> Arrays:
    return {"theta": run_problems(ELEMENTARY, row.algorithm, row.n, request)}


def final_medians(results: Results) -> dict[str, Any]:
    """Return the median final loss ratio of each row on the 36 problems."""
    return {
        row.key: np.array(
            [np.median(loss_ratio(p, t[:, -1])) for p, t in zip(ELEMENTARY, results[row.key]["theta"], strict=True)]
        )
        for row in ROWS
    }


def column_scales(results: Results) -> Any:
    """Return the number of decades that the colors of each column span: those of its best row, at least 0.5."""
    with np.errstate(divide="ignore"):
        best = -np.log10(np.min(list(final_medians(results).values()), axis=0))
    return np.clip(best, 0.5, MAX_DECADES)


def _places(groups: list[Any]) -> list[int]:
    """Return the first pixel of each square. A wider gap separates the groups."""
    places, at = [], 0
    for i, group in enumerate(groups):
        at += 0 if i == 0 else CELL + (GAP if group == groups[i - 1] else BREAK)
        places.append(at)
    return places


def _tops() -> list[int]:
    return _places([row.group for row in ROWS])


def _lefts() -> list[int]:
    return _places([problem.shape for problem in ELEMENTARY])


def draw(results: Results, request: Request) -> Canvas:
    scales = column_scales(results)
    tops, lefts = _tops(), _lefts()
    image = np.ones((tops[-1] + CELL, lefts[-1] + CELL, 4))
    colors = colormaps[COLORS]
    for top, row in zip(tops, ROWS, strict=True):
        for left, problem, scale, theta in zip(lefts, ELEMENTARY, scales, results[row.key]["theta"], strict=True):
            values = square(loss_ratio(problem, theta)[:, 1:], CELL)
            columns = np.linspace(0, values.shape[1], CELL, endpoint=False).astype(int)
            image[top : top + CELL, left : left + CELL] = colors(0.5 + values[:, columns] / (2 * scale))

    canvas = Canvas(figsize=(14, 14.4))
    axis = canvas.add_axes(FRAME)
    axis.imshow(image, interpolation="nearest", aspect="auto")
    axis.set_axis_off()
    _label_rows(axis, tops)
    _label_columns(axis, lefts, scales, image.shape[0])
    _legend(canvas, request)
    return canvas


def _label_rows(axis: Any, tops: list[int]) -> None:
    for group in GROUPS:
        own = [top for top, row in zip(tops, ROWS, strict=True) if row.group == group]
        axis.text(-62, (own[0] + own[-1] + CELL) / 2, group, ha="right", va="center", fontsize=11, weight="bold")
    for top, row in zip(tops, ROWS, strict=True):
        axis.text(-4, top + CELL / 2, f"n={row.n}", ha="right", va="center", fontsize=6, color="0.35")
        if row.n == MINIBATCHES[0] and " " in row.algorithm.name:
            setting = f"{row.algorithm.params.rate:g}"
            axis.text(-32, top + CELL + GAP / 2, setting, ha="right", va="center", fontsize=9)


def _label_columns(axis: Any, lefts: list[int], scales: Any, height: int) -> None:
    for shape in SHAPES:
        own = [left for left, p in zip(lefts, ELEMENTARY, strict=True) if p.shape == shape]
        axis.text((own[0] + own[-1] + CELL) / 2, -42, shape, ha="center", fontsize=13, weight="bold")
    for i, (left, problem, scale) in enumerate(zip(lefts, ELEMENTARY, scales, strict=True)):
        center = left + CELL / 2
        if i % 3 == 1:
            axis.text(center, -24, f"σ² = {problem.noise:g}", ha="center", fontsize=8)
            axis.plot([center - 1.5 * CELL, center + 1.5 * CELL], [-20, -20], color="0.6", lw=0.8, clip_on=False)
        axis.text(center, -6, f"A={problem.scale:g}", ha="center", fontsize=6.5)
        axis.text(center, height + 12, f"{scale:.1f}", ha="center", fontsize=6.5, color="0.35")
    axis.text(-4, height + 12, "decades to full color", ha="right", fontsize=6.5, color="0.35")


def _legend(canvas: Canvas, request: Request) -> None:
    bar = canvas.add_axes((0.62, 0.036, 0.3, 0.012))
    bar.imshow(np.linspace(0, 1, 256)[None], cmap=COLORS, aspect="auto")
    bar.set_yticks([])
    bar.set_xticks([0, 127.5, 255], ["best final median\nof the column", "initial\nloss", "as far above"], fontsize=8)
    bar.tick_params(length=2)
    canvas.text(0.145, 0.041, f"In each square: updates 1 … {request.updates} to the right (log₂),", fontsize=10)
    canvas.text(0.145, 0.028, f"{request.runs} runs from worst (top) to best.", fontsize=10)
    canvas.text(0.145, 0.978, "Excess loss of every algorithm on 36 elementary problems", fontsize=15, weight="bold")


def numbers(results: Results, request: Request) -> list[KeyNumber]:
    medians = final_medians(results)
    shapes = np.array([problem.shape for problem in ELEMENTARY])
    updates = [len(ELEMENTARY) * request.runs * request.updates for _ in ROWS]
    gradients = sum(count * row.n for count, row in zip(updates, ROWS, strict=True))
    rows = [KeyNumber("updates, sample gradients", f"{sum(updates):,}, {gradients:,}")]
    for n in MINIBATCHES:
        ours, before = medians[f"vSGD-fd n={n}"], medians[f"vSGD n={n}"]
        settings = [medians[row.key] for row in ROWS if row.group.startswith("SGD") and row.n == n]
        times = ours[shapes == "quad"] / np.min(settings, axis=0)[shapes == "quad"]
        worse = [f"{p.shape} A={p.scale:g} σ²={p.noise:g}" for p, m in zip(ELEMENTARY, ours, strict=True) if not m < 1]
        rows += [
            KeyNumber(
                f"quad, n = {n}: final loss of vSGD-fd over the best of 8 SGD settings in hindsight",
                f"{times.min():.2f} to {times.max():.2f}",
                "at most 3, on 9 of 9",
            ),
            KeyNumber(
                f"n = {n}: problems where vSGD-fd ends below the initial loss (median run)",
                f"{len(ELEMENTARY) - len(worse)} of {len(ELEMENTARY)}"
                + (f"; not on {', '.join(worse)}" if worse else ""),
                "at least 35",
            ),
            KeyNumber(
                f"abs, n = {n}: problems where the median run ends above the initial loss",
                f"vSGD {np.sum(before[shapes == 'abs'] > 1)} of 9, vSGD-fd {np.sum(ours[shapes == 'abs'] > 1)} of 9",
            ),
        ]
    return rows


def _centidecades(problem: Elementary, theta: Any) -> list[list[int]]:
    """Return quantiles over runs of log₁₀ of the loss ratio, in hundredths, at each checkpoint."""
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log10(loss_ratio(problem, theta)), -2 * MAX_DECADES, 2 * MAX_DECADES)
    quantiles = np.quantile(100 * logs, QUANTILES, axis=0, method="nearest")
    return [[round(value) for value in row] for row in quantiles.tolist()]


def data(results: Results, request: Request) -> dict[str, Any]:
    """Return the learning curves of every square, and the positions of the squares in the picture."""
    left, bottom, width, height = FRAME
    tops, lefts = _tops(), _lefts()
    return {
        "rows": [{"algorithm": row.algorithm.name, "n": row.n} for row in ROWS],
        "columns": [problem._asdict() for problem in ELEMENTARY],
        "checkpoints": powers_of_two(request.updates),
        "quantiles": [
            [
                _centidecades(problem, theta)
                for problem, theta in zip(ELEMENTARY, results[row.key]["theta"], strict=True)
            ]
            for row in ROWS
        ],
        "layout": {
            **{"tops": tops, "lefts": lefts, "cell": CELL, "width": lefts[-1] + CELL, "height": tops[-1] + CELL},
            "box": {"left": left, "top": 1 - bottom - height, "width": width, "height": height},
        },
        "colors": LINE_COLORS,
        "limits": {"n": MAX_SAMPLES},
    }


FIGURE = Figure(
    name="6",
    title="All algorithms on all elementary problems",
    caption=CAPTION,
    parts=lambda request: {row.key: partial(compute, row, request) for row in ROWS},
    draw=draw,
    numbers=numbers,
    data=data,
)
