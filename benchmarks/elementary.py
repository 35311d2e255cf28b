"""Compare the default for networks with Algorithm 1 of the paper on the 36 elementary problems of Figure 6.

python benchmarks/elementary.py
"""

from __future__ import annotations

import numpy as np

from vsgd_bench.baselines import Algorithm, vsgd_fd, vsgd_networks
from vsgd_bench.problems import ELEMENTARY, SHAPES, Elementary
from vsgd_bench.simulate import Noise, draw_noise, simulate

RUNS, UPDATES, SEED = 100, 1024, 0
TIE = 1.05
"""Ratio below which two medians are equal, since medians vary by a few percent."""


def left(problem: Elementary, algorithm: Algorithm, noise: Noise) -> float:
    """Return the median final excess loss as a fraction of the median initial one."""
    start, end = problem.excess_loss(simulate(problem, algorithm, noise, [0, UPDATES]).theta).T
    return float(np.median(end) / np.median(start))


def main() -> None:
    print(f"Median excess loss after {UPDATES} updates as a fraction of the initial one, {RUNS} runs, seed {SEED}:")
    print("paper → default for networks.\n")
    for n in (1, 10):
        noise = draw_noise(SEED, range(RUNS), UPDATES, n)
        pairs = {p: (left(p, vsgd_fd(), noise), left(p, vsgd_networks(), noise)) for p in ELEMENTARY}
        print(f"| n = {n}, noise σ² | A | {' | '.join(SHAPES)} |")
        print("|---" * (len(SHAPES) + 2) + "|")
        for first in (p for p in ELEMENTARY if p.shape == SHAPES[0]):
            cells = [pairs[first._replace(shape=shape)] for shape in SHAPES]
            print(
                f"| {first.noise:g} | {first.scale:g} | {' | '.join(f'{old:.2g} → {new:.2g}' for old, new in cells)} |"
            )
        worse = sum(new > TIE * old for old, new in pairs.values())
        stuck = sum(new > 1 for _, new in pairs.values())
        print(f"\nWorse than the paper on {worse} of {len(pairs)} problems; ", end="")
        print(f"median run above its initial loss on {stuck}.\n")


if __name__ == "__main__":
    main()
