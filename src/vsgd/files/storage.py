"""A trained model in one .npz file: arrays, and a JSON header. No pickle; whole or absent."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vsgd.disk import write_whole
from vsgd.errors import UserError
from vsgd.files.schema import Schema, from_json
from vsgd.linear import Model
from vsgd.linear.losses import CLASSIFICATION, REGRESSION, Task

VERSION = 3


class Trained(NamedTuple):
    """A model and what is needed to use it or to go on training it."""

    model: Model
    schema: Schema
    loss: str
    classes: list[str]
    passes: int
    batch_size: int

    @property
    def task(self) -> Task:
        return task_of(self.loss, len(self.classes))


def task_of(loss: str, classes: int) -> Task:
    """The task that the estimators of `vsgd.sklearn` make of a loss by default."""
    number = {**CLASSIFICATION, **REGRESSION}[loss]
    natural = loss in CLASSIFICATION or loss == "poisson"
    parameter = 0.5 if loss == "quantile" else 0.1
    return Task(number, parameter, one_vs_rest=classes > 2, natural_unit=natural)


def digest(model: Model) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in model)).hexdigest()


def save(path: Path, trained: Trained) -> None:
    header = {
        "vsgd": VERSION,
        "schema": trained.schema._asdict(),
        "loss": trained.loss,
        "classes": trained.classes,
        "passes": trained.passes,
        "batch_size": trained.batch_size,
        "sha256": digest(trained.model),
    }
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(buffer, header=text, **trained.model._asdict())
    write_whole(path, buffer.getvalue())


def load(path: Path) -> Trained:
    try:
        with np.load(path, allow_pickle=False) as file:
            header: dict[str, Any] = json.loads(file["header"].tobytes())
            if header["vsgd"] != VERSION:
                raise UserError(f"{path} is a model of version {header['vsgd']}; this program reads version {VERSION}")
            model = Model(**{name: file[name] for name in Model._fields})
        if digest(model) != header["sha256"]:
            raise ValueError("checksum")
        return Trained(
            model=model,
            schema=from_json(header["schema"]),
            loss=header["loss"],
            classes=header["classes"],
            passes=header["passes"],
            batch_size=header["batch_size"],
        )
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        raise UserError(f"{path} is not a model of this program, or is damaged") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
