"""The tables of the pages, as rows of text."""

from __future__ import annotations

import math
from typing import NamedTuple

from vsgd_bench.compare.judging import (
    AT_EQUAL_UPDATES,
    AXES,
    COMPARISONS,
    MEASURES,
    SIGNS,
    TOLERANCE,
    Comparison,
    Difference,
    compared,
    count_signs,
    differences,
    effect,
    goal_of,
    has_failed,
    spread,
    target_ratios,
    targets,
    time_to,
)
from vsgd_bench.compare.methods import RATES, Method
from vsgd_bench.compare.ours import OURS
from vsgd_bench.compare.search import MAX_RATIO
from vsgd_bench.compare.table import Cell, Table, what_was_run
from vsgd_bench.compare.workloads import Workload

NOT_RUN = "not run"
SUMMARY_TITLE = "vSGD against each, at equal updates"


class Grid(NamedTuple):
    """A table with a title and an introduction."""

    title: str
    words: str
    head: list[str]
    rows: list[list[str]]


def _loss(cell: Cell | None, measure: str) -> str:
    """Return the mean over seeds, with ± standard error if there are several."""
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
    return "" if cell.setting.rate is None else f" @{cell.setting}"


def _mark_best(texts: list[str], cells: list[Cell | None], measure: str) -> list[str]:
    means = [math.inf if c is None else spread([getattr(r, measure) for r in c.runs.values()]).mean for c in cells]
    best = min(means, default=math.inf)
    marked = zip(texts, means, strict=True)
    return [f"**{text}**" if mean == best and math.isfinite(best) else text for text, mean in marked]


def _main_rows(table: Table) -> list[Method]:
    """Return one row per method: the tuned one, or the only one if nothing is tuned."""
    return [method for method in table.methods if "/" not in method.name]


def finals(table: Table) -> Grid:
    """Return an overview, with a row per workload and a column per method."""
    rows, methods = [], _main_rows(table)
    for workload in table.workloads:
        cells = [table.cells.get((workload.name, method.name)) for method in methods]
        texts = [_loss(cell, "final") + ("" if cell is None else _rate(cell)) for cell in cells]
        rows.append([workload.title, *_mark_best(texts, cells, "final")])
    words = (
        "Final held-out loss, mean over seeds ± standard error; the best of each row is bold. Tuned "
        "optimizers have their learning rate and weight decay after @, chosen on the first seed."
    )
    if limits := at_limits(table):
        words += f" A best rate is at a limit of the search, {RATES[0]:g} or {RATES[-1]:g}: {', '.join(limits)}."
    return Grid("Final losses", words, ["workload", *(method.title for method in methods)], rows)


def _time_to_target(table: Table, workload: Workload, cell: Cell | None, axis: str) -> str:
    """Return the mean over seeds, or the number of seeds that reach the target."""
    goals = targets(table, workload)
    if not goals or cell is None or has_failed(cell):
        return ""
    times = [time_to(cell.runs[seed], goal, axis, workload.online) for seed, goal in goals.items()]
    if arrived := [time for time in times if math.isfinite(time)]:
        return f"{spread(times).mean:.3g}" if arrived == times else f"{len(arrived)} of {len(times)} seeds"
    return "never"


def three_losses(table: Table) -> Grid:
    """Return the final, best and training loss of each workload and method."""
    rows = []
    for workload in table.workloads:
        run = [method for method in table.methods if (workload.name, method.name) in table.cells]
        cells: list[Cell | None] = [table.cells[workload.name, method.name] for method in run]
        columns = [_mark_best([_loss(cell, measure) for cell in cells], cells, measure) for measure in MEASURES]
        for method, cell, *losses in zip(run, cells, *columns, strict=True):
            times = [_time_to_target(table, workload, cell, axis) for axis in AXES]
            rows.append([workload.title, method.title, *losses, *times])
    words = (
        "Final held-out loss, lowest held-out loss at any evaluation point, and final loss on training rows; mean over "
        "seeds ± standard error, the best of each workload bold. If the final loss is above the lowest one, the "
        "optimizer has overfitted. The last columns are the budgets until the held-out loss is at most "
        f"{TOLERANCE:g} times the final one of tuned AdamW on the same seed, interpolated between evaluation points. "
        "Online, all three losses are the held-out loss."
    )
    head = ["workload", "optimizer", *MEASURES.values(), *(f"{words} to target" for words in AXES.values())]
    return Grid("Final, best and training loss", words, head, rows)


def costs(table: Table) -> Grid:
    """Return the cost of an update, with a row per workload and a column per method."""

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
        "Gradient evaluations per update, and milliseconds of one thread; means over seeds. Runs share the machine "
        "with others, so milliseconds are accurate to some tens of percent."
    )
    return Grid("Cost of an update", words, ["workload", *(method.title for method in _main_rows(table))], rows)


def at_limits(table: Table) -> list[str]:
    return [
        f"{method.title} on {workload.title}"
        for workload in table.workloads
        for method in table.methods
        if method.rates and (cell := table.cells.get((workload.name, method.name))) is not None and cell.at_limit
    ]


def _opponents(table: Table) -> list[Method]:
    return [method for method in table.methods if method.name != OURS]


def _rule(table: Table) -> str:
    """Return the sentence that defines when two losses differ."""
    if table.seeds == 1:
        return "There is one seed, so every difference counts, however small."
    return "Two losses are equal if the 95 % confidence interval of their ratio contains 1 (paired t over seeds)."


def _ratio(found: Difference | None) -> str:
    return "·" if found is None else f"{found.ratio:.3g} {SIGNS[found.sign]}"


def failures(table: Table) -> Grid:
    """Return the workloads on which vSGD is worse, with the opponents that are better."""
    rows = []
    for workload in table.workloads:
        lists = []
        for comparison in AT_EQUAL_UPDATES:
            found = [(m, compared(table, workload, m.name, comparison)) for m in _opponents(table)]
            worse = sorted(((d.ratio, m.title) for m, d in found if d is not None and d.sign == "worse"), reverse=True)
            lists.append("; ".join(f"{title} ({ratio:.3g})" for ratio, title in worse))
        if any(lists):
            rows.append([workload.title, *lists])
    words = (
        "Opponents with a lower loss than vSGD, and the ratio of vSGD's loss to theirs. "
        f"{_rule(table)} Workloads on which no opponent is better are not listed."
    )
    if ours := [cell for (_, name), cell in table.cells.items() if name == OURS]:
        diverged = sum(run.outcome == "diverged" for cell in ours for run in cell.runs.values())
        words += f" Runs of vSGD that diverged: {diverged}."
    return Grid("Where vSGD is worse", words, ["workload", *(f"{words} loss" for words in MEASURES.values())], rows)


def summary(table: Table) -> Grid:
    """Return the comparison of vSGD with each opponent by all three losses."""
    rows = []
    ours = sum(name == OURS for _, name in table.cells)
    for opponent in _opponents(table):
        row, goals = [opponent.title], []
        for comparison in AT_EQUAL_UPDATES:
            found = differences(table, opponent.name, comparison)
            if len(row) == 1:
                row.append(str(len(found)))
            counts = " / ".join(str(count) for count in count_signs(found).values())
            row += [counts, str(effect([each.ratio for each in found]))] if found else [NOT_RUN, ""]
            if found and (goal := goal_of(opponent, comparison)) is not None:
                reached = "reached" if goal.is_reached(found) else "**missed**"
                reached += f" on {len(found)} of {ours} workloads" if len(found) < ours else ""
                goals.append(f"{MEASURES[comparison.measure]} {goal.words}: {reached}")
        rows.append([*row, str(effect(target_ratios(table, opponent.name, "updates"))), "; ".join(goals)])
    words = (
        "Wins / ties / losses of vSGD's default against each opponent, by final, best and training loss. "
        f"{_rule(table)} A ratio is vSGD's loss divided by that of the opponent, as a geometric mean over workloads. "
        "Below 1, vSGD is better. In brackets is the 95 % bootstrap confidence interval over workloads. The last ratio "
        "is that of the updates until the target, the final loss of tuned AdamW. Ratios are clipped to "
        f"{1 / MAX_RATIO:g} … {MAX_RATIO:g}, also if a run diverges or misses the target."
    )
    head = ["opponent", "workloads"]
    for measure in MEASURES.values():
        head += [measure, f"{measure} ratio"]
    return Grid(SUMMARY_TITLE, words, [*head, "updates to target ratio", "goal"], rows)


def comparison_table(table: Table, comparison: Comparison) -> Grid:
    """Return the ratio of losses of vSGD and each opponent, with a sign, for each workload."""
    rows = []
    for opponent in _opponents(table):
        found = [compared(table, workload, opponent.name, comparison) for workload in table.workloads]
        known = [each for each in found if each is not None]
        counts = " / ".join(str(count) for count in count_signs(known).values()) if known else NOT_RUN
        mean = str(effect([each.ratio for each in known]))
        rows.append([opponent.title, counts, mean, *(_ratio(each) for each in found)])
    words = (
        "vSGD's loss divided by that of each opponent, as a geometric mean over seeds. + means that vSGD is better, "
        f"− worse, = equal, · unknown. {_rule(table)}"
    )
    if comparison.axis != "updates":
        words += (
            " Both losses are taken where the run with the smaller budget ends, interpolated between evaluation "
            "points. Settings were chosen at equal epochs. Online workloads are not compared."
        )
    head = ["opponent", "wins / ties / losses", "mean ratio", *(workload.name for workload in table.workloads)]
    title = f"vSGD against each, {MEASURES[comparison.measure]} loss at equal {AXES[comparison.axis]}"
    return Grid(title, words, head, rows)


def final_ratios(table: Table) -> Grid:
    """Return the ratios of final losses, with a row per method."""
    return comparison_table(table, Comparison("final", "updates"))


def endings(table: Table) -> Grid:
    """Return the numbers of runs that diverged or failed."""
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
    words = "Runs at the settings above. A failed run raised an error, or its process died."
    return Grid("Diverged and failed runs", words, ["optimizer", "runs", "diverged", "failed", "why"], rows)


def settings(table: Table) -> Grid:
    rows = []
    for method in _main_rows(table):
        first = f"rates from {method.rates[0]:.2g} to {method.rates[-1]:.2g}, and beyond" if method.rates else ""
        decays = f"; weight decay {', '.join(f'{decay:g}' for decay in method.decays)}" if method.decays else ""
        default = "" if method.default.rate is None else str(method.default)
        gradients = "sparse" if method.sparse else "dense"
        rows.append([method.title, method.package, method.note, default, first + decays, gradients])
    words = (
        "Description of each optimizer. Embeddings have sparse gradients if the optimizer supports them, otherwise "
        "dense ones."
    )
    head = ["optimizer", "package", "description", "default", "search", "gradients of embeddings"]
    return Grid("Optimizers", words, head, rows)


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
    words = "Names for `--workloads`, and whether the data are present."
    return Grid("Workloads", words, ["name", "workload", "minibatch", "epochs", "data"], rows)


def not_run(table: Table) -> str:
    """Return a sentence about workloads and methods that were not run; empty if there are none."""
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
    """Return the missing runs. Methods of a workload with the same missing runs share a row."""
    lacking: dict[tuple[str, str], list[str]] = {}
    for workload in table.workloads:
        for method in table.methods:
            reason = table.absent.get(method.name) or table.missing.get((workload.name, method.name))
            if reason:
                why = "; ".join(filter(None, [reason, table.absent.get(workload.name)]))
                lacking.setdefault((workload.title, why), []).append(method.title)
    everyone = len(table.methods)
    rows = [[w, "all" if len(names) == everyone else ", ".join(names), why] for (w, why), names in lacking.items()]
    words = (
        "These runs are in no table or plot. The same command without `--stored` trains them, and damaged ones again."
    )
    if table.chosen.file is not None:
        words += " A missing setting is chosen without `--rates`."
    return Grid("What is missing", words, ["workload", "optimizers", "what is missing"], rows)


def result_tables(table: Table) -> list[Grid]:
    return [
        failures(table),
        summary(table),
        finals(table),
        three_losses(table),
        *(comparison_table(table, comparison) for comparison in COMPARISONS),
        costs(table),
        endings(table),
    ]


def setting_tables(table: Table) -> list[Grid]:
    return [settings(table), workloads(table)]


def all_tables(table: Table) -> list[Grid]:
    """Return the tables of results and of settings."""
    return (result_tables(what_was_run(table)) if table.cells else []) + setting_tables(table)
