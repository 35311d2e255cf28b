"""Save and load a trained model as an .npz file: arrays and a JSON header with a checksum, without pickle."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from vsgd.disk import Write, open_input, output
from vsgd.errors import UserError
from vsgd.files.header import Refused, check_header
from vsgd.files.schema import Schema
from vsgd.files.settings import PENALTY_OF
from vsgd.files.sources import BLOCK
from vsgd.linear import Model
from vsgd.linear.losses import CLASSIFICATION, EXPONENTIAL_LINK, REGRESSION, Task
from vsgd.linear.model import aligned_zeros
from vsgd.linear.penalties import penalty_weights
from vsgd.linear.validation import Expected, description_of

VERSION = 5

MAX_HEADER = 1 << 26
"""Maximum length of the JSON header, in bytes."""

MAX_PIPE = 1 << 30
"""Maximum number of bytes of a model that is read from a pipe."""

MAX_READ = 1 << 20
"""Maximum number of bytes that are read from an archive at once, including its directory."""


class Trained(NamedTuple):
    """A model, and the settings that prediction and further training need.

    Attributes:
        model: parameters and statistics.
        schema: columns of the data.
        loss: name of the loss.
        classes: labels in order; empty for a regression.
        passes: number of passes so far.
        batch_size, seed, chunk_rows, penalty, alpha, l1_ratio: as in `Settings`.
        rows: number of rows of the last pass; the sum over models that were merged.
    """

    model: Model
    schema: Schema
    loss: str
    classes: list[str]
    passes: int
    batch_size: int
    seed: int
    chunk_rows: int
    penalty: str
    alpha: float
    l1_ratio: float
    rows: int

    @property
    def task(self) -> Task:
        """Return the objective, including the penalty."""
        l1, l2 = penalty_weights(PENALTY_OF[self.penalty], self.alpha, self.l1_ratio)
        return task_of(self.loss, len(self.classes))._replace(l1=l1, l2=l2, evidence=self.penalty == "auto")


def task_of(loss: str, classes: int) -> Task:
    """Return the objective for a loss without a penalty, as in `vsgd.sklearn`."""
    number = {**CLASSIFICATION, **REGRESSION}[loss]
    natural = loss in CLASSIFICATION or loss in EXPONENTIAL_LINK
    parameter = 0.5 if loss == "quantile" else 0.1
    return Task(number, parameter, one_vs_rest=classes > 2, natural_unit=natural)


def outputs_of(classes: int) -> int:
    """Return the number of margins per row."""
    return classes if classes > 2 else 1


def digest(header: dict[str, Any], arrays: dict[str, Any]) -> str:
    """Return the SHA-256 of the header and of the names, shapes, types and contents of the arrays."""
    checksum = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        checksum.update(f"{name} {array.dtype.str} {array.shape}".encode())
        checksum.update(array.data)
    return checksum.hexdigest()


def is_finite(array: Any) -> bool:
    """Return whether all numbers are finite, with little memory beyond that of the array."""
    flat = array.reshape(-1)
    return all(np.isfinite(flat[at : at + BLOCK]).all() for at in range(0, flat.size, BLOCK))


def available_memory() -> float:
    """Return the bytes of memory that this process can use, limited by machine, control group and `ulimit`."""
    limits = [math.inf]
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # the file may be missing, or contain the word "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with contextlib.suppress(ModuleNotFoundError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        limits += [] if limit == resource.RLIM_INFINITY else [limit]
    return min(limits)


def model_bytes(columns: int, outputs: int) -> int:
    """Return the bytes of the arrays of a model."""
    arrays = description_of(columns, outputs, averaged=False).values()
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)


def header_of(trained: Trained) -> dict[str, Any]:
    """Return the header of a model file."""
    header = {"vsgd": VERSION, **trained._asdict(), "schema": trained.schema._asdict()}
    del header["model"]
    return header


def check_header_length(trained: Trained) -> None:
    """Raise UserError if `load` would reject the header of a model. Call it before training."""
    if len(json.dumps(header_of(trained))) > MAX_HEADER // 2:  # means and counts get more digits later
        raise UserError(f"the names of {trained.schema.columns} columns are too long for a model file. Shorten them.")


class _Stream:
    """A file object for `zipfile` that can only be written to."""

    def __init__(self, write: Write):
        self._write = write

    def write(self, data: bytes) -> int:
        self._write(data)
        return len(data)

    def flush(self) -> None:
        pass


def save(path: Path, trained: Trained) -> None:
    """Write a model to a file, atomically and without a copy of the model in memory.

    Raises:
        UserError: if a number is not finite, or if the file cannot be written.
    """
    arrays = trained.model._asdict()
    for name, array in arrays.items():
        if not is_finite(array):
            raise UserError(
                f"the {name} of the model has numbers that are not finite after pass {trained.passes}, so it is not "
                f"saved. Scale down the columns or targets with the largest values."
            )
    header = header_of(trained)
    text = json.dumps({**header, "sha256": digest(header, arrays)})
    with output(path) as write, zipfile.ZipFile(_Stream(write), "w") as archive:  # type: ignore[call-overload]
        for name, array in {"header": np.frombuffer(text.encode(), np.uint8), **arrays}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), version=(1, 0), allow_pickle=False)


class _BoundedReads:
    """A file that is read in bounded pieces, so that a damaged archive cannot cause a large allocation."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.size = file.seek(0, io.SEEK_END)
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        rest = self.size - self._file.tell()
        if (size < 0 and rest > MAX_READ) or size > MAX_READ:
            raise ValueError(f"a read of {size} bytes at once")
        return self._file.read(size)


def load(path: Path) -> Trained:
    """Return the model in a file.

    Raises:
        UserError: if the file is not a valid model, with the reason.
    """
    try:
        with open_input(path) as file:
            return _read(file if file.seekable() else _content(file))
    except Refused as refused:
        raise UserError(f"{path} cannot be used: {refused}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (UserError, MemoryError):
        raise
    except Exception:  # zipfile, NumPy and json raise many kinds of errors for damaged files
        raise UserError(f"{path} is not a model of this program, or is damaged") from None


def _content(file: IO[bytes]) -> IO[bytes]:
    """Return the content of a pipe as a seekable file."""
    content = io.BytesIO()
    while block := file.read(BLOCK):
        if content.tell() == 0 and not block.startswith(b"PK"):
            raise ValueError("not an archive")
        if content.tell() + len(block) > MAX_PIPE:
            raise Refused(f"more than {MAX_PIPE / 1e9:.3g} GB came out of a pipe. Save it to a file first.")
        content.write(block)
    return content


def _read(file: IO[bytes]) -> Trained:
    bounded = _BoundedReads(file)
    with zipfile.ZipFile(bounded) as archive:
        for member in archive.infolist():  # `save` does not compress, so members are not larger than the file
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.file_size > bounded.size:
                raise ValueError(f"{member.filename} is compressed, encrypted or cut short")
        header = _header(archive)
        if header["vsgd"] != VERSION:
            raise Refused(f"it is a model of version {header['vsgd']}; this program reads version {VERSION}")
        claimed = header.pop("sha256")
        check_header(header)
        schema = Schema(**header["schema"])
        columns, outputs = schema.columns + 1, outputs_of(len(header["classes"]))
        if model_bytes(columns, outputs) > min(available_memory(), bounded.size):
            raise Refused(
                f"its header has {columns:,} columns and {outputs} outputs, {model_bytes(columns, outputs) / 1e9:.3g} "
                f"GB. The file has {bounded.size / 1e9:.3g} GB, and memory {available_memory() / 1e9:.3g} GB."
            )
        description = description_of(columns, outputs, averaged=False)
        if sorted(archive.namelist()) != sorted(f"{name}.npy" for name in ["header", *description]):
            raise Refused("it holds other arrays than a model has")
        arrays = {name: _array(archive, name, expected) for name, expected in description.items()}
    if claimed != digest(header, arrays):
        raise ValueError("checksum")
    fields = {name: header[name] for name in Trained._fields if name not in ("model", "schema")}
    return Trained(model=Model(**arrays), schema=schema, **fields)


def _header(archive: zipfile.ZipFile) -> dict[str, Any]:
    size = archive.getinfo("header.npy").file_size
    if size > MAX_HEADER:
        raise Refused(f"its header has {size / 1e6:.3g} MB, and {MAX_HEADER / 1e6:.3g} MB is the limit")
    with archive.open("header.npy") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        return dict(json.loads(b"".join(iter(lambda: file.read(BLOCK), b""))))


def _array(archive: zipfile.ZipFile, name: str, expected: Expected) -> Any:
    """Return an array of the model. Shape and type are checked before its content is read."""
    with archive.open(f"{name}.npy") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another format of arrays")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        if shape != expected.shape or dtype != np.dtype(expected.dtype) or fortran_order:
            order = ", by columns" if fortran_order else ""
            raise Refused(f"its {name} is {dtype.str} of shape {shape}{order}, where {expected} is needed")
        array = aligned_zeros(shape).view(expected.dtype)
        content, at = array.reshape(-1).view(np.uint8), 0
        while block := file.read(BLOCK):
            content[at : at + len(block)] = np.frombuffer(block, np.uint8)  # fails if there is too much
            at += len(block)
        if at != content.size:
            raise ValueError(f"{name} is cut short")
    if not is_finite(array) or (name == "progress" and array.min() < 0):
        raise Refused(f"its {name} has numbers that are not finite, or counts below zero")
    return array
