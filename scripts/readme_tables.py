"""Fill the tables of README from the pages of results. `make results` runs this; a test finds what is out of date."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

NETWORKS = {
    "Shakespeare, GPT": "GPT, Shakespeare",
    "Fashion-MNIST, ResNet, augmented": "ResNet, Fashion-MNIST",
    "Fashion-MNIST, ViT": "ViT, Fashion-MNIST",
    "Fashion-MNIST, GRU over rows": "GRU over rows of images",
    "Fashion-MNIST, deep autoencoder": "deep autoencoder",
    "Adult, MLP, 20,000 updates": "MLP, Adult, 20,000 updates",
    "Fashion-MNIST, denoiser": "denoiser",
    "20 Newsgroups, fine-tuned GPT": "GPT fine-tuned",
    "20 Newsgroups, GPT with LoRA": "GPT with LoRA",
}
TUNED = {
    "best AdamW + cosine": "best AdamW, warm-up and cosine decay",
    "best SOAP + cosine": "best SOAP, the same",
    "best Muon + cosine": "best Muon, the same",
}
UNTUNED = {
    "Schedule-Free AdamW + warm-up": "Schedule-Free AdamW, warm-up",
    "Prodigy + cosine": "Prodigy, cosine decay",
    "COCOB": "COCOB",
}
LOSSES = ("held-out", "best on the way", "training")


def rows_below(page: str, heading: str) -> list[dict[str, str]]:
    """The first table below a heading of a page in `docs`, a dictionary for each row."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    _, _, below = text.partition(f"\n## {heading}\n")
    lines = re.search(r"^\|.*?(?=\n\n)", below, re.MULTILINE | re.DOTALL)
    if lines is None:
        raise SystemExit(f"docs/{page} has no table below {heading!r}")
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    # names of columns may come twice; the first is meant
    return [dict(reversed(list(zip(header, row, strict=True)))) for row in rows]


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def loss(cell: str) -> str:
    """Of a cell as `**1.85 ± 0.007 @0.01†**`, the mean, bold if it was."""
    bold, number = re.match(r"(\*\*)?([^ ]+)", cell).groups()  # type: ignore[union-attr]
    return f"**{number}**" if bold else number


def losses() -> str:
    """Held-out loss of larger networks."""
    columns = {"vSGD": "vSGD", **TUNED}
    rows = rows_below("results-large.md", "Final losses")
    cells = [[NETWORKS[row["workload"]], *(loss(row[name]) for name in columns)] for row in rows]
    return table(["", *columns.values()], cells)


def counts() -> str:
    """On how many networks vSGD is better, equal and worse."""
    heading = "vSGD against each, at equal updates: better / equal / worse"
    pages = {"larger": "results-large.md", "small": "results-networks.md", "unseen": "results-unseen.md"}
    suites = [{row["opponent"]: row for row in rows_below(page, heading)} for page in pages.values()]
    names = {**TUNED, **UNTUNED}
    rows = [[text, *(suite[name][each] for suite in suites for each in LOSSES)] for name, text in names.items()]
    columns = [column for kind in pages for column in (f"{kind}: {LOSSES[0]}", *LOSSES[1:])]
    return table(["against", *columns], rows)


def filled(text: str) -> str:
    """README with tables as the pages have them now."""
    for name, content in (("losses", losses()), ("counts", counts())):
        pattern = rf"(<!-- table of {name} -->\n).*?(\n<!-- end of table -->)"
        text, found = re.subn(pattern, lambda m, new=content: m[1] + new + m[2], text, flags=re.DOTALL)
        if found != 1:
            raise SystemExit(f"README.md has no place for the table of {name}")
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
