"""Damaged and crafted logs in `vsgd watch`: printable output, or one line that describes the error."""

from __future__ import annotations

import json
import math
import os

from command import vsgd
from fuzzing import cases, generator, mutated, no_hang

from vsgd.errors import UserError
from vsgd.integrations.run_file import HEADER, Reader, Record, TensorRecord, to_line
from vsgd.integrations.watch import view

VALUES = [
    *("NaN", "Infinity", "-Infinity", "null", "true", "[]", "{}", '""', '"x"', "-1", "0", "1.5", "1e999", "-1e300"),
    *("9" * 30, "9" * 400, "9" * 5000, "5e-324", '"\\ud800"', '"\\u001b[2J"', "[[]]", "[[1,2]]", "[" * 50 + "]" * 50),
    *('[["a", "b"]]', '[["\\u202e", "\\u009b"]]', "[[null, null, 1, 1, 1, 1]]", "[[1, 1e99, 0, -1, 0, 5e-324]]"),
]


def log(rng) -> list[str]:
    """Return the lines of a log of a few tensors."""
    names, before, lines = ["a", "b.weight", "\x1b[1m"], None, [HEADER]
    for k in range(1, rng.choice([2, 5, 15])):
        tensors = tuple(
            TensorRecord(name, "vector", *(10 ** rng.uniform(-9, 3) for _ in range(6)))
            for name in names[: rng.randrange(4)]
        )
        record = Record(
            20 * k, 1e9 + k, 20, rng.choice([1 / k, math.nan, -k]), 1.1, rng.randrange(3), math.nan, tensors
        )
        lines.append(to_line(record, before))
        before = record
    return lines


def crafted(rng) -> bytes:
    """Return a log in which some fields are replaced by other JSON, or missing."""
    lines = log(rng)
    for _ in range(rng.choice([1, 2, 5])):
        at = rng.randrange(1, len(lines))
        try:
            fields = json.loads(lines[at])
        except ValueError:
            continue
        name = rng.choice([*fields, "names"])
        if rng.random() < 0.1:
            fields.pop(name, None)
            lines[at] = json.dumps(fields)
        else:
            lines[at] = json.dumps({**fields, name: "?"}).replace('"?"', rng.choice(VALUES))
    return ("\n".join(lines) + "\n").encode(errors="replace")


def content(rng) -> bytes:
    return crafted(rng) if rng.random() < 0.5 else mutated("\n".join([*log(rng), ""]).encode(), rng)


def is_printable(text: str) -> bool:
    return all(c == "\n" or c.isprintable() for c in text)


def test_logs(tmp_path):
    """Call the functions in the process of the test, with every size of terminal."""
    rng, count, refused = generator("watch"), cases(500, 20_000), 0
    path = tmp_path / "run.jsonl"
    for _ in range(count):
        path.write_bytes(content(rng))
        reader = Reader(path)
        try:
            reader.update()
        except UserError:
            refused += 1
            continue
        size = os.terminal_size((rng.choice([20, 80, 1000]), rng.choice([5, 24, 1000])))
        with no_hang():
            assert is_printable(view(reader, size, now=rng.choice([0.0, 1e9, 1e10]), color=False))
    print(f"logs: {count} files, {refused} refused")
    assert 0 < refused < count


def test_the_command(tmp_path):
    rng, count = generator("watch command"), cases(80, 500)
    path = tmp_path / "run.jsonl"
    for _ in range(count):
        path.write_bytes(content(rng))
        with no_hang():
            outcome = vsgd("watch", path)
        assert outcome.code in (0, 2), outcome
        assert outcome.err.count("\n") == (outcome.code == 2), outcome
        assert is_printable(outcome.out + outcome.err), outcome
    print(f"logs: {count} runs of vsgd watch")
