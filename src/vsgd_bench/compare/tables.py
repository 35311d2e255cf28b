"""The tables of the pages, as plain rows of text."""

from __future__ import annotations

import math
from typing import NamedTuple

from vsgd_bench.compare.judging import (
    AT_EQUAL_UPDATES,
    AXES,
    COMPARISONS,
    MEASURES,
    TOLERANCE,
    Comparison,
    compared,
    count_verdicts,
    has_failed,
    spread,
    targets,
    time_to,
)
from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.ours import OURS
from vsgd_bench.compare.runs import setting_name
from vsgd_bench.compare.table import Cell, Table, what_was_run
from vsgd_bench.compare.workloads import Workload

SIGNS = {"better": "+", "not worse": "=", "worse": "−", None: "·"}
NOT_RUN = "not run"


class Grid(NamedTuple):
    """A table with a heading and a few words."""

    title: str
    words: str
    head: list[str]
    rows: list[list[str]]


def _loss(cell: Cell | None, measure: str) -> str:
    """Mean ± standard error over seeds, if there are several."""
    if cell is None:
        return NOT_RUN
    if has_failed(cell):
        return "failed"
    losses = [getattr(run, measure) for run in cell.runs.values()]
    mean, error = spread(losses)
    diverged = sum(math.isinf(loss) for loss in losses)
    if diverged:
        return f"diverged ({diverged}/{len(losses)})"
    return f"{mean:.4g} ± {error:.1g}" if len(losses) > 1 else f"{mean:.4g}"


def _rate(cell: Cell) -> str:
    return "" if cell.setting is None else f" @{setting_name(cell.setting)}{'†' if cell.at_edge else ''}"


def _mark_best(texts: list[str], cells: list[Cell | None], measure: str) -> list[str]:
    means = [math.inf if c is None else spread([getattr(r, measure) for r in c.runs.values()]).mean for c in cells]
    best = min(means, default=math.inf)
    marked = zip(texts, means, strict=True)
    return [f"**{text}**" if mean == best and math.isfinite(best) else text for text, mean in marked]


def finals(table: Table) -> Grid:
    """An overview: a row for each workload, a column for each method."""
    rows = []
    for workload in table.workloads:
        cells = [table.cells.get((workload.name, method.name)) for method in table.methods]
        texts = [_loss(cell, "final") + ("" if cell is None else _rate(cell)) for cell in cells]
        rows.append([workload.title, *_mark_best(texts, cells, "final")])
    words = (
        "Held-out loss at the end, mean over seeds ± standard error; the best of each row is bold. After @ stands the "
        "learning rate that was best on the first seed."
    )
    if edges := at_edges(table):
        words += f" † The best rate is at an end of the grid, so a wider one might do better: {', '.join(edges)}."
    return Grid("Final losses", words, ["workload", *(method.title for method in table.methods)], rows)


def _time_to_target(table: Table, workload: Workload, cell: Cell | None, axis: str) -> str:
    """Mean over seeds, or how many of them arrive."""
    goals = targets(table, workload)
    if not goals or cell is None or has_failed(cell):
        return ""
    times = [time_to(cell.runs[seed], goal, axis, workload.online) for seed, goal in goals.items()]
    if arrived := [time for time in times if math.isfinite(time)]:
        return f"{spread(times).mean:.3g}" if arrived == times else f"{len(arrived)} of {len(times)} seeds"
    return "never"


def three_losses(table: Table) -> Grid:
    """Side by side: what is reached on new rows, the best that it was, and how well the rows seen are fitted."""
    rows = []
    for workload in table.workloads:
        run = [method for method in table.methods if (workload.name, method.name) in table.cells]
        cells: list[Cell | None] = [table.cells[workload.name, method.name] for method in run]
        columns = [_mark_best([_loss(cell, measure) for cell in cells], cells, measure) for measure in MEASURES]
        for method, cell, *losses in zip(run, cells, *columns, strict=True):
            times = [_time_to_target(table, workload, cell, axis) for axis in AXES]
            rows.append([workload.title, method.title, *losses, *times])
    words = (
        "Held-out loss at the end, the lowest held-out loss at any evaluation point, and the loss at the end on rows "
        "that were learned from; mean over seeds ± standard error, the best of each workload bold. An optimizer "
        "that fits faster over-fits sooner: then the first is above the second. Behind them, what is spent until "
        f"the held-out loss is {TOLERANCE:g} times the final one of the best AdamW with cosine decay on the same seed, "
        "linearly between evaluation points. Online, all three are the held-out loss."
    )
    head = ["workload", "optimizer", *MEASURES.values(), *(f"{words} to target" for words in AXES.values())]
    return Grid("Held-out, best on the way and training loss", words, head, rows)


def costs(table: Table) -> Grid:
    """What an update takes: a row for each workload, a column for each method."""

    def cost(cell: Cell | None) -> str:
        if cell is None:
            return NOT_RUN
        runs = [run for run in cell.runs.values() if run.updates and run.updates[-1]]
        if not runs:
            return "failed"
        gradients = spread([run.evaluations[-1] / run.updates[-1] for run in runs]).mean
        milliseconds = spread([1000 * run.seconds[-1] / run.updates[-1] for run in runs]).mean
        return f"{gradients:.2f}, {milliseconds:.3g} ms"

    rows = [
        [workload.title, *(cost(table.cells.get((workload.name, method.name))) for method in table.methods)]
        for workload in table.workloads
    ]
    words = (
        "Gradients a step, and milliseconds of one thread, means over seeds. Milliseconds of runs that were not alone "
        "on the machine, or not on the same, are good to some tens of percent."
    )
    return Grid("What an update takes", words, ["workload", *(method.title for method in table.methods)], rows)


def at_edges(table: Table) -> list[str]:
    return [
        f"{method.title} on {workload.title}"
        for workload in table.workloads
        for method in table.methods
        if (cell := table.cells.get((workload.name, method.name))) is not None and cell.at_edge
    ]


def _opponents(table: Table) -> list[Method]:
    return [method for method in table.methods if method.name != OURS]


def _said(table: Table, opponent: Method, comparison: Comparison) -> list[str | None]:
    return [compared(table, workload, opponent.name, comparison) for workload in table.workloads]


def _rule(table: Table) -> str:
    """Return the sentence that says when two losses count as different."""
    if table.seeds == 1:
        return "There is one seed, so every difference counts, however small."
    return "Two losses are equal if they differ by at most one standard error of the paired difference over seeds."


def _judged_by_bar(comparison: Comparison, opponent: Method, counts: dict[str, int]) -> list[str]:
    """Return the goal against an opponent and whether it is reached."""
    if (bar := comparison.bars.get(opponent.name)) is None or not any(counts.values()):
        return ["", ""]
    return [bar.words, "yes" if bar.is_met(counts) else "no"]


def summary(table: Table) -> Grid:
    """Our default against each opponent by all three losses."""
    rows = []
    for opponent in _opponents(table):
        row = [opponent.title]
        for comparison in AT_EQUAL_UPDATES:
            counts = count_verdicts(_said(table, opponent, comparison))
            text = " / ".join(str(count) for count in counts.values()) if any(counts.values()) else NOT_RUN
            row += [text, *_judged_by_bar(comparison, opponent, counts)]
        rows.append(row)
    words = (
        "Wins / ties / losses of vSGD's default against each opponent, by final, best and training loss. "
        f"{_rule(table)} The goal is the share of workloads that vSGD is meant to win or not to lose."
    )
    head = ["opponent"]
    for comparison in AT_EQUAL_UPDATES:
        head += [MEASURES[comparison.measure], "goal", "reached"]
    return Grid("vSGD against each, at equal updates: better / equal / worse", words, head, rows)


def verdicts(table: Table, comparison: Comparison) -> Grid:
    """Our default against each opponent: counts first, then a sign for each workload."""
    rows = []
    for opponent in _opponents(table):
        said = _said(table, opponent, comparison)
        counts = count_verdicts(said)
        texts = [str(count) for count in counts.values()] if any(counts.values()) else [NOT_RUN] * 3
        signs = [SIGNS[word] for word in said]
        rows.append([opponent.title, *texts, *_judged_by_bar(comparison, opponent, counts), *signs])
    words = (
        "vSGD's default against each opponent, workload by workload: + better, − worse, = equal, · not known. "
        f"{_rule(table)} Shares in the goals are of the workloads with a sign."
    )
    if comparison.axis != "updates":
        words += (
            " Both curves are read where the one that spent less ends, linearly between evaluation points. Grids keep "
            "the rate that was best at equal epochs. An online workload has no sign: less of a stream is other rows."
        )
    head = ["opponent", "better", "equal", "worse", "goal", "reached", *(workload.name for workload in table.workloads)]
    title = f"vSGD against each, {MEASURES[comparison.measure]} loss at equal {AXES[comparison.axis]}"
    return Grid(title, words, head, rows)


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
        [method.title, method.package, method.setting_words, "sparse" if method.sparse else "dense"]
        for method in table.methods
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


def outdated(table: Table) -> str:
    """Return a sentence about the runs that were trained with another version; empty if there are none."""
    counts = {}
    for method in table.methods:
        cells = [cell for (_, name), cell in table.cells.items() if name == method.name]
        counts[method.title] = sum(cell.outdated for cell in cells), sum(len(cell.runs) for cell in cells)
    found = [f"{title} ({count} of {total})" for title, (count, total) in counts.items() if count]
    if all(count == total for count, total in counts.values()):
        found = [f"all {sum(total for _, total in counts.values())}"] if found else []
    return f"Runs trained with another version of the source or of a package: {', '.join(found)}." if found else ""


def missing(table: Table) -> Grid:
    """What is not stored, with the methods of a workload that lack the same in one row."""
    lacking: dict[tuple[str, str], list[str]] = {}
    for workload in table.workloads:
        for method in table.methods:
            said = table.absent.get(method.name) or table.missing.get((workload.name, method.name))
            if said:
                why = "; ".join(filter(None, [said, table.absent.get(workload.name)]))
                lacking.setdefault((workload.title, why), []).append(method.title)
    everyone = len(table.methods)
    rows = [[w, "all" if len(names) == everyone else ", ".join(names), why] for (w, why), names in lacking.items()]
    words = "These are in no table or drawing. The same command computes them; damaged runs are computed again."
    if table.given is not None:
        words += " Where there is no rate, one is chosen without `--rates`."
    return Grid("What is missing", words, ["workload", "optimizers", "what is missing"], rows)


def result_tables(table: Table) -> list[Grid]:
    return [
        summary(table),
        finals(table),
        three_losses(table),
        *(verdicts(table, comparison) for comparison in COMPARISONS),
        costs(table),
        endings(table),
    ]


def setting_tables(table: Table) -> list[Grid]:
    return [settings(table), workloads(table)]


def all_tables(table: Table) -> list[Grid]:
    """Results of what was run, and the settings of all."""
    return (result_tables(what_was_run(table)) if table.cells else []) + setting_tables(table)
