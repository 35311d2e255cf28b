"""`vsgd compare`: optimizers on real networks, side by side."""

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

    Runs are stored as they end; the same command continues from there.
    """
    try:
        command = importlib.import_module("vsgd_bench.compare.command")
    except ModuleNotFoundError as error:
        message = f"the comparison needs {error.name}: run `pip install --editable '.[compare]'` in the clone"
        raise UserError(message) from None
    command.compare(arguments)


def add_compare_command(commands: Any) -> None:
    """Add the subcommand to what `ArgumentParser.add_subparsers` returned."""
    command = commands.add_parser("compare", help="compare optimizers on networks", description=compare.__doc__)
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--suite",
        choices=("small", "large", "unseen", "science"),
        default="small",
        help="13 networks of seconds each, 9 of minutes, 9 not used for most of vSGD, or 7 problems of science "
        "(default: small)",
    )
    which.add_argument("--quick", action="store_true", help="a few workloads and opponents in less than three minutes")
    which.add_argument(
        "--ablations", action="store_true", help="vSGD with one of its deviations from the paper taken back at a time"
    )
    which.add_argument("--stress", action="store_true", help="vSGD on workloads made harder; does it ever diverge?")
    which.add_argument("--sensitivity", action="store_true", help="vSGD with each of its constants halved and doubled")
    command.add_argument("--workloads", type=names, metavar="NAME,...", help="only these (default: all)")
    command.add_argument("--optimizers", type=names, metavar="NAME,...", help="only these (default: all)")
    command.add_argument(
        "--seeds",
        type=at_least(1),
        help="runs of each (default: 5; unseen, science, ablations, sensitivity: 3; quick, stress: 2)",
    )
    command.add_argument(
        "--rates",
        type=Path,
        metavar="FILE",
        help="settings from the rates.json of an earlier comparison of the same suite (default: searched)",
    )
    command.add_argument(
        "--stored",
        action="store_true",
        help="train nothing: write the pages from the stored runs of any version",
    )
    command.add_argument(
        "--jobs", type=at_least(1), default=os.cpu_count(), help="processes side by side (default: one per core)"
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("report/compare"),
        help="folder of the runs, with a folder of pages for each suite (default: report/compare)",
    )
    command.set_defaults(run=compare)
