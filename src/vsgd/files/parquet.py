"""Rows of Parquet files as text, in bounded memory.

A small file can hold a large table: pages are compressed, and a value that repeats is stored once, in a dictionary. So
the size of every page is read from its header before pyarrow decompresses it, dictionaries are not expanded, and the
number of rows that are read at once follows from the bytes in the pages, not from the number of cells alone.
"""

from __future__ import annotations

import contextlib
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
"""Rows that are read at once have about this number of bytes."""

VARIABLE = ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
"""Physical types whose values can be long."""

DICTIONARY_ENCODINGS = frozenset(["PLAIN", "PLAIN_DICTIONARY", "RLE", "RLE_DICTIONARY", "BIT_PACKED"])
"""Encodings that pyarrow can read as a dictionary."""

DICTIONARY_PAGE = 2
DELTA_BYTE_ARRAY = 7
"""An encoding in which a value repeats the beginning of the one before, so that it can expand."""

MAX_HEADER = 1 << 24
"""Maximum length of a page header, in bytes; pyarrow has the same limit."""

MAX_DEPTH = 8
"""Of structures in a page header."""


class Page(NamedTuple):
    """What a page header says.

    Attributes:
        size: bytes after decompression.
        values: number of values; 0 for a dictionary.
        encoding: of the values, as numbered in the specification of Parquet.
    """

    size: int
    values: int
    encoding: int


@contextlib.contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Report in one line whatever damage makes pyarrow raise, which is more than its own exceptions."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from None
    except Exception as error:
        raise UserError(f"{path} is damaged, or not Parquet that can be read: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def parquet_table(path: Path) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UserError("Parquet files need pyarrow: pip install pyarrow") from None
    if path.suffix == ".gz":
        raise UserError(f"{path} cannot be read as it is: Parquet is compressed within. gunzip it first.")
    with parquet_errors(path):
        check_input(path)
        if is_pipe(path):
            raise UserError(
                f"{path} cannot be read: Parquet needs a regular file, not a pipe. Save it to a file first."
            )
        metadata = pyarrow.parquet.read_metadata(path)
        compact = dictionary_columns(metadata)
        file = pyarrow.parquet.ParquetFile(path, metadata=metadata, read_dictionary=[*compact], buffer_size=BLOCK)
        schema = file.schema_arrow
        nested = frozenset(field.name for field in schema if pyarrow.types.is_nested(field.type))
        return Table(list(schema.names), parquet_rows(path, file, nested, compact), "row", nested)


def dictionary_columns(metadata: Any) -> frozenset[str]:
    """Return the columns of strings or bytes that pyarrow can read as dictionaries, whatever they are stored as."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    found = set()
    for index in range(metadata.num_columns):
        description = metadata.schema.column(index)
        encodings = {encoding for group in groups for encoding in group.column(index).encodings}
        is_text = description.physical_type == "BYTE_ARRAY" and description.max_repetition_level == 0
        if is_text and encodings <= DICTIONARY_ENCODINGS:
            found.add(description.path)
    return frozenset(found)


def parquet_rows(path: Path, file: Any, nested: frozenset[str], compact: frozenset[str]) -> Rows:
    number = 0
    names = file.schema_arrow.names
    flat = [name for name in names if name not in nested]
    with file, parquet_errors(path), path.open("rb") as raw:
        for group in range(file.metadata.num_row_groups):
            rows = batch_rows(path, raw, file.metadata.row_group(group), group, set(flat), compact)
            for batch in file.iter_batches(rows, row_groups=[group], columns=flat if nested else None):
                columns = dict(zip(flat, map(as_text, batch.columns), strict=True))
                empty = [""] * len(batch)
                for row in zip(*(columns.get(name, empty) for name in names), strict=True):
                    number += 1
                    yield number, too_long() if sum(map(len, row)) > MAX_LINE else row


def batch_rows(path: Path, raw: IO[bytes], metadata: Any, group: int, names: set[str], compact: frozenset[str]) -> int:
    """Return how many rows of a row group to read at once.

    A batch of a column has at most `density` bytes for each row, and one more page at each of its ends.

    Args:
        metadata: of the row group.
        group: its number, for messages.
        names: of the columns that are read.
        compact: of those among them that are read as dictionaries.
    """
    largest, density = 0, 1.0
    for index in range(metadata.num_columns):
        column = metadata.column(index)
        if column.path_in_schema not in names:  # a part of a nested column
            continue
        pages = list(pages_of(raw, column))
        largest += max((page.size for page in pages), default=0)
        density += max((page.size / page.values for page in pages if page.values), default=0.0)
        if column.physical_type in VARIABLE and column.path_in_schema not in compact:
            # a value can be as long as a whole page that is a dictionary or holds differences
            density += max(
                (page.size for page in pages if not page.values or page.encoding == DELTA_BYTE_ARRAY), default=0
            )
    if largest > MAX_PAGES:
        raise UserError(
            f"{path} has pages of {largest / 1e6:,.0f} MB in row group {group + 1}, and {MAX_PAGES / 1e6:,.0f} MB is "
            f"the limit. Write it with smaller pages or row groups; a cell can have {MAX_LINE:,} characters."
        )
    return max(1, min(MAX_CELLS // max(len(names), 1), int(BATCH_BYTES / density)))


def pages_of(raw: IO[bytes], column: Any) -> Iterator[Page]:
    """Yield what the headers of the pages of a column chunk say."""
    at = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < at:
        at = column.dictionary_page_offset
    end = at + column.total_compressed_size
    found = 0
    while at < end and found < column.num_values:
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
    """Return the fields of the page header at this place in a file, and its length."""
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
    """Return the fields of a structure in Thrift's compact protocol by their numbers, and where it ends."""
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
        return None, at + length
    if kind == 12 and depth:
        return read_structure(content, at, depth - 1)
    raise ValueError(f"a field of type {kind} in a page header")


def as_text(column: Any) -> Sequence[str]:
    """Return the cells of a column of any flat type; a null is an empty one. Equal cells are one object."""
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
