"""The tables of the pages, as plain rows of text."""

from __future__ import annotations

import math
from typing import NamedTuple

from vsgd.bench.compare.judging import AXES, BARS, compared, has_failed, spread
from vsgd.bench.compare.methods import OURS
from vsgd.bench.compare.runs import setting_name
from vsgd.bench.compare.table import Cell, Table

SIGNS = {"better": "+", "not worse": "=", "worse": "−", None: "·"}
NOT_RUN = "not run"


class Grid(NamedTuple):
    """A table with a heading and a few words."""

    title: str
    words: str
    head: list[str]
    rows: list[list[str]]


def _final(cell: Cell | None) -> str:
    if cell is None:
        return NOT_RUN
    if has_failed(cell):
        return "failed"
    finals = [run.final for run in cell.runs.values()]
    mean, error = spread(finals)
    diverged = sum(math.isinf(final) for final in finals)
    text = f"diverged ({diverged}/{len(finals)})" if diverged else f"{mean:.4g} ± {error:.1g}"
    return text if cell.setting is None else f"{text} @{setting_name(cell.setting)}{'†' if cell.at_edge else ''}"


def finals(table: Table) -> Grid:
    rows = []
    for workload in table.workloads:
        cells = [table.cells.get((workload.name, method.name)) for method in table.methods]
        means = [math.inf if c is None else spread([r.final for r in c.runs.values()]).mean for c in cells]
        best = min(means)
        texts = [_final(cell) for cell in cells]
        marked = [
            f"**{text}**" if mean == best and math.isfinite(best) else text
            for text, mean in zip(texts, means, strict=True)
        ]
        rows.append([workload.title, *marked])
    words = (
        "Held-out loss at the end, mean over seeds ± standard error; the best of each row is bold. After @ stands the "
        "learning rate that was best on the first seed."
    )
    if edges := at_edges(table):
        words += f" † The best rate is at an end of the grid, so a wider one might do better: {', '.join(edges)}."
    return Grid("Final losses", words, ["workload", *(method.title for method in table.methods)], rows)


def at_edges(table: Table) -> list[str]:
    return [
        f"{method.title} on {workload.title}"
        for workload in table.workloads
        for method in table.methods
        if (cell := table.cells.get((workload.name, method.name))) is not None and cell.at_edge
    ]


def _met(name: str, counts: dict[str, int]) -> str:
    if (bar := BARS.get(name)) is None or not (total := sum(counts.values())):
        return ""
    reached = counts["better"] + (0 if bar.better else counts["not worse"])
    return "yes" if reached >= bar.share * total - 1e-9 else "no"


def verdicts(table: Table, axis: str) -> Grid:
    """Our default against each opponent: counts first, then a sign for each workload."""
    rows = []
    for method in table.methods:
        if method.name == OURS:
            continue
        said = [compared(table, workload, method.name, OURS, axis) for workload in table.workloads]
        counts = {word: said.count(word) for word in ("better", "not worse", "worse")}
        signs = [SIGNS[word] for word in said]
        if not sum(counts.values()):
            rows.append([method.title, *[NOT_RUN] * 3, "", "", *signs])
            continue
        bar = BARS[method.name].words if method.name in BARS else ""
        rows.append([method.title, *(str(count) for count in counts.values()), bar, _met(method.name, counts), *signs])
    words = (
        "vSGD's default against each opponent, workload by workload: + better, − worse by more than one standard error "
        "of the paired difference over seeds, = neither, · not known. What is not worse is better or equal. Bars "
        "count the workloads with a sign."
    )
    if axis != "updates":
        words += (
            " Both curves are read where the one that spent less ends, linearly between evaluation points. Grids keep "
            "the rate that was best at equal epochs. An online workload has no sign: less of a stream is other rows."
        )
    head = ["opponent", "better", "equal", "worse", "bar", "met", *(workload.name for workload in table.workloads)]
    return Grid(f"vSGD against each, at equal {AXES[axis]}", words, head, rows)


def endings(table: Table) -> Grid:
    """How many runs diverged or failed."""
    rows = []
    for method in table.methods:
        cells = [cell for (_, name), cell in table.cells.items() if name == method.name]
        runs = [run for cell in cells for run in cell.runs.values()]
        if not runs:
            rows.append([method.title, NOT_RUN, "", "", ""])
            continue
        outcomes = [run.outcome for run in runs]
        messages = sorted({run.message for run in runs if run.outcome == "failed"})
        counts = [str(outcomes.count(word)) for word in ("diverged", "failed")]
        rows.append([method.title, str(len(runs)), *counts, "; ".join(messages)])
    words = "Runs at the setting shown above. A failed run is one that raised an error or whose process died."
    return Grid("Diverged and failed runs", words, ["optimizer", "runs", "diverged", "failed", "why"], rows)


def settings(table: Table) -> Grid:
    rows = [
        [method.title, method.package, method.note, "sparse" if method.sparse else "dense"] for method in table.methods
    ]
    words = (
        "What each optimizer is. Those that accept sparse gradients get them from embeddings; the others get the same "
        "network with dense gradients."
    )
    return Grid("Optimizers", words, ["optimizer", "package", "setting", "gradients of embeddings"], rows)


def workloads(table: Table) -> Grid:
    rows = [
        [
            w.name,
            w.title,
            str(w.batch),
            str(w.epochs),
            table.absent.get(w.name, "bundled" if not w.files else "present"),
        ]
        for w in table.workloads
    ]
    words = "Names as `--workloads` takes them; data that are absent, and what to do about it."
    return Grid("Workloads", words, ["name", "workload", "minibatch", "epochs", "data"], rows)


def not_run(table: Table) -> str:
    """What every table lacks."""
    names = [w.title for w in table.workloads if not any((w.name, m.name) in table.cells for m in table.methods)]
    names += [m.title for m in table.methods if not any((w.name, m.name) in table.cells for w in table.workloads)]
    return f"Not run: {', '.join(names)}." if names else ""


def all_tables(table: Table) -> list[Grid]:
    return [
        finals(table),
        *(verdicts(table, axis) for axis in AXES),
        endings(table),
        settings(table),
        workloads(table),
    ]
