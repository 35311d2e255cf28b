"""The paper's six figures, and one on drifting data."""

from vsgd_bench.figures import clusters, comparison, drift, returns, smooth, sparsity, squares
from vsgd_bench.figures.figure import Figure, KeyNumber, Request, Results

FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE for module in (returns, sparsity, clusters, smooth, squares, comparison, drift)
}

__all__ = ["FIGURES", "Figure", "KeyNumber", "Request", "Results"]
