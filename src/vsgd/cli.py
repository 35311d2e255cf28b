"""The `vsgd` command: the subcommands of `vsgd.files`, `vsgd.integrations.watch` and, in a clone, `vsgd_bench`."""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vsgd import __version__
from vsgd.errors import UserError, give_up, one_line, say
from vsgd.files import add_commands
from vsgd.integrations.watch import add_watch_command

LABORATORY = "vsgd_bench"
LABORATORY_COMMANDS = {
    "figures": "reproduce the paper's figures",
    "compare": "compare optimizers on networks",
    "sparse": "compare linear models on sparse and unscaled data",
}

INTERRUPTED = "interrupted. Finished parts are saved; the same command (fit: with --resume) continues from there."


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with code 2."""
        say(f"{self.prog}: {one_line(message)} (see {self.prog} --help)")
        raise SystemExit(2)

    def print_help(self, file: Any = None) -> None:
        """Print the help. Other than in `argparse`, an error of writing is not ignored."""
        print(self.format_help(), end="", file=file)


class PrintVersion(argparse.Action):
    def __call__(self, main_parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"vsgd {__version__}")
        main_parser.exit()


def repository_only(arguments: argparse.Namespace) -> NoReturn:
    """Raise UserError for a command of `vsgd_bench`, which is not installed with the library."""
    raise UserError(
        f"`vsgd {arguments.command}` is part of the repository, not of the installed package: "
        f"clone it, run `pip install --editable '.[compare]'` there, and use `vsgd` from that environment."
    )


def add_laboratory_commands(commands: Any) -> None:
    """Add the commands of `vsgd_bench`. If it is not importable, they raise an error that names the repository."""
    if importlib.util.find_spec(LABORATORY) is not None:
        importlib.import_module(f"{LABORATORY}.commands").add_commands(commands)
        return
    for name, words in LABORATORY_COMMANDS.items():
        command = commands.add_parser(name, help=f"{words} (in a clone of the repository only)", add_help=False)
        command.set_defaults(run=repository_only, command=name)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    main_parser = OneLineParser(
        prog="vsgd", description="vSGD: stochastic gradient descent without a learning rate to tune."
    )
    main_parser.add_argument("--version", action=PrintVersion, nargs=0, help="print the version")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")

    add_laboratory_commands(commands)
    add_commands(commands)
    add_watch_command(commands)
    return main_parser


def prepare_streams() -> None:
    """Use UTF-8 for standard output and standard error, independent of the locale.

    File names that are not UTF-8 are printed unchanged. A closed standard stream becomes the null device, so that no
    file that is opened later gets its descriptor.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of the command line. Exit with code 2 if they are wrong."""
    main_parser = parser()
    for word in itertools.takewhile(lambda word: word != "--", words):
        if word.startswith("--") and word.endswith("=--"):  # argparse would drop the value, and fail
            main_parser.error(f"{word}: -- is not a value. For a file of that name, write ./--")
    arguments, unknown = main_parser.parse_known_args(words)
    if unknown and arguments.run is not repository_only:
        main_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def run(words: Sequence[str]) -> None:
    """Run a command, or print its help."""
    try:
        arguments = parsed(words)
    except SystemExit as ended:
        if ended.code:
            raise
    else:
        arguments.run(arguments)
    if sys.stdout is not None:
        sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after `vsgd`; by default those of the process.

    Returns:
        The exit code: 0, or 2, 130 or 141 as documented in docs/sparse.md.
    """
    prepare_streams()
    try:
        run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        message, code = str(error), 2
    except BrokenPipeError:  # the reader has ended, as with `| head`
        give_up(sys.stdout)
        return 141  # the exit code of shells for SIGPIPE
    except OSError as error:
        give_up(sys.stdout)
        message, code = f"{error.filename or 'cannot write to standard output'}: {error.strerror or error}", 2
    except MemoryError as error:
        message, code = f"not enough memory: {error or 'none is free'}. Lower --chunk-rows or --hash-bits.", 2
    except KeyboardInterrupt:
        say("")
        message, code = INTERRUPTED, 130
    else:
        return 0
    say(f"vsgd: {one_line(message)}")
    return code
