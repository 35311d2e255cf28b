"""Measure memory and speed of `vsgd fit` by file size, on svmlight files with power-law columns, one pass each.

Each fit runs in a new process. Its peak memory is printed. A first fit, which is not printed, compiles the code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WORDS_PER_ROW = 100
COLUMNS = 100_000
ROWS = 20_000


def some_rows(seed: int = 0) -> str:
    """Return rows of a hundred words, about 20 MB."""
    rng = np.random.default_rng(seed)
    words = (COLUMNS ** rng.random((ROWS, WORDS_PER_ROW))).astype(int)
    labels = rng.standard_normal(COLUMNS)[words - 1].sum(axis=1) > 0
    lines = []
    for label, row in zip(labels.tolist(), words.tolist(), strict=True):
        cells = " ".join(f"{word}:0.{rng.integers(1000):03d}" for word in sorted(set(row)))
        lines.append(f"{label:d} {cells}\n")
    return "".join(lines)


def fit(data: Path) -> tuple[float, float]:
    """Return peak memory in megabytes and seconds of one pass in a new process."""
    command = [
        sys.executable,
        "-m",
        "vsgd",
        "fit",
        str(data),
        "--model",
        str(data.with_suffix(".npz")),
        "--passes",
        "1",
    ]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit("vsgd fit failed")
    return usage.ru_maxrss / 1e3, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[20, 200], help="sizes (default: 20 200)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.svm"
        rows = some_rows()
        data.write_text(rows)
        fit(data)
        for megabytes in arguments.megabytes:
            copies = max(1, round(megabytes * 1e6 / len(rows)))
            with data.open("w") as file:
                for _ in range(copies):
                    file.write(rows)
            memory, seconds = fit(data)
            print(
                f"{copies * len(rows) / 1e6:.0f} MB, {copies * ROWS} rows: {memory:.0f} MB of memory, {seconds:.1f} s, "
                f"{copies * ROWS / seconds:.0f} rows/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
