"""The `vsgd` command: a thin layer of words over `vsgd_bench`, `vsgd.files` and `vsgd.integrations.watch`."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vsgd import __version__
from vsgd.arguments import LARGEST_SEED, at_least
from vsgd.disk import only_writer, write_whole
from vsgd.errors import UserError, one_line
from vsgd.files import add_commands
from vsgd.integrations.watch import add_watch_command
from vsgd_bench.compare import add_command

FIGURE_NAMES = ("1", "2", "3", "4", "5", "6", "drift")


INTERRUPTED = "interrupted. What was finished is kept; the same command (fit: with --resume) goes on from there."


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def figure_name(text: str) -> str:
    if text not in FIGURE_NAMES:
        raise argparse.ArgumentTypeError(f"there is no figure {text!r}, there are {', '.join(FIGURE_NAMES)}")
    return text


def figures(arguments: argparse.Namespace) -> None:
    """Compute the paper's figures and write them to a page of their own. Results are kept and used again."""
    try:
        from vsgd_bench.figures import Request
        from vsgd_bench.report import html, markdown
        from vsgd_bench.reproduce import reproduce
    except ModuleNotFoundError as error:
        raise UserError(f"the figures need {error.name}: pip install 'vsgd[bench]'") from None

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


def parser() -> argparse.ArgumentParser:
    main_parser = OneLineParser(prog="vsgd", description="Stochastic gradient descent with nothing to tune.")
    main_parser.add_argument("--version", action="version", version=f"vsgd {__version__}")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("figures", help="reproduce the paper's figures", description=figures.__doc__)
    names_help = f"{', '.join(FIGURE_NAMES)} (default: all)"
    command.add_argument("names", nargs="*", type=figure_name, metavar="FIGURE", help=names_help)
    command.add_argument("--out", type=Path, default=Path("report"), help="folder to write to (default: report)")
    command.add_argument("--runs", type=at_least(1), default=100, help="runs of each simulation (default: 100)")
    command.add_argument("--updates", type=at_least(2), default=1024, help="updates of each run (default: 1024)")
    command.add_argument(
        "--seed", type=at_least(0, LARGEST_SEED), default=0, help="where all randomness comes from (default: 0)"
    )
    command.set_defaults(run=figures)
    add_command(commands)
    add_commands(commands)
    add_watch_command(commands)
    return main_parser


def prepare_streams() -> None:
    """UTF-8 whatever the locale; file names that are not UTF-8 come out as they went in."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


def leave_standard_output() -> None:
    """What could not be written is given up, so that the end of the process does not try again."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    prepare_streams()
    arguments = parser().parse_args(argv)
    try:
        arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        message, code = str(error), 2
    except BrokenPipeError:  # nobody reads on, as with `| head`
        leave_standard_output()
        return 141  # what a shell says of SIGPIPE
    except OSError as error:
        leave_standard_output()
        message, code = f"{error.filename or 'cannot write to standard output'}: {error.strerror or error}", 2
    except MemoryError as error:
        message, code = f"not enough memory: {error}. Take fewer --chunk-rows or --hash-bits.", 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        message, code = INTERRUPTED, 130
    else:
        return 0
    print(f"vsgd: {one_line(message)}", file=sys.stderr)
    return code
