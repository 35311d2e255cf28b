"""Write the figures as one self-contained page, and their numbers as Markdown."""

from __future__ import annotations

import base64
from html import escape

from vsgd.algorithms.paper import rate
from vsgd_bench import problems, simulate
from vsgd_bench.figures import Request, comparison, drift
from vsgd_bench.gain import EXACT
from vsgd_bench.reproduce import Reproduced, versions
from vsgd_bench.web import embedded, page
from vsgd_bench.web.translate import Translator

HINT = "Point at a square for its learning curves, or move with the arrow keys. A click, a tap or Enter opens it below."
SQUARES = 'tabindex=0 role=application aria-label="Squares of Figure 6: arrow keys move, Enter opens one below"'
SCRIPTS = ["plot.js", "controls.js", "special.js", "simulation.js", "gain.js", "squares.js", "report.js"]


def translated() -> str:
    """Return the algorithms, the test problems, the loop over updates and their constants as JavaScript."""
    translator = Translator()
    rows = [row.algorithm for row in comparison.ROWS] + [algorithm for algorithm, _ in drift.ALGORITHMS]
    algorithms = {a.name: translator.literal(a) for a in rows}
    for function in (simulate.fused_runs, simulate.first_minibatch, problems.excess_loss, problems.sample_loss, rate):
        translator.add(function)
    constants = {
        "BOOTSTRAP": translator.literal(simulate.BOOTSTRAP),
        "SHAPES": embedded(problems.SHAPES),
        "EXACT": translator.literal(EXACT),
        "ALGORITHMS": "{" + ",\n".join(f"{embedded(name)}: {text}" for name, text in algorithms.items()) + "}",
    }
    return "\n".join([translator.text(), *(f"const {name} = {text};" for name, text in constants.items())]) + "\n"


def heading(item: Reproduced) -> str:
    prefix = f"Figure {item.figure.name}. " if item.figure.name.isdigit() else ""
    return prefix + item.figure.title


def command(request: Request) -> str:
    return f"vsgd figures --runs {request.runs} --updates {request.updates} --seed {request.seed}"


def _took(seconds: float) -> str:
    return f"Computed in {seconds:.1f} s, compilation included."


def _section(item: Reproduced) -> str:
    rows = "".join(
        f"<tr><td>{escape(n.what)}</td><td class=value>{escape(n.value)}</td>"
        f"<td class=quiet>{escape(n.expected)}</td></tr>"
        for n in item.numbers
    )
    image = base64.b64encode(item.png).decode()
    picture = f'<img alt="{escape(item.figure.title)}" src="data:image/png;base64,{image}">'
    if item.figure.name == comparison.FIGURE.name:
        picture = f"<p class=note>{HINT}</p><div class=scroll><div class=squares {SQUARES}>{picture}</div></div>"
    return f"""
<section id="figure-{item.figure.name}">
<h2>{escape(heading(item))}</h2>
{picture}
<p>{escape(item.figure.caption)}</p>
<div class=try></div>
<div class=scroll><table><tr><th>number</th><th>measured</th><th>expected</th></tr>{rows}</table></div>
<p class=quiet>{_took(item.seconds)}</p>
</section>"""


def html(items: list[Reproduced], request: Request) -> str:
    links = "".join(f'<a href="#figure-{i.figure.name}">{escape(heading(i))}</a> ' for i in items)
    made = ", ".join(f"{name} {number}" for name, number in versions().items())
    body = f"""<h1>Learning rates that set themselves: the paper, reproduced</h1>
<p>The figures of “Adaptive learning rates and parallelization for stochastic, sparse, non-smooth gradients”
(Schaul &amp; LeCun 2013), reproduced by <code>vsgd</code>. Losses are excess expected losses in closed form. All
algorithms see the same samples. Figures 1, 2, 6 and the last one are interactive: simulations run in this page.</p>
<nav>{links}</nav>
{"".join(_section(item) for item in items)}
<h2>How this page was made</h2>
<p><code>{escape(command(request))}</code> with {escape(made)}. The simulations are the package's own Python code,
translated to JavaScript when the page was written.</p>"""
    data = {item.figure.name: item.data for item in items}
    *first, last = SCRIPTS
    return page("vsgd: the paper, reproduced", body, data, [*first, translated(), last])


def markdown(items: list[Reproduced], request: Request) -> str:
    lines = ["# The figures' key numbers", "", f"Written by `{command(request)}`."]
    for item in items:
        lines += ["", f"## {heading(item)}", "", "| number | measured | expected |", "|---|---|---|"]
        lines += [f"| {n.what} | {n.value} | {n.expected} |" for n in item.numbers]
        lines += ["", _took(item.seconds)]
    made = ", ".join(f"{name} {number}" for name, number in versions().items())
    return "\n".join([*lines, "", f"With {made}.", ""])
