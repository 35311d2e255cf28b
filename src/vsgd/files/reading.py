"""Files in chunks of rows: svmlight, CSV and Parquet, gzipped or not. Never more than one chunk is in memory."""

from __future__ import annotations

import contextlib
import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vsgd.errors import UserError
from vsgd.files.schema import BadRow, Example, Schema, encode, missing
from vsgd.files.svmlight import examples_of

SVMLIGHT = (".svm", ".libsvm", ".svmlight")


class Chunk(NamedTuple):
    """Rows and their targets as they are written; `skipped` counts the bad lines left out since the last chunk."""

    X: Any
    targets: list[str]
    skipped: int


def suffix(path: Path) -> str:
    """What the file is, gzipped or not."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def is_svmlight(path: Path) -> bool:
    return suffix(path) in SVMLIGHT


@contextlib.contextmanager
def opened(path: Path, mode: str) -> Iterator[Any]:
    """A file to read, gzipped or not. What goes wrong is told in one line."""
    try:
        with gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode) as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is cut short or damaged: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def lines(path: Path) -> Iterator[str]:
    with opened(path, "rt") as file:
        yield from file


def table_rows(path: Path) -> Iterator[tuple[int, dict[str, str] | BadRow]]:
    """Line numbers and cells by name, of a CSV or a Parquet file."""
    if suffix(path) == ".parquet":
        try:
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise UserError("Parquet files need pyarrow: pip install pyarrow") from None
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        rows = (row for batch in batches for row in batch.to_pylist())
        for i, row in enumerate(rows, start=1):
            yield i, {name: "" if cell is None else str(cell) for name, cell in row.items()}
        return
    reader = csv.reader(lines(path))
    names = next(reader, None)
    if names is None:
        raise UserError(f"{path} is empty")
    for cells in reader:
        if len(cells) == len(names):
            yield reader.line_num, dict(zip(names, cells, strict=True))
        elif cells:
            yield reader.line_num, BadRow(f"{len(cells)} cells instead of {len(names)}")


def examples(path: Path, schema: Schema, need_target: bool) -> Iterator[tuple[int, Example | BadRow]]:
    """Line numbers and examples, or what is wrong with them."""
    if schema.format == "svmlight":
        with opened(path, "rb") as file:
            yield from examples_of(file)
        return
    for i, row in table_rows(path):
        try:
            if isinstance(row, BadRow):
                raise row
            if absent := missing(schema, row, need_target):
                raise UserError(
                    f"{path} lacks the column {', '.join(map(repr, absent))} that the model was trained with"
                )
            if need_target and not row[schema.target]:
                raise BadRow(f"no value in the target column {schema.target!r}")
            columns, values = encode(row, schema)
            yield i, Example(np.array(columns, np.int64), np.array(values), row.get(schema.target, ""))
        except BadRow as bad:
            yield i, bad


def good_examples(path: Path, schema: Schema, skip_bad_lines: bool, need_target: bool) -> Iterator[Example | None]:
    """Examples, and None for a line that cannot be read, unless that is an error."""
    for line, example in examples(path, schema, need_target):
        if not isinstance(example, BadRow):
            yield example
        elif skip_bad_lines:
            yield None
        else:
            raise UserError(f"{path}, line {line}: {example} (--skip-bad-lines goes on without it)")


def chunks(path: Path, schema: Schema, rows: int, skip_bad_lines: bool, need_target: bool = True) -> Iterator[Chunk]:
    """The file as matrices of at most so many rows. Columns that a model does not know are left out."""
    batch: list[Example] = []
    skipped = 0
    for example in good_examples(path, schema, skip_bad_lines, need_target):
        if example is None:
            skipped += 1
            continue
        batch.append(example)
        if len(batch) == rows:
            yield assemble(batch, schema.columns, skipped)
            batch, skipped = [], 0
    if batch or skipped:
        yield assemble(batch, schema.columns, skipped)


def assemble(batch: list[Example], columns: int, skipped: int) -> Chunk:
    lengths = [len(example.columns) for example in batch]
    indices = np.concatenate([np.empty(0, np.int64), *(example.columns for example in batch)])
    data = np.concatenate([np.empty(0), *(example.values for example in batch)])
    indptr = np.cumsum([0, *lengths])
    width = max(columns, int(indices.max(initial=0)) + 1)
    X = sparse.csr_matrix((data, indices, indptr), shape=(len(batch), width))[:, :columns]
    X.sum_duplicates()
    return Chunk(X, [example.target for example in batch], skipped)
