"""What `vsgd fit`, `vsgd predict` and `vsgd score` do."""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from vsgd.algorithms.columns import COLUMNS
from vsgd.disk import check_writable, descriptor_of, is_stream, output, refuse_same
from vsgd.errors import UserError
from vsgd.files.reading import Chunk, Source, check_format, chunks
from vsgd.files.scan import Scan, guess_schema, scan
from vsgd.files.settings import DEFAULT, Settings, kinds_said, refuse_other_settings, settings_of
from vsgd.files.sources import is_pipe
from vsgd.files.storage import Trained, load, outputs_of, save, task_of
from vsgd.files.targets import Spread, r_squared, reader_of, spread_over
from vsgd.linear import Training, as_rows, new_model, train_on
from vsgd.linear.gate import MOST_COLUMNS
from vsgd.linear.losses import LARGEST_LOG_MEAN
from vsgd.linear.model import FIELDS
from vsgd.linear.training import coefficients, mean_loss


def source_of(arguments: argparse.Namespace) -> Source:
    return Source(arguments.data, arguments.skip_bad_lines)


def bad_lines(count: int) -> str:
    return f"{count} bad line{'s' if count > 1 else ''}"


def check_room(columns: int, outputs: int) -> None:
    """Refuse a model that memory has no room for, before the machine stands still."""
    size = 2 * 8 * columns * FIELDS * outputs  # itself, and what is written of it
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else size
    if columns > MOST_COLUMNS or size > memory:
        raise UserError(
            f"a model of {columns} columns and {outputs} outputs takes {size / 1e9:.3g} GB, and this machine has "
            f"{memory / 1e9:.3g} GB. Number the columns of svmlight without gaps, or take fewer --hash-bits."
        )


def begin(found: Scan, settings: Settings) -> Trained:
    """A model that has learnt nothing yet."""
    task, outputs = task_of(settings.loss, len(found.classes)), outputs_of(len(found.classes))
    check_room(found.schema.columns + 1, outputs)
    return Trained(
        model=new_model(found.schema.columns + 1, outputs, task, COLUMNS, settings.seed),
        schema=found.schema,
        loss=settings.loss,
        classes=found.classes,
        passes=0,
        batch_size=settings.batch_size,
        seed=settings.seed,
        chunk_rows=settings.chunk_rows,
    )


def resume(arguments: argparse.Namespace) -> tuple[Trained, Scan]:
    """The model of an earlier fit, if this one asks for the same."""
    if is_stream(arguments.model):
        raise UserError(f"--resume reads the model again, so {arguments.model} must be a regular file")
    trained = load(arguments.model)
    refuse_other_settings(arguments, trained)
    check_format(arguments.data, trained.schema)
    found = scan(source_of(arguments), trained.schema, trained.loss)
    if found.classes != trained.classes or found.schema.columns != trained.schema.columns:
        raise UserError(f"{arguments.model} was trained on other columns or classes; train anew without --resume")
    return trained, found


def fit(arguments: argparse.Namespace) -> None:
    """Train a linear model on a file, in several passes of constant memory."""
    if is_pipe(arguments.data):
        raise UserError(
            "vsgd fit reads its data several times, and a pipe can be read once. Save them to a file first."
        )
    refuse_same(arguments.model, arguments.data, "the data file")
    check_writable(arguments.model)
    say_to = sys.stderr if descriptor_of(arguments.model) == 1 else sys.stdout
    if arguments.resume and arguments.model.exists():
        trained, found = resume(arguments)
    else:
        settings = settings_of(arguments)
        schema, line = guess_schema(arguments.data, arguments.target, kinds_said(arguments), settings.hash_bits)
        print(line, file=say_to)
        found = scan(source_of(arguments), schema, settings.loss)
        trained = begin(found, settings)
    begun = trained.passes
    for number in range(begun, arguments.passes):
        loss, skipped = one_pass(source_of(arguments), trained, number, found.rows)
        trained = trained._replace(passes=number + 1)
        if number + 1 == arguments.passes or not is_stream(arguments.model):
            save(arguments.model, trained)
        note = f", {bad_lines(skipped)} skipped" if skipped else ""
        print(f"pass {number + 1}: loss {loss:.6g}, {found.rows} rows{note}", file=say_to, flush=True)
    done = "wrote" if trained.passes > begun else "nothing to do for"
    print(f"{done} {arguments.model}", file=say_to)


def one_pass(source: Source, trained: Trained, number: int, rows: int) -> tuple[float, int]:
    """Learn from every chunk once, its rows shuffled. The mean loss before learning, and the bad lines."""
    total, seen, skipped = 0.0, 0, 0
    training = Training(trained.task, COLUMNS, trained.batch_size)
    rng = np.random.default_rng((trained.seed, number))
    quiet = None if sys.stderr is not None and sys.stderr.isatty() else True
    with tqdm(total=rows, unit=" rows", desc=f"pass {number + 1}", disable=quiet) as bar:
        for chunk in chunks(source, trained.schema, trained.chunk_rows, reader_of(trained.loss, trained.classes)):
            count = len(chunk.y)
            skipped += len(chunk.good) - count
            if count:
                order = rng.permutation(count)
                loss = train_on(trained.model, as_rows(chunk.X), order, chunk.y, np.ones(count), training)
                total, seen = total + loss * count, seen + count
                bar.update(count)
                bar.set_postfix(loss=f"{loss:.4g}")
    return total / max(seen, 1), skipped


def predictions(arguments: argparse.Namespace, trained: Trained, with_targets: bool) -> Iterator[tuple[Chunk, Any]]:
    """Chunks of the file and their margins, rows × outputs."""
    check_format(arguments.data, trained.schema)
    read_target = reader_of(trained.loss, trained.classes) if with_targets else None
    theta = coefficients(trained.model, trained.task)
    for chunk in chunks(source_of(arguments), trained.schema, arguments.chunk_rows or DEFAULT.chunk_rows, read_target):
        yield chunk, np.ascontiguousarray(chunk.X @ theta[:-1]) + theta[-1]


def predicted_classes(margins: Any) -> Any:
    return (margins[:, 0] > 0).astype(int) if margins.shape[1] == 1 else margins.argmax(axis=1)


def predicted_numbers(trained: Trained, margins: Any) -> Any:
    return np.exp(np.minimum(margins[:, 0], LARGEST_LOG_MEAN)) if trained.loss == "poisson" else margins[:, 0]


def written(trained: Trained, margins: Any) -> list[str]:
    """Predictions as they are written: labels as in the training data, numbers with all their digits."""
    if trained.classes:
        return [trained.classes[i] for i in predicted_classes(margins)]
    return [repr(value) for value in predicted_numbers(trained, margins).tolist()]


def predict(arguments: argparse.Namespace) -> None:
    """Write one prediction per row, in the order of the file, as CSV; an empty line for a row that is skipped."""
    refuse_same(arguments.out, arguments.data, "the data file")
    refuse_same(arguments.out, arguments.model, "the model")
    trained = load(arguments.model)
    skipped = 0
    with output(arguments.out) as write:
        for chunk, margins in predictions(arguments, trained, with_targets=False):
            labels = iter(written(trained, margins))
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerows([next(labels)] if good else [] for good in chunk.good)
            write(text.getvalue().encode())
            skipped += len(chunk.good) - len(chunk.y)
    if skipped:
        print(f"vsgd: {bad_lines(skipped)}, with an empty prediction", file=sys.stderr)


def score(arguments: argparse.Namespace) -> None:
    """Print the mean loss, and the share of rows predicted right or the share of variance explained."""
    trained = load(arguments.model)
    loss, right, error = 0.0, 0, 0.0
    rows = 0
    spread: Spread | None = None
    for chunk, margins in predictions(arguments, trained, with_targets=True):
        count = len(chunk.y)
        if count == 0:
            continue
        rows += count
        loss += count * mean_loss(margins, chunk.y, np.ones(count), trained.task)
        if trained.classes:
            place = chunk.y if margins.shape[1] > 1 else (chunk.y + 1) / 2
            right += int((predicted_classes(margins) == place).sum())
        else:
            error += float(((predicted_numbers(trained, margins) - chunk.y) ** 2).sum())
            spread = spread_over(spread, chunk.y)
    if rows == 0:
        raise UserError(f"{arguments.data} has no rows")
    print(f"rows {rows}")
    print(f"{trained.loss} {loss / rows:.6g}")
    if spread is None:
        print(f"accuracy {right / rows:.6g}")
    else:
        print(f"R2 {r_squared(error, spread):.6g}")
