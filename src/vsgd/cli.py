"""The `vsgd` command: the subcommands of `vsgd.files`, `vsgd.integrations.watch` and, in a clone, `vsgd_bench`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vsgd import __version__
from vsgd.errors import UserError, one_line
from vsgd.files import add_commands
from vsgd.integrations.watch import add_watch_command

LABORATORY = "vsgd_bench"
LABORATORY_COMMANDS = {
    "figures": "reproduce the paper's figures",
    "compare": "compare optimizers on networks",
    "sparse": "compare linear models on sparse and unscaled data",
}

INTERRUPTED = "interrupted. What was finished is kept; the same command (fit: with --resume) goes on from there."


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def repository_only(arguments: argparse.Namespace) -> NoReturn:
    """Say where the command is: the laboratory is not installed with the library."""
    raise UserError(
        f"`vsgd {arguments.command}` is part of the repository, not of the installed package: "
        f"clone it, run `pip install --editable '.[compare]'` there, and use `vsgd` from that environment."
    )


def add_laboratory_commands(commands: Any) -> None:
    """Add the commands of `vsgd_bench` if it is importable, as in a clone; otherwise say where to get them."""
    if importlib.util.find_spec(LABORATORY) is not None:
        importlib.import_module(f"{LABORATORY}.commands").add_commands(commands)
        return
    for name, words in LABORATORY_COMMANDS.items():
        command = commands.add_parser(name, help=f"{words} (in a clone of the repository only)", add_help=False)
        command.set_defaults(run=repository_only, command=name)


def parser() -> argparse.ArgumentParser:
    main_parser = OneLineParser(prog="vsgd", description="Stochastic gradient descent with nothing to tune.")
    main_parser.add_argument("--version", action="version", version=f"vsgd {__version__}")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")

    add_laboratory_commands(commands)
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
    main_parser = parser()
    arguments, unknown = main_parser.parse_known_args(argv)
    if unknown and arguments.run is not repository_only:
        main_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
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
