"""The figures as one page that needs nothing else, and their numbers as Markdown."""

from __future__ import annotations

import base64
from html import escape

from vsgd.bench.figures import Request
from vsgd.bench.reproduce import Reproduced, versions

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1d232b; background: #fff; margin: 0 auto; padding: 2rem 1rem;
       max-width: 72rem; }
h1 { line-height: 1.2; } h2 { margin-top: 3.5rem; border-top: 1px solid #d8dce2; padding-top: 1.2rem; }
img { max-width: 100%; height: auto; } p { max-width: 46rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .92rem; }
th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid #e5e8ec; vertical-align: top; }
td.value { font-variant-numeric: tabular-nums; font-weight: 600; } .quiet, td.quiet { color: #646c78; }
nav a { margin-right: 1rem; } code { background: #f2f4f7; padding: .1em .35em; border-radius: 3px; }
"""


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
    return f"""
<section id="figure-{item.figure.name}">
<h2>{escape(heading(item))}</h2>
<img alt="{escape(item.figure.title)}" src="data:image/png;base64,{image}">
<p>{escape(item.figure.caption)}</p>
<table><tr><th>number</th><th>seen here</th><th>expected</th></tr>{rows}</table>
<p class=quiet>{_took(item.seconds)}</p>
</section>"""


def html(items: list[Reproduced], request: Request) -> str:
    links = "".join(f'<a href="#figure-{i.figure.name}">{escape(heading(i))}</a> ' for i in items)
    made = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>vsgd: the paper, reproduced</title><style>{STYLE}</style></head><body>
<h1>Learning rates that set themselves: the paper, reproduced</h1>
<p>The figures of “Adaptive learning rates and parallelization for stochastic, sparse, non-smooth gradients”
(Schaul &amp; LeCun 2013), computed anew by <code>vsgd</code>. Losses are excess expected losses in closed form; all
algorithms see the same samples.</p>
<nav>{links}</nav>
{"".join(_section(item) for item in items)}
<h2>How this page was made</h2>
<p><code>{escape(command(request))}</code> with {escape(made)}.</p>
</body></html>
"""


def markdown(items: list[Reproduced], request: Request) -> str:
    lines = ["# The figures' key numbers", "", f"Written by `{command(request)}`."]
    for item in items:
        lines += ["", f"## {heading(item)}", "", "| number | seen here | expected |", "|---|---|---|"]
        lines += [f"| {n.what} | {n.value} | {n.expected} |" for n in item.numbers]
        lines += ["", _took(item.seconds)]
    made = ", ".join(f"{name} {number}" for name, number in versions().items())
    return "\n".join([*lines, "", f"With {made}.", ""])
