"""An additional figure: learning rates rise again after the data change, as the paper claims."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from vsgd_bench.baselines import Algorithm, adagrad, sgd, vsgd_fd
from vsgd_bench.figures.figure import BLUE, GREEN, ORANGE, RED, Figure, KeyNumber, Request, Results
from vsgd_bench.problems import Elementary
from vsgd_bench.simulate import draw_noise, simulate
from vsgd_bench.store import Arrays

PROBLEM = Elementary("quad", 1.0, 1.0)
JUMP = 5.0
ALGORITHMS: tuple[tuple[Algorithm, str], ...] = (
    (vsgd_fd(), BLUE),
    (sgd(1.0, 1.0), RED),
    (sgd(0.1, 0.0), GREEN),
    (adagrad(1.0), ORANGE),
)

CAPTION = """A noisy quadratic whose optimum jumps by 5 after half of the updates. Left: median excess loss of all runs.
Right: median learning rate. While the optimum does not move, vSGD-fd reduces its rate as noise begins to dominate. It
increases the rate after the jump, and reduces it again near the new optimum. A rate that decays with time is too small
after the jump. A constant rate recovers fastest, but its loss stays high. AdaGrad can only reduce its rate. The rate is
larger before the jump, at the cost of a higher loss."""


def compute(algorithm: Algorithm, request: Request) -> Arrays:
    updates = 2 * request.updates
    noise = draw_noise(request.seed, range(request.runs), updates, 1)
    centers = JUMP * (np.arange(updates) >= request.updates)
    track = simulate(PROBLEM, algorithm, noise, list(range(updates + 1)), centers)
    offset = track.theta - np.append(centers, JUMP)
    return {"loss": np.median(PROBLEM.excess_loss(offset), axis=0), "rate": np.median(track.rate, axis=0)}


def recovery(loss: Any, request: Request) -> int | None:
    """Return the number of updates after the jump until the median loss is below 1 % of that at the jump."""
    after = loss[request.updates :]
    below = np.flatnonzero(after < 0.01 * PROBLEM.excess_loss(JUMP))
    return int(below[0]) if len(below) else None


def draw(results: Results, request: Request) -> Canvas:
    canvas = Canvas(figsize=(11, 3.8), layout="constrained")
    left, right = canvas.subplots(1, 2)
    for algorithm, color in ALGORITHMS:
        arrays = results[algorithm.name]
        left.plot(arrays["loss"], color=color, lw=1.6, label=algorithm.name)
        right.plot(np.arange(1, len(arrays["rate"])), arrays["rate"][1:], color=color, lw=1.6)
    for axis in (left, right):
        axis.axvline(request.updates, color="0.5", lw=0.8, ls=":")
        axis.set(yscale="log", xlabel="updates")
        axis.grid(alpha=0.25)
    left.set(ylabel="median excess loss", ylim=(1e-4, None))
    right.set_ylabel("median learning rate")
    left.legend(frameon=False, fontsize=9)
    return canvas


def numbers(results: Results, request: Request) -> list[KeyNumber]:
    rows = []
    for algorithm, _ in ALGORITHMS:
        updates = recovery(results[algorithm.name]["loss"], request)
        value = f"{updates}" if updates is not None else f"not within {request.updates}"
        expected = "below 100" if algorithm.name == "vSGD-fd" else ""
        rows.append(KeyNumber(f"{algorithm.name}: updates until 1 % of the jump's loss is left", value, expected))
    rate = results[vsgd_fd().name]["rate"]
    rise = rate[request.updates : request.updates + 100].max() / rate[request.updates]
    rows.append(KeyNumber("vSGD-fd: rise of the median rate after the jump", f"×{rise:.0f}", "above 1"))
    return rows


def data(results: Results, request: Request) -> dict[str, Any]:
    algorithms = [(algorithm.name, color) for algorithm, color in ALGORITHMS]
    return {"problem": PROBLEM._asdict(), "jump": JUMP, "updates": request.updates, "algorithms": algorithms}


FIGURE = Figure(
    name="drift",
    title="Rates rise again when the data drifts",
    caption=CAPTION,
    parts=lambda request: {a.name: partial(compute, a, request) for a, _ in ALGORITHMS},
    draw=draw,
    numbers=numbers,
    data=data,
)
