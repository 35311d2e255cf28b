"""A trained model in one .npz file: arrays, and a JSON header. No pickle; whole or absent, checked or refused."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from vsgd.disk import write_whole
from vsgd.errors import UserError
from vsgd.files.header import Refused, check_header
from vsgd.files.schema import Schema
from vsgd.linear import Model
from vsgd.linear.gate import Expected, description_of
from vsgd.linear.losses import CLASSIFICATION, EXPONENTIAL_LINK, REGRESSION, Task
from vsgd.linear.model import aligned_zeros

VERSION = 5


class Trained(NamedTuple):
    """A model and what is needed to use it or to go on training it."""

    model: Model
    schema: Schema
    loss: str
    classes: list[str]
    passes: int
    batch_size: int
    seed: int
    chunk_rows: int

    @property
    def task(self) -> Task:
        return task_of(self.loss, len(self.classes))


def task_of(loss: str, classes: int) -> Task:
    """The task that the estimators of `vsgd.sklearn` make of a loss by default."""
    number = {**CLASSIFICATION, **REGRESSION}[loss]
    natural = loss in CLASSIFICATION or loss in EXPONENTIAL_LINK
    parameter = 0.5 if loss == "quantile" else 0.1
    return Task(number, parameter, one_vs_rest=classes > 2, natural_unit=natural, evidence=True)


def outputs_of(classes: int) -> int:
    return classes if classes > 2 else 1


def digest(header: dict[str, Any], arrays: dict[str, Any]) -> str:
    """Of all that a file holds: fields, names, shapes, types and contents."""
    checksum = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        checksum.update(f"{name} {array.dtype.str} {array.shape}".encode())
        checksum.update(array.data)
    return checksum.hexdigest()


def save(path: Path, trained: Trained) -> None:
    """Replace the file by this model, if all its numbers are finite."""
    arrays = trained.model._asdict()
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise UserError(
                f"the {name} of the model has numbers that are not finite after pass {trained.passes}, so it is not "
                f"saved. Scale the columns or targets with the largest values down."
            )
    header = {"vsgd": VERSION, **trained._asdict(), "schema": trained.schema._asdict()}
    del header["model"]
    text = json.dumps({**header, "sha256": digest(header, arrays)})
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(text.encode(), np.uint8), **arrays)
    write_whole(path, buffer.getbuffer())


def load(path: Path) -> Trained:
    """The model in a file, or one line that says why it is refused. Nothing is half-loaded."""
    try:
        with path.open("rb") as file:
            return _read(file if file.seekable() else io.BytesIO(file.read()))
    except Refused as refused:
        raise UserError(f"{path} cannot be used: {refused}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception:  # zipfile, NumPy and json raise a dozen kinds when bytes are not what they should be
        raise UserError(f"{path} is not a model of this program, or is damaged") from None


def _read(file: IO[bytes]) -> Trained:
    size = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():  # stored as we store them, they cannot hold more than the file does
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.file_size > size:
                raise ValueError(f"{member.filename} is compressed, encrypted or cut short")
        header = _header(archive)
        if header["vsgd"] != VERSION:
            raise Refused(f"it is a model of version {header['vsgd']}; this program reads version {VERSION}")
        claimed = header.pop("sha256")
        check_header(header)
        schema = Schema(**header["schema"])
        description = description_of(schema.columns + 1, outputs_of(len(header["classes"])), averaged=False)
        if sorted(archive.namelist()) != sorted(f"{name}.npy" for name in ["header", *description]):
            raise Refused("it holds other arrays than a model has")
        arrays = {name: _array(archive, name, expected) for name, expected in description.items()}
    if claimed != digest(header, arrays):
        raise ValueError("checksum")
    fields = {name: header[name] for name in Trained._fields if name not in ("model", "schema")}
    return Trained(model=Model(**arrays), schema=schema, **fields)


def _header(archive: zipfile.ZipFile) -> dict[str, Any]:
    with archive.open("header.npy") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        return dict(json.loads(file.read()))


def _array(archive: zipfile.ZipFile, name: str, expected: Expected) -> Any:
    """An array of the model, its shape and type compared with what the header implies before any of it is read."""
    with archive.open(f"{name}.npy") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another format of arrays")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        if shape != expected.shape or dtype != np.dtype(expected.dtype) or fortran_order:
            order = ", by columns" if fortran_order else ""
            raise Refused(f"its {name} is {dtype.str} of shape {shape}{order}, where {expected} is needed")
        content = file.read()
        array = aligned_zeros(shape).view(expected.dtype)
        array[...] = np.frombuffer(content, expected.dtype).reshape(shape)
    if not np.isfinite(array).all() or (name == "progress" and array.min() < 0):
        raise Refused(f"its {name} has numbers that are not finite, or counts below zero")
    return array
