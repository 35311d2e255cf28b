"""The subcommands of `vsgd` that exist only in a clone: `figures`, `compare` and `sparse`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vsgd.arguments import LARGEST_SEED, at_least
from vsgd.disk import only_writer, write_whole
from vsgd.errors import UserError
from vsgd_bench.compare import add_compare_command
from vsgd_bench.sparse import add_sparse_command

__all__ = ["add_commands"]

FIGURE_NAMES = ("1", "2", "3", "4", "5", "6", "drift")


def figure_name(text: str) -> str:
    if text not in FIGURE_NAMES:
        raise argparse.ArgumentTypeError(f"there is no figure {text!r}, there are {', '.join(FIGURE_NAMES)}")
    return text


def figures(arguments: argparse.Namespace) -> None:
    """Compute the paper's figures and write them to a single page. Stored results are reused."""
    try:
        from vsgd_bench.figures import Request
        from vsgd_bench.report import html, markdown
        from vsgd_bench.reproduce import reproduce
    except ModuleNotFoundError as error:
        message = f"the figures need {error.name}: run `pip install --editable '.[bench]'` in the clone"
        raise UserError(message) from None

    request = Request(runs=arguments.runs, updates=arguments.updates, seed=arguments.seed)
    with only_writer(arguments.out):
        items = reproduce(arguments.names or list(FIGURE_NAMES), arguments.out, request)
        write_whole(arguments.out / "numbers.md", markdown(items, request))
        write_whole(arguments.out / "index.html", html(items, request))
    for item in items:
        if not arguments.names or item.figure.name in arguments.names:
            print(f"figure {item.figure.name}: {item.seconds:.1f} s")
            for number in item.numbers:
                print(f"  {number.what}: {number.value}" + (f"  ({number.expected})" if number.expected else ""))
    print(f"wrote {arguments.out / 'index.html'}")


def add_figures_command(commands: Any) -> None:
    command = commands.add_parser("figures", help="reproduce the paper's figures", description=figures.__doc__)
    names_help = f"{', '.join(FIGURE_NAMES)} (default: all)"
    command.add_argument("names", nargs="*", type=figure_name, metavar="FIGURE", help=names_help)
    command.add_argument("--out", type=Path, default=Path("report"), help="folder to write to (default: report)")
    command.add_argument("--runs", type=at_least(1), default=100, help="runs of each simulation (default: 100)")
    command.add_argument("--updates", type=at_least(2), default=1024, help="updates of each run (default: 1024)")
    command.add_argument(
        "--seed", type=at_least(0, LARGEST_SEED), default=0, help="seed of all random numbers (default: 0)"
    )
    command.set_defaults(run=figures)


def add_commands(commands: Any) -> None:
    """Add the subcommands to `commands`, the result of `ArgumentParser.add_subparsers`."""
    add_figures_command(commands)
    add_compare_command(commands)
    add_sparse_command(commands)
