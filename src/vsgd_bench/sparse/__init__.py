"""`vsgd sparse`: linear models on sparse and unscaled data, compared with other libraries."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from vsgd.arguments import at_least
from vsgd.errors import UserError

__all__ = ["add_sparse_command"]


def sparse(arguments: argparse.Namespace) -> None:
    """Fit linear models with vSGD, scikit-learn, Vowpal Wabbit and river, and write a table of held-out losses.

    Each finished run is stored, so the same command continues an interrupted comparison. The environment variable
    VSGD_DATA names the folder of data sets.
    """
    try:
        command = importlib.import_module("vsgd_bench.sparse.command")
    except ModuleNotFoundError as error:
        message = f"the comparison needs {error.name}: run `pip install --editable '.[compare]'` in the clone"
        raise UserError(message) from None
    command.write_comparison(arguments.results, arguments.out, arguments.seeds)


def add_sparse_command(commands: Any) -> None:
    """Add the subcommand to `commands`, the result of `ArgumentParser.add_subparsers`."""
    words = "compare linear models on sparse and unscaled data"
    command = commands.add_parser("sparse", help=words, description=sparse.__doc__)
    command.add_argument(
        "--results",
        type=Path,
        default=Path("report/sparse.jsonl.gz"),
        help="file of the runs (default: report/sparse.jsonl.gz)",
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("report/results-sparse.md"),
        help="page to write (default: report/results-sparse.md)",
    )
    command.add_argument("--seeds", type=at_least(1), default=5, help="number of seeds per method (default: 5)")
    command.set_defaults(run=sparse)
