"""Files in chunks of rows: svmlight, CSV and Parquet, gzipped or not. Never more than one chunk is in memory."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from vsgd.errors import UserError
from vsgd.files.schema import BadRow, Schema, encode, missing, number

SVMLIGHT = (".svm", ".libsvm", ".svmlight")


class Chunk(NamedTuple):
    """Rows and their targets as they are written; `skipped` counts the bad lines left out since the last chunk."""

    X: Any
    targets: list[str]
    skipped: int


class Example(NamedTuple):
    columns: list[int]
    values: list[float]
    target: str


def suffix(path: Path) -> str:
    """What the file is, gzipped or not."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def is_svmlight(path: Path) -> bool:
    return suffix(path) in SVMLIGHT


def lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is cut short or damaged: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


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


def svmlight_example(line: str) -> Example:
    """`target index:value index:value ... # comment`."""
    target, *cells = line.partition("#")[0].split()
    columns, values = [], []
    for cell in cells:
        index, colon, value = cell.partition(":")
        if index == "qid":
            continue
        if not colon or not index.isdecimal():
            raise BadRow(f"{cell!r} is not index:value")
        columns.append(int(index))
        values.append(number(value, index))
    return Example(columns, values, target)


def examples(path: Path, schema: Schema | None, need_target: bool) -> Iterator[tuple[int, Example | BadRow]]:
    """Line numbers and examples, or what is wrong with them. Without schema the file is svmlight."""
    if schema is None or schema.format == "svmlight":
        for i, line in enumerate(lines(path), start=1):
            if line.partition("#")[0].strip():
                try:
                    yield i, svmlight_example(line)
                except BadRow as bad:
                    yield i, bad
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
            yield i, Example(*encode(row, schema), row.get(schema.target, ""))
        except BadRow as bad:
            yield i, bad


def chunks(path: Path, schema: Schema, rows: int, skip_bad_lines: bool, need_target: bool = True) -> Iterator[Chunk]:
    """The file as matrices of at most so many rows. Columns that a model does not know are left out."""
    batch: list[Example] = []
    skipped = 0
    for line, example in examples(path, schema, need_target):
        if isinstance(example, BadRow):
            if not skip_bad_lines:
                raise UserError(f"{path}, line {line}: {example} (--skip-bad-lines goes on without it)")
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
    indices = np.array([column for example in batch for column in example.columns], np.int64)
    data = np.array([value for example in batch for value in example.values], np.float64)
    indptr = np.cumsum([0, *lengths])
    width = max(columns, int(indices.max(initial=0)) + 1)
    X = sparse.csr_matrix((data, indices, indptr), shape=(len(batch), width))[:, :columns]
    X.sum_duplicates()
    return Chunk(X, [example.target for example in batch], skipped)
