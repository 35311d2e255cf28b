"""Write the comparison as one self-contained page, and its tables as Markdown."""

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
    "of the first seeds. Momentum and weight decay were also chosen on six unseen networks (adding, waves, diabetes, "
    "mixer, encoder, depthwise) and six problems of science (all but the rod). The leading directions of wide layers "
    "were compared with blocks on all suites. `docs/laboratory.md` lists trials. The opponents' defaults were chosen "
    "elsewhere."
)
PROTOCOL = (
    "For each seed, all optimizers have the same initial weights and the same minibatches in the same order.",
    GRIDS,
    "Evaluation uses the weights that the optimizer's authors recommend: averages for Schedule-Free, DoG and AdamW "
    "with EMA, with the statistics of BatchNorm recomputed from 20 minibatches.",
    "Seconds are processor time of one thread, without evaluation and compilation. Parallel runs share caches, so "
    "seconds are accurate to some tens of percent. Stored runs of different optimizers may be of different "
    "processors, which biases comparisons at equal seconds. `benchmarks/torch_step.py` measures side by side.",
    "Schedules (warm-up, cosine decay) use the number of updates. vSGD uses the number of updates per epoch if there "
    "is more than one epoch.",
    "The training loss is that of 2,000 training rows at the end, with the weights of the held-out loss. The "
    "difference of the two losses is overfitting.",
    "Gradient evaluations are counted when the loss is computed. vSGD may need more than one per update.",
    "A loss that is not finite ends a run. The run has diverged, and its final loss is infinite.",
    SETTLED,
    "Online, each row is seen once, in order. The loss is that of the next rows before they are learned. The final "
    "loss is the mean over the stream.",
)
LONG = 50
"""Number of characters above which a cell may be wrapped."""

PROFILE = (
    f"For each workload and seed the target is {TOLERANCE:g} times the final loss of tuned AdamW with cosine decay. "
    "A curve shows the fraction of workloads and seeds on which an optimizer reaches it within a multiple of the time "
    "of the fastest optimizer. Higher is better. The left end shows how often an optimizer is nearly the fastest, the "
    "right end how often it reaches the target at all. Tuned AdamW reaches the target by definition."
)

CURVES = (
    "Mean over seeds, with a band from the best to the worst seed. The dotted line is the mean target. Diverging "
    "curves leave the plot. Online, the mean loss so far is drawn."
)


class Page(NamedTuple):
    """Title and introduction of a page, and the command-line arguments that write it."""

    title: str
    words: str
    flag: str = ""
    constants: str = SETTLED
    """How the constants of vSGD were chosen."""


SMALL = Page(
    "Comparison of optimizers on small networks",
    "vSGD has nothing to tune. An optimizer with a learning rate has three rows: tuned on each workload, at the one "
    "setting that is best for all workloads in hindsight, and at its defaults. The others run at their defaults. The "
    "protocol is in `docs/protocol.md`. The first table lists where vSGD is worse.",
)
SCIENCE = Page(
    "Comparison of optimizers on problems of science",
    f"Equations, signals, molecules, tables and control instead of images and text. {SMALL.words}",
    " --suite science",
    "No constant of vSGD's learning rates was chosen on these problems. Momentum and weight decay were chosen on six "
    "of them (all but the rod), among others.",
)
LARGE = Page("Comparison of optimizers on larger networks", SMALL.words, " --suite large")
UNSEEN = Page(
    "Comparison of optimizers on unseen networks",
    f"Networks on which most of vSGD was not developed. {SMALL.words}",
    " --suite unseen",
    "No constant of vSGD's learning rates was chosen on these networks or changed after their first run. Momentum and "
    "weight decay were chosen on six of them (adding, waves, diabetes, mixer, encoder, depthwise), and the averaging "
    "of BatchNorm statistics on the depthwise CNN, among others.",
)
QUICK = Page(
    SMALL.title,
    "**This is the quick version: few workloads and optimizers, and a third of the epochs. It shows what the command "
    f"does, not which optimizer is better.** {SMALL.words}",
    " --quick",
)
SENSITIVITY = Page(
    "Sensitivity to the constants",
    "The default with each of its constants halved and doubled.",
    " --sensitivity",
)
ABLATED = Page(
    "Ablations: the default without one difference from the paper",
    "vSGD's default for networks, and the default without one of its differences from Algorithm 1.",
    " --ablations",
)
STRESS = Page("Stress test", "The default on harder workloads, without tuning.", " --stress")


def command(table: Table, page: Page) -> str:
    file = table.chosen.file
    rates = "" if file is None else f" --rates {one_line(shlex.quote(str(file)))}"
    return f"vsgd compare{page.flag} --seeds {table.seeds}{rates}"


def protocol(table: Table, page: Page) -> list[str]:
    """Return the sentences of the protocol."""
    instead = {SETTLED: page.constants}
    if table.chosen.file is not None:
        instead[GRIDS] = (
            "Settings were chosen in an earlier comparison, by the lowest final held-out loss on the first seed, and "
            f"are in `{table.chosen.file_name}`; without `--rates` they are searched again. Selection by the reported "
            "loss favors the tuned optimizers."
        )
    return [instead.get(text, text) for text in PROTOCOL]


def origin(table: Table, page: Page) -> str:
    """Return the command and the versions that produced a table."""
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
    """Return a page of tables as Markdown."""
    return "\n".join([*_opening(table, page), *_sections(grids, origin(table, page)), ""])


def markdown(table: Table, page: Page) -> str:
    """Return all tables and the protocol as Markdown."""
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
    """Return text with Markdown's bold and code as HTML."""
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
    """Return the elements in which the script of the page draws."""
    if not table.cells:
        return "<p><b>There are no runs yet</b>, so there is nothing to draw.</p>"
    return f"""<div class=panel><h2 class=inner>Select workloads and optimizers</h2><div id=choose></div></div>
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
