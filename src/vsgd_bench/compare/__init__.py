"""`vsgd compare`: compare optimizers on networks."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from vsgd.arguments import at_least
from vsgd.errors import UserError

__all__ = ["add_compare_command"]


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def compare(arguments: argparse.Namespace) -> None:
    """Train networks with vSGD and its opponents on several seeds, and write pages of tables, curves and profiles.

    Each finished run is stored, so the same command continues an interrupted comparison.
    """
    try:
        command = importlib.import_module("vsgd_bench.compare.command")
    except ModuleNotFoundError as error:
        message = f"the comparison needs {error.name}: run `pip install --editable '.[compare]'` in the clone"
        raise UserError(message) from None
    command.compare(arguments)


def add_compare_command(commands: Any) -> None:
    """Add the subcommand to `commands`, the result of `ArgumentParser.add_subparsers`."""
    command = commands.add_parser("compare", help="compare optimizers on networks", description=compare.__doc__)
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--suite",
        choices=("small", "large", "unseen", "science"),
        default="small",
        help="13 small networks, 9 large ones, 9 that most constants were not chosen on, or 7 problems of science "
        "(default: small)",
    )
    which.add_argument("--quick", action="store_true", help="a few workloads and opponents, in less than three minutes")
    which.add_argument(
        "--ablations", action="store_true", help="vSGD without one of its differences from the paper at a time"
    )
    which.add_argument(
        "--stress", action="store_true", help="vSGD on workloads that are made harder, to test for divergence"
    )
    which.add_argument("--sensitivity", action="store_true", help="vSGD with each of its constants halved and doubled")
    command.add_argument("--workloads", type=names, metavar="NAME,...", help="only these (default: all)")
    command.add_argument("--optimizers", type=names, metavar="NAME,...", help="only these (default: all)")
    command.add_argument(
        "--seeds",
        type=at_least(1),
        help="number of seeds (default: 5; unseen, science, ablations, sensitivity: 3; quick, stress: 2)",
    )
    command.add_argument(
        "--rates",
        type=Path,
        metavar="FILE",
        help="rates.json of an earlier comparison, with the settings to use (default: search)",
    )
    command.add_argument(
        "--stored",
        action="store_true",
        help="write the pages from the stored runs of any version, without training",
    )
    command.add_argument(
        "--jobs", type=at_least(1), default=os.cpu_count(), help="number of parallel processes (default: one per core)"
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("report/compare"),
        help="folder of the stored runs and of the pages of each suite (default: report/compare)",
    )
    command.set_defaults(run=compare)
