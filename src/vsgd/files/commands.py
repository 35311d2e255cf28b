"""What `vsgd fit`, `vsgd merge`, `vsgd predict` and `vsgd score` do."""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from vsgd.algorithms.columns import COLUMNS
from vsgd.disk import check_writable, descriptor_of, is_stream, output, refuse_same
from vsgd.errors import UserError
from vsgd.files.merging import check_alike
from vsgd.files.merging import merge as merge_models
from vsgd.files.passes import passes_over
from vsgd.files.reading import Chunk, Source, check_format, chunks
from vsgd.files.scan import Scan, guess_schema, scan
from vsgd.files.settings import DEFAULT, Settings, kinds_said, refuse_other_settings, settings_of
from vsgd.files.sources import is_pipe
from vsgd.files.storage import Trained, load, outputs_of, save, task_of
from vsgd.files.targets import Spread, r_squared, reader_of, spread_over
from vsgd.linear import new_model
from vsgd.linear.gate import MOST_COLUMNS
from vsgd.linear.losses import EXPONENTIAL_LINK, LARGEST_LOG_MEAN
from vsgd.linear.model import FIELDS, ROWS
from vsgd.linear.training import coefficients, mean_loss


def source_of(arguments: argparse.Namespace) -> Source:
    return Source(arguments.data, arguments.skip_bad_lines)


def sources_of(arguments: argparse.Namespace) -> list[Source]:
    """The files to learn from, all of the format and the columns of the first."""
    sources = [Source(path, arguments.skip_bad_lines) for path in arguments.data]
    for source in sources:
        if is_pipe(source.path):
            raise UserError(
                "vsgd fit reads its data several times, and a pipe can be read once. Save them to a file first."
            )
        refuse_same(arguments.model, source.path, "the data file")
    return sources


def bad_lines(count: int) -> str:
    return f"{count} bad line{'s' if count > 1 else ''}"


def check_room(columns: int, outputs: int, jobs: int) -> None:
    """Refuse a model that memory has no room for, before the machine stands still."""
    copies = 2 if jobs == 1 else 2 + 2 * jobs  # itself, what is written of it, and what each process has and sends
    size = copies * 8 * columns * FIELDS * outputs
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else size
    if columns > MOST_COLUMNS or size > memory:
        raise UserError(
            f"a model of {columns} columns and {outputs} outputs takes {size / 1e9:.3g} GB, and this machine has "
            f"{memory / 1e9:.3g} GB. Number the columns of svmlight without gaps, or take fewer --hash-bits or --jobs."
        )


def begin(found: Scan, settings: Settings, jobs: int) -> Trained:
    """A model that has learnt nothing yet."""
    task, outputs = task_of(settings.loss, len(found.classes)), outputs_of(len(found.classes))
    check_room(found.schema.columns + 1, outputs, jobs)
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


def resume(arguments: argparse.Namespace, sources: list[Source]) -> tuple[Trained, Scan]:
    """The model of an earlier fit, if this one asks for the same."""
    if is_stream(arguments.model):
        raise UserError(f"--resume reads the model again, so {arguments.model} must be a regular file")
    trained = load(arguments.model)
    refuse_other_settings(arguments, trained)
    check_format(sources[0].path, trained.schema)
    found = scan(sources, trained.schema, trained.loss)
    if found.classes != trained.classes or found.schema.columns != trained.schema.columns:
        raise UserError(f"{arguments.model} was trained on other columns or classes; train anew without --resume")
    return trained, found


def fit(arguments: argparse.Namespace) -> None:
    """Train a linear model on files, in several passes of constant memory."""
    sources = sources_of(arguments)
    check_writable(arguments.model)
    say_to = sys.stderr if descriptor_of(arguments.model) == 1 else sys.stdout
    if arguments.resume and arguments.model.exists():
        trained, found = resume(arguments, sources)
    else:
        settings = settings_of(arguments)
        schema, line = guess_schema(sources[0].path, arguments.target, kinds_said(arguments), settings.hash_bits)
        print(line, file=say_to)
        found = scan(sources, schema, settings.loss)
        trained = begin(found, settings, min(arguments.jobs, len(sources)))
    begun = trained.passes
    with passes_over(sources, arguments.jobs, found.rows) as one_pass:
        while trained.passes < arguments.passes:
            trained, loss, rows, skipped = one_pass(trained)
            if trained.passes == arguments.passes or not is_stream(arguments.model):
                save(arguments.model, trained)
            note = f", {bad_lines(skipped)} skipped" if skipped else ""
            print(f"pass {trained.passes}: loss {loss:.6g}, {rows} rows{note}", file=say_to, flush=True)
    done = "wrote" if trained.passes > begun else "nothing to do for"
    print(f"{done} {arguments.model}", file=say_to)


def merge(arguments: argparse.Namespace) -> None:
    """Write the model that knows what several models know."""
    given = [*arguments.models, *([] if arguments.base is None else [arguments.base])]
    for path in given:
        refuse_same(arguments.model, path, "one of the models to merge")
    models = [load(path) for path in given]
    check_alike(given, models)
    base = None if arguments.base is None else models.pop()
    try:
        merged = merge_models(models, base)
    except ValueError as error:
        raise UserError(f"cannot merge with --base {arguments.base}: {error}") from None
    save(arguments.model, merged)
    say_to = sys.stderr if descriptor_of(arguments.model) == 1 else sys.stdout
    rows = merged.model.progress[ROWS]
    print(f"wrote {arguments.model}: {len(models)} models, {rows} rows learned from", file=say_to)


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
    return np.exp(np.minimum(margins[:, 0], LARGEST_LOG_MEAN)) if trained.loss in EXPONENTIAL_LINK else margins[:, 0]


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
