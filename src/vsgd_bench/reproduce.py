"""Compute, store and draw figures. Finished parts are reused, so an interrupted command can be continued."""

from __future__ import annotations

import io
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from vsgd.algorithms.paper import PAPER, VSGD_2012
from vsgd_bench import store
from vsgd_bench.figures import FIGURES, Figure, KeyNumber, Request, Results
from vsgd_bench.provenance import digest, installed, text_of

SOURCES = (
    "vsgd.core",
    "vsgd.algorithms.paper",
    "vsgd.algorithms.networks",
    "vsgd.reweight",
    "vsgd_bench.problems",
    "vsgd_bench.baselines",
    "vsgd_bench.one_coordinate",
    "vsgd_bench.simulate",
    "vsgd_bench.gain",
)
"""Modules that results depend on, in addition to the module of the figure."""

CONFIGS = {"vSGD-fd": PAPER._asdict(), "vSGD": VSGD_2012._asdict()}


class Reproduced(NamedTuple):
    """A figure with its picture and numbers."""

    figure: Figure
    png: bytes
    numbers: list[KeyNumber]
    seconds: float
    """Total time of computing its parts, in seconds."""
    data: dict[str, Any] | None
    """Data of its interactive part on the page, or None."""


def versions() -> dict[str, str]:
    packages = ("vsgd", "numpy", "numba", "scipy", "matplotlib")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _fingerprint(figure: Figure) -> str:
    """Return a digest of the code behind a figure. If it changes, the figure is computed again."""
    modules = [*SOURCES, figure.draw.__module__]
    files = [(name, installed(name)) for name in modules]
    return digest(f"{name}\n{text_of(file)}" for name, file in files if file is not None)


def _slug(part: str) -> str:
    return part.replace(" ", "_").replace("η", "eta").replace("γ", "gamma")


def _stored(figure: Figure, part: str, out: Path, request: Request) -> tuple[Path, dict[str, Any]]:
    """Return the path of a stored part, and the values that its record must have to be reused."""
    wanted = {"figure": figure.name, "part": part, **request._asdict(), "source": _fingerprint(figure)}
    return out / "results" / f"figure-{figure.name}" / _slug(part), wanted


def _assemble(figure: Figure, loaded: dict[str, tuple[store.Arrays, dict[str, Any]]], request: Request) -> Reproduced:
    results: Results = {part: arrays for part, (arrays, _) in loaded.items()}
    buffer = io.BytesIO()
    figure.draw(results, request).savefig(buffer, format="png", dpi=130)
    return Reproduced(
        figure=figure,
        png=buffer.getvalue(),
        numbers=figure.numbers(results, request),
        seconds=sum(origin["seconds"] for _, origin in loaded.values()),
        data=figure.data(results, request),
    )


def reproduce(names: list[str], out: Path, request: Request) -> list[Reproduced]:
    """Return the named figures, and other figures whose results are all stored in the folder."""
    work = [(FIGURES[name], part, task) for name in names for part, task in FIGURES[name].parts(request).items()]
    with tqdm(work, unit="part", disable=None) as bar:
        for figure, part, task in bar:
            bar.set_description(f"figure {figure.name}")
            path, wanted = _stored(figure, part, out, request)
            if store.load(path, wanted) is None:
                started = time.perf_counter()
                arrays = task()
                seconds = round(time.perf_counter() - started, 3)
                store.save(path, arrays, {**wanted, "configs": CONFIGS, "versions": versions(), "seconds": seconds})

    shown = []
    for figure in FIGURES.values():
        loaded = {part: store.load(*_stored(figure, part, out, request)) for part in figure.parts(request)}
        complete = {part: entry for part, entry in loaded.items() if entry is not None}
        if len(complete) == len(loaded):
            shown.append(_assemble(figure, complete, request))
            store.write_whole(out / f"figure-{figure.name}.png", shown[-1].png)
    return shown
