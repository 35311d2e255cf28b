"""What `vsgd fit`, `vsgd predict` and `vsgd score` do."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from vsgd.algorithms.columns import COLUMNS
from vsgd.errors import UserError
from vsgd.files.reading import Chunk, chunks, good_examples, is_svmlight, table_rows
from vsgd.files.schema import BadRow, Schema, infer
from vsgd.files.storage import Trained, load, save, task_of
from vsgd.linear import CLASSIFICATION, Training, as_rows, new_model, train_on
from vsgd.linear.training import coefficients, mean_loss

ROWS_TO_GUESS = 1000
MOST_CLASSES = 1000


class Scan(NamedTuple):
    schema: Schema
    targets: list[str]
    """The different targets of a classification, sorted."""
    rows: int


def scan(arguments: argparse.Namespace) -> Scan:
    """A first pass over the file: what its columns are, which classes there are, and whether its lines are good."""
    path = arguments.data
    if is_svmlight(path):
        schema = Schema("svmlight", "", [], [], [], 0, 0)
    else:
        if arguments.target is None:
            raise UserError("--target must name the column to predict")
        good = (row for _, row in table_rows(path) if not isinstance(row, BadRow))
        first = list(itertools.islice(good, ROWS_TO_GUESS))
        if not first:
            raise UserError(f"{path} has no rows")
        schema = infer(first, arguments.target, arguments.text, arguments.category, arguments.hash_bits)
    targets: set[str] = set()
    rows, columns = 0, schema.columns
    for example in good_examples(path, schema, arguments.skip_bad_lines, need_target=True):
        if example is None:
            continue
        rows += 1
        columns = max(columns, int(example.columns.max(initial=-1)) + 1)
        if arguments.loss in CLASSIFICATION:
            targets.add(example.target)
        if len(targets) > MOST_CLASSES:
            raise UserError(f"more than {MOST_CLASSES} classes; for numbers choose --loss squared_error")
    if arguments.loss in CLASSIFICATION and len(targets) < 2:
        raise UserError(f"{path} has {len(targets)} class in its targets; a classifier needs at least two")
    return Scan(schema._replace(columns=columns), sorted(targets), rows)


def numeric_targets(chunk: Chunk, trained: Trained) -> Any:
    """Targets as the kernel wants them."""
    if not trained.classes:
        try:
            return np.array([float(target) for target in chunk.targets])
        except ValueError as error:
            raise UserError(f"a target is not a number: {error}") from None
    place = {label: i for i, label in enumerate(trained.classes)}
    unknown = sorted(set(chunk.targets) - set(place))
    if unknown:
        raise UserError(f"classes that the model was not trained with: {', '.join(unknown[:5])}")
    labels = np.array([place[target] for target in chunk.targets], float)
    return labels if len(place) > 2 else 2 * labels - 1


def fit(arguments: argparse.Namespace) -> None:
    """Train a linear model on a file, in several passes of constant memory."""
    found = scan(arguments)
    if arguments.resume and arguments.model.exists():
        trained = load(arguments.model)
        if trained.schema != found.schema or trained.classes != found.targets or trained.loss != arguments.loss:
            raise UserError(
                f"{arguments.model} was trained on other columns, classes or loss; train anew without --resume"
            )
    else:
        task = task_of(arguments.loss, len(found.targets))
        outputs = len(found.targets) if len(found.targets) > 2 else 1
        model = new_model(found.schema.columns + 1, outputs, task, COLUMNS, arguments.seed)
        trained = Trained(model, found.schema, arguments.loss, found.targets, 0, arguments.batch_size)
    training = Training(trained.task, COLUMNS, trained.batch_size)
    for number in range(trained.passes, arguments.passes):
        loss, skipped = one_pass(arguments, trained, training, number, found.rows)
        trained = trained._replace(passes=number + 1)
        save(arguments.model, trained)
        note = f", {skipped} bad lines skipped" if skipped else ""
        print(f"pass {number + 1}: loss {loss:.6g}, {found.rows} rows{note}")
    print(f"wrote {arguments.model}")


def one_pass(
    arguments: argparse.Namespace, trained: Trained, training: Training, number: int, rows: int
) -> tuple[float, int]:
    """Learn from every chunk once, its rows shuffled. The mean loss before learning, and the bad lines."""
    total, skipped = 0.0, 0
    rng = np.random.default_rng((arguments.seed, number))
    quiet = None if sys.stderr.isatty() else True
    with tqdm(total=rows, unit=" rows", desc=f"pass {number + 1}", disable=quiet) as bar:
        for chunk in chunks(arguments.data, trained.schema, arguments.chunk_rows, arguments.skip_bad_lines):
            y = numeric_targets(chunk, trained)
            skipped += chunk.skipped
            if len(y) == 0:
                continue
            order = rng.permutation(len(y))
            loss = train_on(trained.model, as_rows(chunk.X), order, y, np.ones(len(y)), training)
            total += loss * len(y)
            bar.update(len(y))
            bar.set_postfix(loss=f"{loss:.4g}")
    return total / rows, skipped


def margins(trained: Trained, X: Any) -> Any:
    theta = coefficients(trained.model, trained.task)
    return np.ascontiguousarray(X @ theta[:-1]) + theta[-1]


def labels(trained: Trained, at: Any) -> list[str]:
    """Predictions as they are written."""
    if not trained.classes:
        values = np.exp(at[:, 0]) if trained.loss == "poisson" else at[:, 0]
        return [f"{value:.9g}" for value in values]
    best = (at[:, 0] > 0).astype(int) if at.shape[1] == 1 else at.argmax(axis=1)
    return [trained.classes[i] for i in best]


def predicted(arguments: argparse.Namespace, need_target: bool) -> Iterator[tuple[Trained, Chunk, Any]]:
    trained = load(arguments.model)
    for chunk in chunks(arguments.data, trained.schema, arguments.chunk_rows, arguments.skip_bad_lines, need_target):
        yield trained, chunk, margins(trained, chunk.X)


def predict(arguments: argparse.Namespace) -> None:
    """Write one prediction per row, in the order of the file."""
    temporary = None if arguments.out is None else arguments.out.with_name(f".{arguments.out.name}.part")
    with contextlib.ExitStack() as stack:
        if temporary is not None:
            stack.callback(temporary.unlink, missing_ok=True)
        out = sys.stdout if temporary is None else stack.enter_context(temporary.open("w"))
        for trained, _, at in predicted(arguments, need_target=False):
            out.writelines(f"{label}\n" for label in labels(trained, at))
        if temporary is not None:
            out.flush()
            temporary.replace(arguments.out)


def score(arguments: argparse.Namespace) -> None:
    """Print the mean loss, and the share of rows predicted right or the share of variance explained."""
    loss, rows, right, error = 0.0, 0, 0, 0.0
    targets = np.zeros(2)
    trained = load(arguments.model)
    for _, chunk, at in predicted(arguments, need_target=True):
        y = numeric_targets(chunk, trained)
        count = len(y)
        if count == 0:
            continue
        rows += count
        loss += count * mean_loss(at, y, np.ones(count), trained.task)
        guesses = labels(trained, at)
        if trained.classes:
            right += sum(guess == target for guess, target in zip(guesses, chunk.targets, strict=True))
        else:
            error += float(np.sum((np.array(guesses, float) - y) ** 2))
            targets += y.sum(), (y * y).sum()
    if rows == 0:
        raise UserError(f"{arguments.data} has no rows")
    print(f"rows {rows}")
    print(f"{trained.loss} {loss / rows:.6g}")
    if trained.classes:
        print(f"accuracy {right / rows:.6g}")
    else:
        print(f"R2 {1 - error / (targets[1] - targets[0] ** 2 / rows):.6g}")
