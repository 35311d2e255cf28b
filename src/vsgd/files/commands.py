"""The commands `vsgd fit`, `vsgd merge`, `vsgd predict` and `vsgd score`."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from vsgd.algorithms.columns import COLUMNS
from vsgd.disk import check_input, check_writable, descriptor_of, is_stream, output, refuse_same
from vsgd.errors import UserError, say
from vsgd.files.merging import check_alike
from vsgd.files.merging import merge as merge_models
from vsgd.files.passes import passes_over
from vsgd.files.reading import Chunk, Source, check_format, chunks
from vsgd.files.scan import Scan, guess_schema, scan
from vsgd.files.settings import DEFAULT, Settings, given_kinds, refuse_other_settings, settings_of
from vsgd.files.sources import is_pipe
from vsgd.files.storage import (
    Trained,
    available_memory,
    check_header_length,
    load,
    model_bytes,
    outputs_of,
    save,
    task_of,
)
from vsgd.files.targets import SquaredDeviations, add_values, r_squared, reader_of
from vsgd.linear import new_model
from vsgd.linear.losses import EXPONENTIAL_LINK, LARGEST_LOG_MEAN
from vsgd.linear.model import ROWS
from vsgd.linear.probabilities import WITH_PROBABILITIES, probabilities
from vsgd.linear.training import coefficients, mean_loss
from vsgd.linear.validation import MAX_COLUMNS


def source_of(arguments: argparse.Namespace) -> Source:
    """Return the file of a command that reads one file."""
    return Source(arguments.data, arguments.skip_bad_lines, arguments.delimiter)


def sources_of(arguments: argparse.Namespace) -> list[Source]:
    """Return the training files.

    Raises:
        UserError: if one of them is a pipe or the model file.
    """
    sources = [Source(path, arguments.skip_bad_lines, arguments.delimiter) for path in arguments.data]
    for source in sources:
        if is_pipe(source.path):
            with contextlib.suppress(OSError):  # reported when it is read
                check_input(source.path)
            raise UserError(
                "vsgd fit reads its data several times, and a pipe can be read once. Save them to a file first."
            )
        refuse_same(arguments.model, source.path, "the data file")
    return sources


def bad_lines(count: int) -> str:
    """Return "1 bad line" or "2 bad lines"."""
    return f"{count} bad line{'s' if count > 1 else ''}"


def check_room(columns: int, outputs: int, jobs: int, max_gigabytes: float) -> None:
    """Raise UserError if a model is larger than the limit or than the available memory."""
    size = model_bytes(columns, outputs)
    copies = 1 if jobs == 1 else 2 + 2 * jobs  # the model, its serialized form, and both of these in each process
    if columns > MAX_COLUMNS or size > 1e9 * max_gigabytes:
        raise UserError(
            f"a model of {columns:,} columns and {outputs} outputs takes {size / 1e9:.3g} GB, and {max_gigabytes:g} GB "
            f"is the limit (--max-model-gb). Number the columns of svmlight without gaps, or lower --hash-bits."
        )
    if copies * size > available_memory():
        raise UserError(
            f"a model of {columns:,} columns and {outputs} outputs takes {copies * size / 1e9:.3g} GB with --jobs "
            f"{jobs}, and {available_memory() / 1e9:.3g} GB of memory are available. Lower --hash-bits or --jobs."
        )


def begin(found: Scan, settings: Settings, jobs: int, max_gigabytes: float) -> Trained:
    """Return an untrained model."""
    task, outputs = task_of(settings.loss, len(found.classes)), outputs_of(len(found.classes))
    check_room(found.schema.columns + 1, outputs, jobs, max_gigabytes)
    stored = {name: value for name, value in settings._asdict().items() if name != "hash_bits"}
    trained = Trained(
        model=new_model(found.schema.columns + 1, outputs, task, COLUMNS, settings.seed),
        schema=found.schema,
        classes=found.classes,
        passes=0,
        rows=0,
        **stored,
    )
    check_header_length(trained)
    return trained


def resume(arguments: argparse.Namespace, sources: list[Source]) -> tuple[Trained, Scan]:
    """Return the model of an earlier fit, and a scan of the files.

    Raises:
        UserError: if settings, columns or classes differ from those of the earlier fit.
    """
    if is_stream(arguments.model):
        raise UserError(f"--resume reads the model again, so {arguments.model} must be a regular file")
    trained = load(arguments.model)
    refuse_other_settings(arguments, trained)
    check_format(sources[0].path, trained.schema)
    found = scan(sources, trained.schema, trained.loss)
    if found.classes != trained.classes or found.schema.columns != trained.schema.columns:
        raise UserError(f"{arguments.model} was trained on other columns or classes; train again without --resume")
    return trained, found


def fit(arguments: argparse.Namespace) -> None:
    """Train a linear model on files, in several passes and bounded memory."""
    sources = sources_of(arguments)
    check_writable(arguments.model)
    report = say if descriptor_of(arguments.model) == 1 else print
    if arguments.resume and arguments.model.exists():
        trained, found = resume(arguments, sources)
    else:
        settings = settings_of(arguments)
        schema, line = guess_schema(sources[0], arguments.target, given_kinds(arguments), settings.hash_bits)
        report(line)
        found = scan(sources, schema, settings.loss)
        trained = begin(found, settings, min(arguments.jobs, len(sources)), arguments.max_model_gb)
    begun = trained.passes
    with passes_over(sources, arguments.jobs, found.rows) as one_pass:
        while trained.passes < arguments.passes:
            trained, loss, rows, skipped = one_pass(trained)
            if trained.passes == arguments.passes or not is_stream(arguments.model):
                save(arguments.model, trained)
            note = f", {bad_lines(skipped)} skipped" if skipped else ""
            report(f"pass {trained.passes}: loss {loss:.6g}, {rows} rows{note}")
            if sys.stdout is not None:
                sys.stdout.flush()
    done = "wrote" if trained.passes > begun else "nothing to do for"
    report(f"{done} {arguments.model}")


def merge(arguments: argparse.Namespace) -> None:
    """Write one model from several models of different files."""
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
    report = say if descriptor_of(arguments.model) == 1 else print
    counts = f"{merged.rows} rows, {merged.passes} passes, {merged.model.progress[ROWS]} row visits"
    report(f"wrote {arguments.model}: {len(models)} models, {counts}")


def predictions(arguments: argparse.Namespace, trained: Trained, with_targets: bool) -> Iterator[tuple[Chunk, Any]]:
    """Yield chunks of the file and their margins, rows × outputs."""
    check_format(arguments.data, trained.schema)
    read_target = reader_of(trained.loss, trained.classes) if with_targets else None
    theta = coefficients(trained.model, trained.task)
    for chunk in chunks(source_of(arguments), trained.schema, arguments.chunk_rows or DEFAULT.chunk_rows, read_target):
        yield chunk, np.ascontiguousarray(chunk.X @ theta[:-1]) + theta[-1]


def predicted_classes(margins: Any) -> Any:
    """Return the number of the predicted class of each row."""
    return (margins[:, 0] > 0).astype(int) if margins.shape[1] == 1 else margins.argmax(axis=1)


def predicted_numbers(trained: Trained, margins: Any) -> Any:
    """Return the predicted number of each row; with the Poisson and Gamma losses, the mean."""
    return np.exp(np.minimum(margins[:, 0], LARGEST_LOG_MEAN)) if trained.loss in EXPONENTIAL_LINK else margins[:, 0]


def written(trained: Trained, margins: Any, with_probabilities: bool) -> list[list[str]]:
    """Return the cells of a line per row: the label as in the data, the number, or the probability of each class."""
    if with_probabilities:
        return [[*map(repr, row)] for row in probabilities(margins, trained.loss, softmax=False).tolist()]
    if trained.classes:
        return [[trained.classes[i]] for i in predicted_classes(margins)]
    return [[repr(value)] for value in predicted_numbers(trained, margins).tolist()]


def as_csv(rows: Iterable[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def predict(arguments: argparse.Namespace) -> None:
    """Write one prediction per row as CSV, in the order of the file. A skipped row gives an empty line.

    Probabilities have a column per class, and a header that names the classes.
    """
    refuse_same(arguments.out, arguments.data, "the data file")
    refuse_same(arguments.out, arguments.model, "the model")
    trained = load(arguments.model)
    if arguments.probabilities and trained.loss not in WITH_PROBABILITIES:
        losses = " or ".join(WITH_PROBABILITIES)
        raise UserError(f"--probabilities needs a model with --loss {losses}; {arguments.model} has {trained.loss}")
    skipped = 0
    with output(arguments.out) as write:
        if arguments.probabilities:
            write(as_csv([trained.classes]))
        for chunk, margins in predictions(arguments, trained, with_targets=False):
            lines = iter(written(trained, margins, arguments.probabilities))
            write(as_csv(next(lines) if good else [] for good in chunk.good))
            skipped += len(chunk.good) - len(chunk.y)
    if skipped:
        say(f"vsgd: {bad_lines(skipped)}, with an empty prediction")


def score(arguments: argparse.Namespace) -> None:
    """Print the mean loss, and the accuracy or R²."""
    trained = load(arguments.model)
    loss, right, error = 0.0, 0, 0.0
    rows = 0
    deviations: SquaredDeviations | None = None
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
            deviations = add_values(deviations, chunk.y)
    if rows == 0:
        raise UserError(f"{arguments.data} has no rows")
    print(f"rows {rows}")
    print(f"{trained.loss} {loss / rows:.6g}")
    if deviations is None:
        print(f"accuracy {right / rows:.6g}")
    else:
        print(f"R2 {r_squared(error, deviations):.6g}")
