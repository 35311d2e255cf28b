"""The log of a training run: a header, then a line of JSON for each logged step. Needs neither torch nor NumPy.

A line has the names of tensors only if they have changed since the previous line. A number that is not finite is null.
`Reader` accepts incomplete lines and arbitrary content. It checks the type and range of every field, and its memory is
bounded.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vsgd.errors import UserError

HEADER = '{"vsgd": "run", "format": 1}'

BLOCK = 1 << 20
MAX_LINE = 1 << 22
"""Maximum length of a line, in bytes."""

MAX_RECORDS = 100_000
"""Maximum number of records in memory. Above it, every second record of the older half is dropped."""

MAX_COUNT = 2**53
MAX_NUMBER = 1e100
"""Larger numbers become NaN, so that sums and ratios stay finite."""

MAX_TIME = 1e12
"""Maximum time, in seconds since 1970."""

MAX_NAME = 1000
"""Maximum length of the name of a tensor. Longer names are cut."""

RECORDS_WITH_TENSORS = 3
"""Number of recent records whose tensors are stored. Nothing uses the tensors of older ones."""


class TensorRecord(NamedTuple):
    """The values of `opt.info()` for one tensor.

    Attributes:
        name, basis: name of the tensor, and the basis of its coordinates.
        low_rate, rate, high_rate: 5 %, 50 % and 95 % quantiles of the learning rates.
        memory: median of τ.
        signal_to_noise: median of the signal-to-noise ratio.
        outliers: fraction of coordinates with an outlier in the last step.
    """

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
        step: number of steps so far.
        time: seconds since 1970.
        steps: number of steps since the previous line, including skipped ones.
        loss: mean over these steps, without losses that are not finite.
        gradients: evaluations of a minibatch per step.
        skipped: number of steps so far that were skipped because a value was not finite.
        batch: batch size worth using, in units of the current one; NaN if it is not known.
        tensors: a record for each tensor.
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
        """Return the name and the basis of each tensor."""
        return [[tensor.name, tensor.basis] for tensor in self.tensors]


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _count(value: Any) -> int:
    """Return a number of steps, or raise ValueError."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{value!s:.40} is not a count")
    return value


def _float(value: Any, least: float = -math.inf) -> float:
    """Return a number, or raise ValueError. Null and numbers above `MAX_NUMBER` become NaN."""
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not least <= value < math.inf:
        raise ValueError(f"{value!s:.40} is not a valid number")
    return float(value) if abs(value) <= MAX_NUMBER else math.nan


def _time(value: Any) -> float:
    if not 0 <= (seconds := _float(value)) <= MAX_TIME:
        raise ValueError(f"{value!s:.40} is not a time")
    return seconds


def _rate(value: Any) -> float:
    return _float(value, least=0.0)


READERS: dict[str, Callable[[Any], float]] = {
    **dict.fromkeys(("step", "steps", "skipped"), _count),
    **dict.fromkeys(("gradients", "batch"), _rate),
    "time": _time,
    "loss": _float,
}
"""Functions that check the numbers of a `Record`."""

TENSOR_READERS = (_rate, _rate, _rate, _float, _float, _float)
"""Functions that check the numbers of a `TensorRecord`."""


def _constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _tensor(names: Any, numbers: Any) -> TensorRecord:
    name, basis = names
    if not isinstance(names, list) or not isinstance(name, str) or not isinstance(basis, str):
        raise ValueError("the name of a tensor is not text")
    values = [read(number) for read, number in zip(TENSOR_READERS, numbers, strict=True)]
    return TensorRecord(name[:MAX_NAME], basis[:MAX_NAME], *values)


def to_line(record: Record, before: Record | None) -> str:
    """Return the record as a line, with the names of tensors if they differ from those of the previous record."""
    fields = {
        **{"step": record.step, "time": round(record.time, 2), "steps": record.steps, "loss": _number(record.loss)},
        **{"gradients": _number(record.gradients), "skipped": record.skipped, "batch": _number(record.batch)},
        **({} if before is not None and before.names == record.names else {"names": record.names}),
        "tensors": [[_number(value) for value in tensor[2:]] for tensor in record.tensors],
    }
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def from_line(line: str, names: list[list[str]]) -> Record:
    """Return the record in a line.

    Args:
        line: a line that `to_line` returned.
        names: names of the tensors in the previous record.

    Raises:
        ValueError: if `to_line` cannot have returned the line.
    """
    try:
        fields = json.loads(line, parse_constant=_constant)
        names, tensors = fields.get("names", names), fields["tensors"]
        if len(names) != len(tensors):  # the line that named them is lost
            names = [[f"tensor {i}", ""] for i in range(len(tensors))]
        named = zip(names, tensors, strict=True)
        numbers: dict[str, Any] = {name: read(fields[name]) for name, read in READERS.items()}
        return Record(**numbers, tensors=tuple(_tensor(*pair) for pair in named))
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def is_run(path: Path) -> bool:
    """Return whether a file begins with the header of a log."""
    with path.open("rb") as file:
        return file.read(len(HEADER)) == HEADER.encode()


class Reader:
    """Reads a log while it is being written.

    Attributes:
        path: the file.
        records: the records so far. Only the last `RECORDS_WITH_TENSORS` have tensors.
        bad_lines: number of lines that could not be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.records: list[Record] = []
        self.bad_lines = 0
        self._offset, self._rest = 0, b""
        self._too_long = False
        self._resumed = False

    def update(self) -> None:
        """Read new lines. If the file has become shorter, read it from the beginning.

        Raises:
            UserError: if the file does not exist, or is not the log of a run.
        """
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise UserError(f"cannot read {self.path}: it is not a regular file, as the log of a run is")
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                if end < self._offset:
                    self._forget()
                file.seek(self._offset)
                while self._offset < end and (block := file.read(min(BLOCK, end - self._offset))):
                    self._read(block)
        except FileNotFoundError:
            message = f"there is no {self.path}. RunLog(opt, '{self.path}') in the training script writes it."
            raise UserError(message) from None

    def _read(self, block: bytes) -> None:
        if self._offset == 0 and not HEADER.encode().startswith(block[: len(HEADER)]):
            raise UserError(f"{self.path} is not the log of a run, which RunLog(opt, path) writes")
        *lines, rest = (self._rest + block).split(b"\n")
        self._offset, self._rest = self._offset + len(block), rest
        for line in lines:
            if not self._too_long:
                self._take(line.decode("utf-8", "replace").strip())
            self._too_long = False
        if len(rest) > MAX_LINE:  # the rest of the line is skipped
            self.bad_lines += not self._too_long
            self._rest, self._too_long = b"", True

    def _take(self, line: str) -> None:
        if not line or line == HEADER:  # a header after the first line: training was resumed
            self._resumed |= line == HEADER
            return
        try:
            record = from_line(line, self.records[-1].names if self.records else [])
        except ValueError:
            self.bad_lines += 1
            return
        # within a run, a skipped step has the number of the previous step
        newest = record.step - 1 if self._resumed else record.step
        while self.records and self.records[-1].step > newest and record.step > 0:
            self.records.pop()  # resumed from an earlier checkpoint
        self._resumed = False
        self.records.append(record)
        if len(self.records) > RECORDS_WITH_TENSORS:
            old = len(self.records) - RECORDS_WITH_TENSORS - 1
            self.records[old] = self.records[old]._replace(tensors=())
        if len(self.records) > MAX_RECORDS:
            del self.records[1 : MAX_RECORDS // 2 : 2]
