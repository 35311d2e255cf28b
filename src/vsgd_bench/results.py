"""Stored runs of a comparison: one file of compressed JSON lines, readable by other tools.

    pandas.read_json("benchmarks/results/large.jsonl.gz", lines=True)

Each line is a run: its keys, its provenance, its results, and a checksum.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vsgd.disk import ensure_folder, locked, seal, unseal, write_whole
from vsgd.errors import UserError, one_line

Record = dict[str, Any]

FORMAT = 2
"""Version of the format, in every line. Format 1 was one JSON file per run."""

WAITING_SECONDS = 60.0
"""Maximum time to wait while another process saves a run."""

CHUNK_BYTES = 1024
"""Compressed bytes read at a time. Damage in a file loses at most the runs in one such chunk before it."""


class Contents(NamedTuple):
    """The readable content of a file."""

    records: list[Record]
    problem: str
    """Description of the damage; empty if there is none."""


class RunFile:
    """The runs in one file, identified by the values of `keys`.

    `save` locks the folder, reads runs that other processes have added, and replaces the file atomically. Readers
    therefore see complete files, and no process overwrites the runs of another.
    """

    def __init__(self, path: Path, keys: tuple[str, ...]):
        self.path, self.keys = path, keys
        self._records: dict[tuple[Any, ...], Record] = {}
        self._version: tuple[int, ...] | None = None
        self._read()

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def get(self, *key: Any) -> Record | None:
        """Return the run with these values of `keys`, or None."""
        return self._records.get(key)

    def save(self, record: Record) -> None:
        """Store a run in place of an earlier one with the same values of `keys`."""
        ensure_folder(self.path.parent)
        try:
            with locked(self.path.parent, WAITING_SECONDS):
                self._read()
                self._records[self._key(record)] = json.loads(json.dumps({"format": FORMAT, **record}))
                write_whole(self.path, packed(self._records[key] for key in sorted(self._records, key=repr)))
                self._version = _version(self.path)
        except BlockingIOError as error:
            raise UserError(f"cannot save a run to {self.path}: {error}. Wait for it, and start again.") from None

    def _key(self, record: Record) -> tuple[Any, ...]:
        if missing := [key for key in self.keys if key not in record]:
            raise UserError(
                f"the runs in {self.path} are of another command: they have no {missing[0]}. Choose another file."
            )
        return tuple(record[key] for key in self.keys)

    def _read(self) -> None:
        """Read the file if it has changed since this object last read or wrote it."""
        version = _version(self.path)
        if version == self._version:
            return
        contents = unpacked(self.path)
        if contents.problem:
            message = (
                f"{self.path} is damaged: {contents.problem}. The other {len(contents.records)} runs are used. "
                "Restore the file, or train the missing runs again."
            )
            print(f"vsgd: {one_line(message)}", file=sys.stderr)
        self._records = {self._key(record): record for record in contents.records}
        self._version = version


def packed(records: Iterable[Record]) -> bytes:
    """Return the content of a file. Equal runs give equal bytes."""
    return gzip.compress("".join(f"{seal(record)}\n" for record in records).encode(), mtime=0)


def unpacked(path: Path) -> Contents:
    """Return the intact runs of a file. A file that does not exist has no runs."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Contents([], "")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}. Choose another file.") from None
    if data.startswith(b"{"):
        raise UserError(
            f"{path} is an uncompressed file of an earlier version, which this one does not read. Rename it."
        )
    text, ends_early = inflated(data)
    *lines, rest = text.split(b"\n")
    records, damaged = [], 0
    for line in lines:
        try:
            records.append(unseal(line))
        except ValueError:
            damaged += 1
    for record in records:
        if record.get("format") != FORMAT:
            known = f"has format {record.get('format')}, but this version reads only format {FORMAT}"
            raise UserError(f"a run in {path} {known}. Use the version that wrote it, or another folder.")
    problems = [f"{damaged + bool(rest)} lines have a wrong checksum"] if damaged or rest else []
    return Contents(records, " and ".join([*problems, *(["its end is missing or unreadable"] if ends_early else [])]))


def inflated(data: bytes) -> tuple[bytes, bool]:
    """Return the decompressed data, and whether they end too early or are damaged."""
    text = bytearray()
    ends_early = not data
    while data and not ends_early:
        stream = zlib.decompressobj(wbits=31)  # for one gzip member; files joined by `cat` have several
        try:
            for start in range(0, len(data), CHUNK_BYTES):
                text += stream.decompress(data[start : start + CHUNK_BYTES])
        except zlib.error:
            ends_early = True
        ends_early = ends_early or not stream.eof
        data = stream.unused_data
    return bytes(text), ends_early


def _version(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when the file is replaced; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
