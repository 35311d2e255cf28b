"""Fill the table of README.md and the goals of docs/comparison.md from the pages of results, all suites together.

`make results` runs this script. A test fails if the tables are out of date.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent

PAGES = ("results-large.md", "results-networks.md", "results-unseen.md", "results-science.md")
TUNED = {"AdamW + cosine": "AdamW", "SOAP + cosine": "SOAP", "Muon + cosine": "Muon"}
OPPONENTS = {
    **{f"{name}, {kind}": f"{short}, {kind}" for name, short in TUNED.items() for kind in ("tuned", "one setting")},
    **{f"{name}, default": f"{short}, default" for name, short in TUNED.items()},
    "Schedule-Free AdamW + warm-up": "Schedule-Free AdamW",
    "Prodigy + cosine": "Prodigy",
    "COCOB": "COCOB",
}
MEASURES = ("final", "best", "training")
SIGNS = "+=−"
MIN_COVERAGE = 0.8
"""Minimum fraction of the networks that an opponent of README's table was run on."""

GOALS = (
    ("AdamW, tuned", "final", "not worse", 0.85),
    ("SOAP, tuned", "final", "not worse", 0.75),
    ("Muon, tuned", "final", "not worse", 0.75),
    ("SOAP, tuned", "training", "better", 0.60),
)
RESAMPLES = 10_000

Cells = list[tuple[float, str]]
"""The ratio of losses and the sign of each workload."""


def rows_below(page: str, heading: str) -> list[dict[str, str]]:
    """Return the first table below `heading` of a page in `docs`, one dictionary per row."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    _, _, below = text.partition(f"\n## {heading}\n")
    lines = re.search(r"^\|.*?(?=\n\n)", below, re.MULTILINE | re.DOTALL)
    if lines is None:
        raise SystemExit(f"docs/{page} has no table below {heading!r}")
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return [dict(zip(header, row, strict=True)) for row in rows]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def collected(measure: str) -> dict[str, Cells]:
    """Return the cells of all suites, by opponent."""
    found: dict[str, Cells] = {}
    for page in PAGES:
        for row in rows_below(page, f"vSGD against each, {measure} loss at equal updates"):
            cells = [row[name].split() for name in list(row)[3:]]
            found.setdefault(row["opponent"], []).extend((float(c[0]), c[1]) for c in cells if len(c) == 2)
    return {OPPONENTS[name]: cells for name, cells in found.items() if name in OPPONENTS}


def counted(cells: Cells) -> str:
    """Return wins / ties / losses."""
    return " / ".join(str(sum(sign == each for _, each in cells)) for sign in SIGNS)


def mean_ratio(cells: Cells) -> str:
    """Return the geometric mean of the ratios and its bootstrap interval."""
    logs = np.log([ratio for ratio, _ in cells])
    drawn = np.random.default_rng(0).integers(len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.quantile(logs[drawn].mean(axis=1), [0.025, 0.975])
    return f"{math.exp(logs.mean()):.2f} [{math.exp(low):.2f}, {math.exp(high):.2f}]"


def counts() -> str:
    """Return the table of README."""
    found = {measure: collected(measure) for measure in MEASURES}
    networks = max(len(cells) for cells in found["final"].values())
    names = [name for name in OPPONENTS.values() if len(found["final"].get(name, ())) >= MIN_COVERAGE * networks]
    rows = []
    for name in names:
        cells = [found[measure][name] for measure in MEASURES]
        rows.append([name, str(len(cells[0])), *(counted(each) for each in cells), mean_ratio(cells[0])])
    return table(["vSGD against", "networks", *MEASURES, "final loss ratio"], rows)


def goals() -> str:
    """Return a table of the goals of the protocol and the measured values. Missed goals come first."""
    found = {measure: collected(measure) for measure in MEASURES}
    rows = []
    for opponent, measure, word, goal in GOALS:
        signs = [sign for _, sign in found[measure][opponent]]
        share = sum(sign == "+" or (word == "not worse" and sign == "=") for sign in signs) / len(signs)
        reached = "yes" if share >= goal else "**no**"
        rows.append([f"{measure} loss {word} than that of {opponent}", f"{goal:.0%}", f"{share:.0%}", reached])
    return table(["goal", "share of networks", "measured", "reached"], sorted(rows, key=lambda row: row[3] == "yes"))


def filled(text: str, name: str = "counts") -> str:
    """Return a page with the current table of this name."""
    content = {"counts": counts, "goals": goals}[name]()
    pattern = rf"(<!-- table of {name} -->\n).*?(<!-- end of table -->)"
    text, found = re.subn(pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL)
    if found != 1:
        raise SystemExit(f"there is no place for the table of {name}")
    return text


if __name__ == "__main__":
    for file, name in (("README.md", "counts"), ("docs/comparison.md", "goals")):
        page = ROOT / file
        page.write_text(filled(page.read_text(encoding="utf-8"), name), encoding="utf-8")
