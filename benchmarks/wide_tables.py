"""Measure the time of `vsgd fit` on narrow and wide tables with equal numbers of cells. It should not differ.

Each fit is one pass in a new process. Ratios are relative to the narrowest table. A first fit, which is not printed,
compiles the code.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def write_table(path: Path, columns: int, rows: int) -> None:
    """Write a table of digits. The label depends on the first column."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(",".join(f"x{i}" for i in range(columns)) + ",y\n")
        for _ in range(rows):
            cells = rng.integers(0, 10, columns)
            file.write(",".join(map(str, cells.tolist())) + f",{cells[0] > 4:d}\n")


def fit(data: Path) -> float:
    words = ["fit", str(data), "--target", "y", "--model", str(data.with_suffix(".npz")), "--passes", "1"]
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "vsgd", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cells", type=int, default=10_000_000, help="number of cells of each table (default: 10,000,000)"
    )
    parser.add_argument(
        "--columns",
        type=int,
        nargs="+",
        default=[100, 1000, 10_000],
        help="numbers of columns (default: 100 1000 10000)",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.csv"
        write_table(data, arguments.columns[0], 100)
        fit(data)
        first = None
        for columns in arguments.columns:
            rows = max(2, arguments.cells // columns)
            write_table(data, columns, rows)
            seconds = fit(data)
            first = first or seconds
            print(f"{columns} columns × {rows} rows: {seconds:.1f} s, ratio {seconds / first:.2f}", flush=True)


if __name__ == "__main__":
    main()
