"""The log of a training run: a header, then a line of JSON for every so many steps. Needs neither torch nor NumPy.

A line says what tensors are called only if that has changed since the line before. What is not finite is null. Whoever
reads meets a last line that is not whole yet, lines that a crash has cut, and files that are something else.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from vsgd.errors import UserError

HEADER = '{"vsgd": "run", "format": 1}'


TENSORS_KEPT = 3
"""A long run has many records, and only the last ones are asked for their tensors."""


class TensorRecord(NamedTuple):
    """What `opt.info()` said of one tensor; rates are those that 5, 50 and 95 in a hundred coordinates are below."""

    name: str
    basis: str
    low_rate: float
    rate: float
    high_rate: float
    memory: float
    signal_to_noise: float
    outliers: float


class Record(NamedTuple):
    """A line of the log.

    Attributes:
        step: how many steps have been taken.
        time: seconds since 1970.
        steps: how many of them since the line before, those skipped included.
        loss: mean over these steps, those that were not finite left out.
        gradients: evaluations of a minibatch per step.
        skipped: steps so far that were left out because something was not finite.
        batch: how many times the present batch is worth using; NaN where that is not known.
    """

    step: int
    time: float
    steps: int
    loss: float
    gradients: float
    skipped: int
    batch: float
    tensors: tuple[TensorRecord, ...]

    @property
    def names(self) -> list[list[str]]:
        return [[tensor.name, tensor.basis] for tensor in self.tensors]


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def to_line(record: Record, before: Record | None) -> str:
    """The record as a line, with the names of tensors if they are not those of the record before."""
    fields = {
        **{"step": record.step, "time": round(record.time, 2), "steps": record.steps, "loss": _number(record.loss)},
        **{"gradients": _number(record.gradients), "skipped": record.skipped, "batch": _number(record.batch)},
        **({} if before is not None and before.names == record.names else {"names": record.names}),
        "tensors": [[_number(value) for value in tensor[2:]] for tensor in record.tensors],
    }
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def from_line(line: str, names: list[list[str]]) -> Record:
    """The inverse; a ValueError if the line is nothing that `to_line` has made."""
    try:
        fields = json.loads(line)
        names, tensors = fields.get("names", names), fields["tensors"]
        if len(names) != len(tensors):  # the line that named them is lost
            names = [[f"tensor {i}", ""] for i in range(len(tensors))]
        named = zip(names, tensors, strict=True)
        return Record(
            step=int(fields["step"]),
            time=float(fields["time"]),
            steps=int(fields["steps"]),
            loss=_float(fields["loss"]),
            gradients=_float(fields["gradients"]),
            skipped=int(fields["skipped"]),
            batch=_float(fields["batch"]),
            tensors=tuple(TensorRecord(str(n), str(b), *map(_float, values)) for (n, b), values in named),
        )
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def is_run(path: Path) -> bool:
    """Does the file begin as a log does?"""
    with path.open("rb") as file:
        return file.read(len(HEADER)) == HEADER.encode()


class Reader:
    """Reads a log while it is being written: `update` reads what is new."""

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.records: list[Record] = []
        """Only the last ones have their tensors."""
        self.bad_lines = 0
        self._offset, self._rest = 0, b""
        self._taken_up = False

    def update(self) -> bool:
        """Read on, and say whether there was anything new. A file that has become shorter is read anew."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._forget()
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            message = f"there is no {self.path}. RunLog(opt, '{self.path}') in the training script writes it."
            raise UserError(message) from None
        if self._offset == 0 and not HEADER.encode().startswith(new[: len(HEADER)]):
            raise UserError(f"{self.path} is not the log of a run, which RunLog(opt, path) writes")
        *lines, rest = (self._rest + new).split(b"\n")
        self._offset, self._rest = self._offset + len(new), rest
        for line in lines:
            self._take(line.decode("utf-8", "replace").strip())
        return bool(lines)

    def _take(self, line: str) -> None:
        if not line or line == HEADER:  # a header in between: training was taken up again
            self._taken_up |= line == HEADER
            return
        try:
            record = from_line(line, self.records[-1].names if self.records else [])
        except ValueError:
            self.bad_lines += 1
            return
        # within a run, a step that was skipped has the number of the last that was taken
        newest = record.step - 1 if self._taken_up else record.step
        while self.records and self.records[-1].step > newest and record.step > 0:
            self.records.pop()  # taken up from an earlier checkpoint
        self._taken_up = False
        self.records.append(record)
        if len(self.records) > TENSORS_KEPT:
            old = len(self.records) - TENSORS_KEPT - 1
            self.records[old] = self.records[old]._replace(tensors=())
