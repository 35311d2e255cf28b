"""Draw the final learning rates of a classifier of posts, by the number of posts that contain a word.

VSGD_DATA=... python -m vsgd_bench.sparse.rates --out docs/figures/rates-by-frequency.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from vsgd.sklearn import VSGDClassifier
from vsgd_bench.figures.figure import BLUE
from vsgd_bench.sparse.data import newsgroups

EPOCHS = 5
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def by_frequency(posts: Any, rates: Any) -> tuple[Any, Any]:
    """Return groups of words by number of posts, each an octave wide, and quantiles × groups of their rates."""
    octave = np.round(np.log2(posts))
    groups = [group for group in np.unique(octave) if np.sum(octave == group) >= 10]
    return 2.0 ** np.array(groups), np.array([np.quantile(rates[octave == group], QUANTILES) for group in groups]).T


def draw(posts: Any, rates: Any, total: int) -> Canvas:
    """Draw the rates. `posts` and `rates` have one number per word; `total` is the number of posts."""
    at, (lowest, low, middle, high, highest) = by_frequency(posts, rates)
    canvas = Canvas(figsize=(8, 4.4), layout="constrained")
    axis = canvas.subplots()
    axis.fill_between(at, lowest, highest, color=BLUE, alpha=0.12, lw=0, label="80 % of the words")
    axis.fill_between(at, low, high, color=BLUE, alpha=0.25, lw=0, label="50 % of the words")
    axis.plot(at, middle, color=BLUE, lw=2, marker="o", ms=4, label="median")
    axis.set(xscale="log", yscale="log", xlabel=f"number of posts that contain the word, of {total:,}")
    axis.set_ylabel("learning rate of the word's coefficient")
    axis.set_title(
        f"Rare words have larger learning rates than frequent words (20 Newsgroups, {EPOCHS} epochs)", fontsize=11
    )
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower left")
    return canvas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="picture to write")
    arguments = parser.parse_args()
    data = newsgroups(False)
    model = VSGDClassifier(max_iter=EPOCHS, tol=None, random_state=0).fit(data.X, data.y < 10)
    posts, rates = np.asarray((data.X > 0).sum(axis=0)).ravel(), model.rates_[0]
    learning = rates > 0
    draw(posts[learning], rates[learning], len(data.y)).savefig(arguments.out, dpi=120)
    for low, high in ((2, 20), (20, 200), (200, 2000), (2000, len(data.y) + 1)):
        chosen = learning & (posts >= low) & (posts < high)
        print(f"{chosen.sum()} words in {low} to {high - 1} posts: median rate {np.median(rates[chosen]):.2g}")


if __name__ == "__main__":
    main()
