"""Rows of Parquet files as text, in bounded memory.

A small file can hold a large table: pages are compressed, and a repeated value is stored once, in a dictionary. Memory
is bounded in three ways. The size of every page is read from its header before pyarrow decompresses it. Dictionaries
are not expanded. The number of rows per batch is computed from the bytes of the pages, not only from the cells.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from vsgd.disk import check_input
from vsgd.errors import UserError
from vsgd.files.sources import BLOCK, MAX_LINE, is_pipe, too_long
from vsgd.files.tables import Rows, Table

MAX_CELLS = 1 << 20
"""Maximum number of cells that are read at once."""

MAX_PAGES = 1 << 28
"""Maximum number of bytes in the largest pages of all columns together: pyarrow has one page of each in memory."""

BATCH_BYTES = 1 << 26
"""Approximate number of bytes of the rows that are read at once."""

BYTE_ARRAY, FIXED_LENGTH_BYTE_ARRAY = 6, 7
"""Physical types whose values can be long. The specification of Parquet numbers types and encodings."""

DICTIONARY_ENCODINGS = frozenset([0, 2, 3, 4, 8])
"""Encodings that pyarrow can read as a dictionary: all except delta encodings."""

FOOTER_END = 8
"""Bytes at the end of a file: the length of the footer, and the letters PAR1."""

DICTIONARY_PAGE = 2
DELTA_BYTE_ARRAY = 7
"""An encoding in which a value can repeat the beginning of the previous one, so values can be longer than stored."""

MAX_HEADER = 1 << 24
"""Maximum length of a page header, in bytes; pyarrow has the same limit."""

MAX_DEPTH = 8
"""Maximum depth of nested structures in a page header."""


class ColumnChunk(NamedTuple):
    """A column in a row group.

    Attributes:
        path: name of the column; of a part of a nested column, names joined by dots.
        physical_type: number in the specification of Parquet.
        encodings: encodings of all its pages.
        values: number of values.
        start, end: range of its pages in the file, in bytes.
    """

    path: str
    physical_type: int
    encodings: frozenset[int]
    values: int
    start: int
    end: int


class Page(NamedTuple):
    """The content of a page header.

    Attributes:
        size: bytes after decompression.
        values: number of values; 0 for a dictionary.
        encoding: encoding of the values, by its number in the specification of Parquet.
    """

    size: int
    values: int
    encoding: int


@contextlib.contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Raise UserError for any exception. On damaged files, pyarrow raises more than its own exceptions."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from None
    except Exception as error:
        raise UserError(f"{path} is damaged, or not a supported Parquet file: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def parquet_table(path: Path) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UserError("Parquet files need pyarrow: pip install pyarrow") from None
    if path.suffix == ".gz":
        raise UserError(f"{path} cannot be read: gzipped Parquet is not supported. Decompress it with gunzip.")
    with parquet_errors(path):
        check_input(path)
        if is_pipe(path):
            raise UserError(
                f"{path} cannot be read: Parquet needs a regular file, not a pipe. Save it to a file first."
            )
        with path.open("rb") as raw:
            groups = row_groups_of(raw)
        compact = dictionary_columns(groups)
        file = pyarrow.parquet.ParquetFile(path, read_dictionary=[*compact], buffer_size=BLOCK)
        schema = file.schema_arrow
        nested = frozenset(field.name for field in schema if pyarrow.types.is_nested(field.type))
        return Table(list(schema.names), parquet_rows(path, file, groups, nested, compact), "row", nested)


def row_groups_of(raw: IO[bytes]) -> list[list[ColumnChunk]]:
    """Return the column chunks of each row group, read from the footer of a file.

    `pyarrow.parquet.FileMetaData` also has them, but it ends the process if some fields are damaged.
    """
    size = raw.seek(0, io.SEEK_END)
    raw.seek(max(0, size - FOOTER_END))
    end = raw.read(FOOTER_END)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or length > size - FOOTER_END:
        raise ValueError("it has no footer")
    raw.seek(size - FOOTER_END - length)
    footer, _ = read_structure(raw.read(length), 0, MAX_DEPTH)
    return [[column_chunk(column[3]) for column in group[1]] for group in footer.get(4, [])]


def column_chunk(fields: dict[int, Any]) -> ColumnChunk:
    start = fields[9]
    if 0 < fields.get(11, 0) < start:
        start = fields[11]
    path = ".".join(part.decode() for part in fields[3])
    return ColumnChunk(path, fields[1], frozenset(fields[2]), fields[5], start, start + fields[7])


def dictionary_columns(groups: list[list[ColumnChunk]]) -> frozenset[str]:
    """Return the columns of strings or bytes that pyarrow can read as dictionaries."""
    chunks = [chunk for group in groups for chunk in group if chunk.physical_type == BYTE_ARRAY]
    others = {chunk.path for chunk in chunks if not chunk.encodings <= DICTIONARY_ENCODINGS}
    return frozenset(chunk.path for chunk in chunks) - others


def parquet_rows(
    path: Path, file: Any, groups: list[list[ColumnChunk]], nested: frozenset[str], compact: frozenset[str]
) -> Rows:
    number = 0
    names = file.schema_arrow.names
    flat = [name for name in names if name not in nested]
    with file, parquet_errors(path), path.open("rb") as raw:
        for group, chunks in enumerate(groups):
            rows = batch_rows(path, raw, chunks, group, set(flat), compact)
            for batch in file.iter_batches(rows, row_groups=[group], columns=flat if nested else None):
                columns = dict(zip(flat, map(as_text, batch.columns), strict=True))
                empty = [""] * len(batch)
                for row in zip(*(columns.get(name, empty) for name in names), strict=True):
                    number += 1
                    yield number, too_long() if sum(map(len, row)) > MAX_LINE else row


def batch_rows(
    path: Path, raw: IO[bytes], chunks: list[ColumnChunk], group: int, names: set[str], compact: frozenset[str]
) -> int:
    """Return the number of rows of a row group to read at once.

    A batch of a column has at most `density` bytes per row, and one more page at each of its ends.

    Args:
        path: name of the file, for messages.
        raw: the file.
        chunks: the columns of the row group.
        group: number of the row group, for messages.
        names: names of the columns to read.
        compact: names of the columns that are read as dictionaries.

    Raises:
        UserError: if the pages are larger than `MAX_PAGES`.
    """
    largest, density = 0, 1.0
    for chunk in chunks:
        if chunk.path not in names:  # a part of a nested column
            continue
        pages = list(pages_of(raw, chunk))
        largest += max((page.size for page in pages), default=0)
        density += max((page.size / page.values for page in pages if page.values), default=0.0)
        if chunk.physical_type in (BYTE_ARRAY, FIXED_LENGTH_BYTE_ARRAY) and chunk.path not in compact:
            # a value can be as long as a whole page if the page is a dictionary or delta encoded
            density += max(
                (page.size for page in pages if not page.values or page.encoding == DELTA_BYTE_ARRAY), default=0
            )
    if largest > MAX_PAGES:
        raise UserError(
            f"{path} has pages of {largest / 1e6:,.0f} MB in row group {group + 1}, and {MAX_PAGES / 1e6:,.0f} MB is "
            f"the limit. Write it with smaller pages or row groups; a cell can have {MAX_LINE:,} characters."
        )
    return max(1, min(MAX_CELLS // max(len(names), 1), int(BATCH_BYTES / density)))


def pages_of(raw: IO[bytes], chunk: ColumnChunk) -> Iterator[Page]:
    """Yield the page headers of a column chunk."""
    at, found = chunk.start, 0
    while at < chunk.end and found < chunk.values:
        fields, length = read_header(raw, at)
        kind, size, compressed = (int(fields[number]) for number in (1, 2, 3))
        if size < 0 or compressed < 0:
            raise ValueError(f"a page of {size} bytes")
        if kind == DICTIONARY_PAGE:
            yield Page(size, 0, 0)
        elif 5 in fields or 8 in fields:  # the first or the second version of a data page
            values, encoding = (fields[5][1], fields[5][2]) if 5 in fields else (fields[8][1], fields[8][4])
            found += max(int(values), 0)
            yield Page(size, max(int(values), 1), int(encoding))
        at += length + compressed


def read_header(raw: IO[bytes], at: int) -> tuple[dict[int, Any], int]:
    """Return the fields of the page header at an offset in a file, and its length in bytes."""
    for room in (1 << 10, MAX_HEADER):
        raw.seek(at)
        content = raw.read(room)
        with contextlib.suppress(IndexError):
            return read_structure(content, 0, MAX_DEPTH)
    raise ValueError("a page header that has no end")


def read_varint(content: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while shift < 70:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def read_integer(content: bytes, at: int) -> tuple[int, int]:
    value, at = read_varint(content, at)
    return (value >> 1) ^ -(value & 1), at


def read_structure(content: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a structure in Thrift's compact protocol by number, and the offset of its end."""
    fields: dict[int, Any] = {}
    number = 0
    while content[at]:
        step, kind = content[at] >> 4, content[at] & 15
        number, at = (number + step, at + 1) if step else read_integer(content, at + 1)
        fields[number], at = read_field(content, at, kind, depth)
    return fields, at + 1


def read_field(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return content[at], at + 1
    if kind in (4, 5, 6):
        return read_integer(content, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = read_varint(content, at)
        if at + length > len(content):
            raise IndexError("text is cut short")
        return content[at : at + length], at + length
    if kind in (9, 10):
        return read_list(content, at, depth)
    if kind == 12 and depth:
        return read_structure(content, at, depth - 1)
    raise ValueError(f"a field of type {kind} in a page header")


def read_list(content: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    length, kind = content[at] >> 4, content[at] & 15
    at += 1
    if length == 15:
        length, at = read_varint(content, at)
    found = []
    for _ in range(length):
        value, at = (content[at] == 1, at + 1) if kind in (1, 2) else read_field(content, at, kind, depth)
        found.append(value)
    return found, at


def as_text(column: Any) -> Sequence[str]:
    """Return the cells of a column of any flat type as text. Nulls are empty. Equal dictionary entries are shared."""
    import pyarrow

    if isinstance(column, pyarrow.DictionaryArray):
        places = column.indices.to_numpy(zero_copy_only=False)
        present = ~np.isnan(places) if places.dtype.kind == "f" else np.ones(len(places), bool)
        used, inverse = np.unique(places[present].astype(np.int64), return_inverse=True)
        texts = as_text(column.dictionary.take(pyarrow.array(used)))
        found = [""] * len(places)
        for row, place in zip(np.flatnonzero(present).tolist(), inverse.tolist(), strict=True):
            found[row] = texts[place]
        return found
    cells: list[str | None]
    try:
        cells = column.cast(pyarrow.string()).to_pylist()
    except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
        cells = [None if cell is None else str(cell) for cell in column.to_pylist()]
    return ["" if cell is None else cell for cell in cells]
