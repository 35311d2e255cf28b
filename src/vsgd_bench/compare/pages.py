"""The comparison as one page that needs nothing else, and its tables as Markdown."""

from __future__ import annotations

import re
import shlex
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from vsgd import __version__
from vsgd.errors import one_line
from vsgd_bench import web
from vsgd_bench.compare import curves
from vsgd_bench.compare.judging import TOLERANCE
from vsgd_bench.compare.table import Table, what_was_run
from vsgd_bench.compare.tables import Grid, all_tables, missing, not_run, outdated

GRIDS = (
    "Settings are searched on the first seed: a grid of learning rates grows by factors of √10 until the best rate is "
    "not at an end, then weight decay is searched at this rate, then the rate again at the best decay. The setting "
    "with the lowest final held-out loss runs on all seeds. Selection by the reported loss favors the tuned optimizers."
)
SETTLED = (
    "The constants of vSGD's default were chosen in trials on some of the small and large networks, by held-out losses "
    "of the first seeds. Momentum and weight decay were also chosen on five unseen networks (adding, waves, diabetes, "
    "mixer, encoder) and six problems of science (all but the rod). `docs/laboratory.md` lists trials. The opponents' "
    "defaults were chosen elsewhere."
)
PROTOCOL = (
    "Every optimizer starts a seed from the same weights and sees the same minibatches in the same order.",
    GRIDS,
    "Evaluation uses the weights that the optimizer's authors recommend: averages for Schedule-Free, DoG and AdamW "
    "with EMA, with the statistics of BatchNorm recomputed from 20 minibatches.",
    "Seconds are processor time of one thread, without evaluation and compilation. Runs side by side share caches, so "
    "they are accurate to some tens of percent.",
    "Schedules (warm-up, cosine decay) know the number of updates. vSGD knows the number of updates per epoch if rows "
    "are repeated.",
    "The training loss is that of 2,000 training rows, at the end and at the weights of the held-out loss. The "
    "difference of the two is overfitting.",
    "Gradient evaluations are counted where the loss is computed; vSGD may take more than one an update.",
    "A loss that is not finite ends a run as diverged: its loss is infinite.",
    SETTLED,
    "Online, rows come once and in order; the loss is that of the next rows before they are learned from, and the "
    "final loss is the mean over the stream.",
)
LONG = 50
"""Characters after which a cell may be broken into lines."""

PROFILE = (
    f"For each workload and seed the target is {TOLERANCE:g} times the final loss of tuned AdamW with cosine decay. "
    "A curve shows on which share of workloads and seeds an optimizer reaches it within a multiple of the time of the "
    "fastest optimizer. High is good: the left shows how often an optimizer is (nearly) the fastest, the right how "
    "often it reaches the target at all. A miss counts as infinite. Tuned AdamW reaches the target by definition."
)

CURVES = (
    "Mean over seeds; the band reaches from the best to the worst seed. The dotted line is the mean target. Curves "
    "that diverge leave the picture. Online, the mean loss so far is drawn."
)


class Page(NamedTuple):
    """What a page says before its tables, and the arguments that make it."""

    title: str
    words: str
    flag: str = ""
    constants: str = SETTLED
    """Where those of vSGD come from."""


SMALL = Page(
    "Optimizers on small networks, side by side",
    "vSGD has nothing to tune. An optimizer with a learning rate has three rows: tuned on each workload, at the one "
    "setting that is best for all workloads in hindsight, and at its defaults. The others run at their defaults. The "
    "protocol is in `docs/protocol.md`. What vSGD is worse at comes first.",
)
SCIENCE = Page(
    "Optimizers on problems of science, side by side",
    f"Equations, signals, molecules, tables and control instead of images and text. {SMALL.words}",
    " --suite science",
    "No constant of vSGD was chosen on these problems.",
)
LARGE = Page("Optimizers on larger networks, side by side", SMALL.words, " --suite large")
UNSEEN = Page(
    "Optimizers on unseen networks, side by side",
    f"Networks on which vSGD was not developed. {SMALL.words}",
    " --suite unseen",
    "No constant of vSGD's rates was settled on these networks, nor changed after they were first run. How running "
    "statistics of BatchNorm follow the weights was settled on the depthwise CNN, among others.",
)
QUICK = Page(
    SMALL.title,
    "**This is the quick version: few workloads and optimizers, and a third of the epochs. It shows what the command "
    f"does, not who is better.** {SMALL.words}",
    " --quick",
)
SENSITIVITY = Page(
    "Sensitivity to the constants",
    "Each constant of vSGD's default, halved and doubled.",
    " --sensitivity",
)
ABLATED = Page(
    "What each deviation from the paper is for",
    "vSGD's default for networks, and the same with one deviation from the pseudocode taken back at a time.",
    " --ablations",
)
STRESS = Page("Made harder, nothing tuned", "Does the default ever diverge?", " --stress")


def command(table: Table, page: Page) -> str:
    file = table.chosen.file
    rates = "" if file is None else f" --rates {one_line(shlex.quote(str(file)))}"
    return f"vsgd compare{page.flag} --seeds {table.seeds}{rates}"


def protocol(table: Table, page: Page) -> list[str]:
    """How it was measured, also where the rates were chosen if that was not here."""
    instead = {SETTLED: page.constants}
    if table.chosen.file is not None:
        instead[GRIDS] = (
            "Settings were chosen in an earlier comparison, by the lowest final held-out loss on the first seed, and "
            f"are in `{table.chosen.file_name}`; without `--rates` they are searched again. Selection by the reported "
            "loss favors the tuned optimizers."
        )
    return [instead.get(text, text) for text in PROTOCOL]


def origin(table: Table, page: Page) -> str:
    """What produced the numbers of a table."""
    packages = ["torch", *sorted({method.package for method in table.methods} - {"vsgd", "torch"})]
    made = [f"vsgd {__version__}", *(f"{name} {number}" for name in packages if (number := _version(name)))]
    seeds = "1 seed" if table.seeds == 1 else f"{table.seeds} seeds"
    return f"`{command(table, page)}`, {seeds}; {', '.join(made)}. {not_run(table)}".strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def tables_only(table: Table, page: Page, grids: list[Grid]) -> str:
    """A page of these tables, as Markdown."""
    return "\n".join([*_opening(table, page), *_sections(grids, origin(table, page)), ""])


def markdown(table: Table, page: Page) -> str:
    """All tables, and how they were measured."""
    measured = ["", "## How it was measured", "", *(f"- {text}" for text in protocol(table, page))]
    lacking = missing(table)
    grids = all_tables(table) + ([lacking] if lacking.rows else [])
    return "\n".join([*_opening(table, page), *_sections(grids, origin(table, page)), *measured, ""])


def _opening(table: Table, page: Page) -> list[str]:
    lines = [f"# {page.title}", "", f"{page.words} Written by `{command(table, page)}`."]
    return [*lines, "", versions] if (versions := outdated(table)) else lines


def _sections(grids: list[Grid], made: str) -> list[str]:
    lines: list[str] = []
    for grid in grids:
        lines += ["", f"## {grid.title}", "", grid.words, ""]
        lines += [_row(grid.head), _row(["---"] * len(grid.head)), *(_row(row) for row in grid.rows)]
        lines += ["", made]
    return lines


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rich(text: str) -> str:
    """Markdown's bold and code as HTML."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def _cell(text: str) -> str:
    return f"<td{' class=long' if len(text) > LONG else ''}>{_rich(text)}</td>"


def _table(grid: Grid, made: str) -> str:
    head = "".join(f"<th scope=col>{_rich(text)}</th>" for text in grid.head)
    rows = "".join("<tr>" + "".join(_cell(text) for text in row) + "</tr>" for row in grid.rows)
    return (
        f"<h2>{escape(grid.title)}</h2><p>{_rich(grid.words)}</p><div class=wide><table class=sortable>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div><p class=quiet>{_rich(made)}</p>"
    )


def _drawings(table: Table) -> str:
    """Where the page's script draws."""
    if not table.cells:
        return "<p><b>Nothing has been run yet</b>, so there is nothing to draw.</p>"
    return f"""<div class=panel><h2 class=inner>Choose what to compare</h2><div id=choose></div></div>
<noscript><p><b>The drawings need JavaScript.</b> The tables do not.</p></noscript>
<h2>Share of workloads solved</h2><p>{PROFILE}</p><div id=profiles></div>
<h2>Held-out losses</h2><p>{CURVES}</p><div id=curves class=charts></div>"""


def html(table: Table, page: Page) -> str:
    made = origin(table, page)
    first, *others = (_table(grid, made) for grid in all_tables(table))
    lacking = missing(table)
    measured = "".join(f"<li>{_rich(text)}</li>" for text in protocol(table, page))
    body = f"""<h1>{page.title}</h1>
<p>{_rich(page.words)} Written by <code>{escape(command(table, page))}</code>.</p>
{f"<p>{escape(versions)}</p>" if (versions := outdated(table)) else ""}
{'<p>Parts of it <a href="#missing">are missing</a>.</p>' if lacking.rows else ""}
{first}
{_drawings(table)}
{"".join(others)}
<section id=missing>{_table(lacking, made) if lacking.rows else ""}</section>
<h2>How it was measured</h2><ul>{measured}</ul>"""
    scripts = ["plot.js", "controls.js", "compare.js"] if table.cells else []
    return web.page(f"vsgd: {page.title}", body, curves.data(what_was_run(table)), scripts)
