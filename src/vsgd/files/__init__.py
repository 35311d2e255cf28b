"""The commands `vsgd fit`, `predict`, `score` and `merge`: linear models on files that are larger than memory."""

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
    """Return a command that imports its dependencies when it runs. Other commands then work without them."""

    def run(arguments: argparse.Namespace) -> None:
        try:
            commands = importlib.import_module("vsgd.files.commands")
        except ModuleNotFoundError as error:
            raise UserError(f"files need {error.name}: {install('files')}") from None
        getattr(commands, name)(arguments)

    return run


def add_commands(commands: Any) -> None:
    """Add the four commands to the result of `ArgumentParser.add_subparsers`. Each sets `run`."""
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
        help="character between the cells of CSV, or the word tab (default: detected among , ; | and tab)",
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
        help="kinds of columns, where detection is wrong: number, date, category, text or ignore",
    )
    command.add_argument(
        "--text", action="append", default=[], metavar="COLUMN", help="short for --columns COLUMN=text"
    )
    command.add_argument(
        "--category", action="append", default=[], metavar="COLUMN", help="short for --columns COLUMN=category"
    )
    command.add_argument(
        "--hash-bits",
        type=at_least(1, MAX_HASH_BITS),
        help=f"words and categories are hashed into 2^BITS columns (default: {DEFAULT.hash_bits})",
        metavar="BITS",
    )
    command.add_argument(
        "--penalty", choices=[*PENALTY_OF], help=f"penalty on the coefficients (default: {DEFAULT.penalty})"
    )
    command.add_argument(
        "--alpha", type=number_between(0, MAX_ALPHA), help=f"weight of the penalty (default: {DEFAULT.alpha:g})"
    )
    command.add_argument(
        "--l1-ratio",
        type=number_between(0, 1),
        help=f"fraction of L1 in the penalty elasticnet (default: {DEFAULT.l1_ratio:g})",
    )
    command.add_argument(
        "--max-model-gb",
        type=positive_number,
        default=4.0,
        metavar="GB",
        help="maximum memory of the model; larger models are an error (default: 4)",
    )
    command.add_argument("--passes", type=at_least(1), default=5, help="passes over the files (default: 5)")
    command.add_argument(
        "--jobs",
        type=at_least(1),
        default=1,
        help="processes that share several files and merge their models after each pass (default: 1)",
    )
    command.add_argument("--batch-size", type=at_least(1), help=f"rows per update (default: {DEFAULT.batch_size})")
    command.add_argument(
        "--seed", type=at_least(0, LARGEST_SEED), help=f"seed of shuffling and probes (default: {DEFAULT.seed})"
    )
    command.add_argument(
        "--resume", action="store_true", help="continue after the last pass in the model file, with its settings"
    )
    command.set_defaults(run=later("fit"))

    command = commands.add_parser(
        "merge",
        parents=[model],
        help="merge models of different files",
        description="Write one model from several models of different files. Each coefficient is a mean, weighted by "
        "the number of rows in which a model has seen the column, and by their curvature. The models must have the "
        "same columns, classes, loss and settings. `vsgd fit --resume` can continue from the result.",
    )
    command.add_argument("models", type=Path, nargs="+", help="models of `vsgd fit`, .npz")
    command.add_argument("--base", type=Path, help="the model that all of them continued from with --resume")
    command.set_defaults(run=later("merge"))

    command = commands.add_parser("predict", parents=[data, model, rows], help="write a prediction per row")
    command.add_argument("--out", type=Path, help="file to write (default: standard output)")
    command.add_argument(
        "--probabilities",
        action="store_true",
        help="write the probability of every class, below a header with the classes",
    )
    command.set_defaults(run=later("predict"))

    command = commands.add_parser("score", parents=[data, model, rows], help="print loss and accuracy on a file")
    command.set_defaults(run=later("score"))
