"""Linear models on files of any size: `vsgd fit`, `predict` and `score` read them in chunks, `vsgd merge` merges."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vsgd.arguments import LARGEST_SEED, at_least, positive_number
from vsgd.errors import UserError, install
from vsgd.files.settings import (
    DEFAULT,
    MAX_ALPHA,
    MAX_HASH_BITS,
    PENALTY_OF,
    columns_argument,
    delimiter_argument,
    number_between,
)
from vsgd.linear.losses import CLASSIFICATION, REGRESSION

__all__ = ["add_commands"]

FORMATS = "CSV or svmlight (.svm, .libsvm, .svmlight), gzipped or not, or Parquet"


def later(name: str) -> Callable[[argparse.Namespace], None]:
    """A command that loads what it needs when it is run, so that other commands need not have it."""

    def run(arguments: argparse.Namespace) -> None:
        try:
            commands = importlib.import_module("vsgd.files.commands")
        except ModuleNotFoundError as error:
            raise UserError(f"files need {error.name}: {install('files')}") from None
        getattr(commands, name)(arguments)

    return run


def add_commands(commands: Any) -> None:
    """Add the four to what `ArgumentParser.add_subparsers` returned; each sets `run`."""
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", type=Path, required=True, help="file of the trained model, .npz")
    rows = argparse.ArgumentParser(add_help=False)
    rows.add_argument(
        "--chunk-rows", type=at_least(1), help=f"rows in memory at a time (default: {DEFAULT.chunk_rows})"
    )
    rows.add_argument(
        "--delimiter",
        type=delimiter_argument,
        metavar="CHARACTER",
        help="what separates the cells of CSV; tab is a tab (default: detected among , ; | and tab)",
    )
    rows.add_argument("--skip-bad-lines", action="store_true", help="count and skip lines that cannot be read")
    data = argparse.ArgumentParser(add_help=False)
    data.add_argument("data", type=Path, help=f"{FORMATS}; - and pipes")

    command = commands.add_parser("fit", parents=[model, rows], help="train a linear model on files")
    command.add_argument("data", type=Path, nargs="+", help=f"{FORMATS}; several are parts of one data set")
    command.add_argument("--target", help="column to predict (svmlight has it first)")
    command.add_argument("--loss", choices=[*CLASSIFICATION, *REGRESSION], help=f"(default: {DEFAULT.loss})")
    command.add_argument(
        "--columns",
        action="append",
        type=columns_argument,
        default=[],
        metavar="NAME=KIND,...",
        help="kinds of columns where the guess is wrong: number, date, category, text or ignore",
    )
    command.add_argument(
        "--text", action="append", default=[], metavar="COLUMN", help="short for --columns COLUMN=text"
    )
    command.add_argument("--category", action="append", default=[], metavar="COLUMN", help="and for COLUMN=category")
    command.add_argument(
        "--hash-bits",
        type=at_least(1, MAX_HASH_BITS),
        help=f"2^this columns for words and names (default: {DEFAULT.hash_bits})",
    )
    command.add_argument("--penalty", choices=[*PENALTY_OF], help=f"on the coefficients (default: {DEFAULT.penalty})")
    command.add_argument(
        "--alpha", type=number_between(0, MAX_ALPHA), help=f"weight of the penalty (default: {DEFAULT.alpha:g})"
    )
    command.add_argument(
        "--l1-ratio",
        type=number_between(0, 1),
        help=f"share of L1 in the penalty elasticnet (default: {DEFAULT.l1_ratio:g})",
    )
    command.add_argument(
        "--max-model-gb",
        type=positive_number,
        default=4.0,
        metavar="GB",
        help="refuse to begin a model that takes more memory than this (default: 4)",
    )
    command.add_argument("--passes", type=at_least(1), default=5, help="passes over the files (default: 5)")
    command.add_argument(
        "--jobs",
        type=at_least(1),
        default=1,
        help="processes that share several files and merge their models after each pass (default: 1)",
    )
    command.add_argument("--batch-size", type=at_least(1), help=f"rows per update (default: {DEFAULT.batch_size})")
    command.add_argument("--seed", type=at_least(0, LARGEST_SEED), help=f"(default: {DEFAULT.seed})")
    command.add_argument(
        "--resume", action="store_true", help="go on after the last pass that the model file has, with its settings"
    )
    command.set_defaults(run=later("fit"))

    command = commands.add_parser(
        "merge",
        parents=[model],
        help="merge models that learned from different files",
        description="Write the model that knows what several models know. Each coefficient is weighted by the number "
        "of rows that each model has seen its column in, and by their curvature. The models must have the same "
        "columns, classes, loss and settings. `vsgd fit --resume` can go on from the result.",
    )
    command.add_argument("models", type=Path, nargs="+", help="models of `vsgd fit`, .npz")
    command.add_argument("--base", type=Path, help="the model that all of them went on from with --resume")
    command.set_defaults(run=later("merge"))

    command = commands.add_parser("predict", parents=[data, model, rows], help="write a prediction per row")
    command.add_argument("--out", type=Path, help="file to write (default: the terminal)")
    command.add_argument(
        "--probabilities",
        action="store_true",
        help="write the probability of every class, below a header with the classes",
    )
    command.set_defaults(run=later("predict"))

    command = commands.add_parser("score", parents=[data, model, rows], help="print loss and accuracy on a file")
    command.set_defaults(run=later("score"))
