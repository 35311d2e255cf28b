"""Fill the table of README.md from the pages of results.

`make results` runs this script. A test fails if the table is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

HEADING = "vSGD against each, at equal updates: better / equal / worse"
PAGES = {"larger": "results-large.md", "small": "results-networks.md", "unseen": "results-unseen.md"}
OPPONENTS = {
    "best AdamW + cosine": "tuned AdamW",
    "best SOAP + cosine": "tuned SOAP",
    "best Muon + cosine": "tuned Muon",
    "Schedule-Free AdamW + warm-up": "Schedule-Free AdamW",
    "Prodigy + cosine": "Prodigy",
    "COCOB": "COCOB",
}
FINAL, BEST, TRAINING = "held-out", "best on the way", "training"


def rows_below(page: str, heading: str) -> list[dict[str, str]]:
    """Return the first table below `heading` of a page in `docs`, one dictionary per row.

    If several columns have the same name, the first one is returned.
    """
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    _, _, below = text.partition(f"\n## {heading}\n")
    lines = re.search(r"^\|.*?(?=\n\n)", below, re.MULTILINE | re.DOTALL)
    if lines is None:
        raise SystemExit(f"docs/{page} has no table below {heading!r}")
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return [dict(reversed(list(zip(header, row, strict=True)))) for row in rows]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def total(cells: list[str]) -> str:
    """Return the element-wise sum of cells such as `7 / 1 / 1`."""
    counts = zip(*(map(int, cell.split("/")) for cell in cells), strict=True)
    return " / ".join(str(sum(column)) for column in counts)


def counts() -> str:
    """Return the table of wins, ties and losses of vSGD."""
    suites = [{row["opponent"]: row for row in rows_below(page, HEADING)} for page in PAGES.values()]
    rows = []
    for name, text in OPPONENTS.items():
        cells = [suite[name] for suite in suites]
        sums = [total([cell[loss] for cell in cells]) for loss in (BEST, TRAINING)]
        rows.append([text, *(cell[FINAL] for cell in cells), *sums])
    sizes = [sum(map(int, cell.split("/"))) for cell in rows[0][1:4]]
    columns = [f"{size} {kind}: final" for size, kind in zip(sizes, PAGES, strict=True)]
    return table(["vSGD against", *columns, "all: best", "all: training"], rows)


def filled(text: str) -> str:
    """Return README with the table of the present pages."""
    pattern = r"(<!-- table of counts -->\n).*?(<!-- end of table -->)"
    text, found = re.subn(pattern, lambda match: f"{match[1]}{counts()}\n{match[2]}", text, flags=re.DOTALL)
    if found != 1:
        raise SystemExit("README.md has no place for the table of counts")
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
