"""Files of stored runs are written atomically, shared by processes, and readable up to damaged parts."""

from __future__ import annotations

import gzip
import math
import subprocess
import sys

import pytest
from processes import TIMEOUT

from vsgd.disk import seal
from vsgd.errors import UserError
from vsgd_bench.results import FORMAT, RunFile, packed

KEYS = ("name", "seed")

SAVE_MANY = """
import sys
from pathlib import Path
from vsgd_bench.results import RunFile

runs = RunFile(Path(sys.argv[1]), ("name", "seed"))
for seed in range(20):
    runs.save({"name": sys.argv[2], "seed": seed, "loss": 0.5})
"""


def saved(path):
    """A file of 201 runs."""
    records = [{"format": FORMAT, "name": "a", "seed": seed, "loss": [seed / 7, math.nan]} for seed in range(200)]
    path.write_bytes(packed(records))
    RunFile(path, KEYS).save({"name": "b", "seed": 0, "loss": [math.inf]})
    return path


def test_saved_runs_are_found_again(tmp_path):
    path = tmp_path / "new" / "some.jsonl.gz"
    runs = RunFile(path, KEYS)
    assert runs.get("a", 0) is None
    runs.save({"name": "a", "seed": 0, "loss": 0.1 + 0.2})
    runs.save({"name": "a", "seed": 1, "loss": math.inf})
    runs.save({"name": "a", "seed": 0, "loss": 0.25})
    again = RunFile(path, KEYS)
    assert [again.get("a", seed)["loss"] for seed in (0, 1)] == [0.25, math.inf]
    assert len(list(again)) == 2
    assert [file.name for file in path.parent.iterdir()] == ["some.jsonl.gz"], "nothing else is left"


def test_equal_runs_give_equal_bytes(tmp_path):
    first, second = RunFile(tmp_path / "1", KEYS), RunFile(tmp_path / "2", KEYS)
    records = [{"name": "a", "seed": seed, "loss": 0.5} for seed in range(5)]
    for one, other in zip(records, reversed(records), strict=True):
        first.save(one)
        second.save(other)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_pandas_reads_a_file_in_one_line(tmp_path):
    pandas = pytest.importorskip("pandas")
    table = pandas.read_json(saved(tmp_path / "runs.jsonl.gz"), lines=True)
    assert len(table) == 201
    assert set(KEYS) <= set(table.columns)


def test_two_processes_lose_no_run(tmp_path):
    path = tmp_path / "runs.jsonl.gz"
    command = [sys.executable, "-c", SAVE_MANY, str(path)]
    processes = [subprocess.Popen([*command, name]) for name in ("a", "b")]
    assert [process.wait(timeout=TIMEOUT) for process in processes] == [0, 0]
    runs = RunFile(path, KEYS)
    assert all(runs.get(name, seed) for name in ("a", "b") for seed in range(20))


@pytest.mark.parametrize(
    ("damage", "readable"),
    [
        (lambda data: data[: len(data) // 2], range(40, 150)),
        (lambda data: data[:-8], range(201, 202)),
        (lambda data: data[:2000] + bytes(50) + data[2050:], range(1, 200)),
        (lambda data: data + b"more", range(201, 202)),
        (lambda data: gzip.compress(gzip.decompress(data).replace(b"[1.0,", b"[9.0,")), range(200, 201)),
        (lambda data: b"", range(1)),
        (lambda data: b"\xff" * 50, range(1)),
    ],
    ids=["cut in half", "no checksum", "zeros inside", "garbage behind", "changed number", "empty", "no gzip file"],
)
def test_intact_runs_of_a_damaged_file_are_used_with_one_message(tmp_path, capsys, damage, readable):
    path = saved(tmp_path / "runs.jsonl.gz")
    path.write_bytes(damage(path.read_bytes()))
    capsys.readouterr()
    runs = RunFile(path, KEYS)
    count = len(list(runs))
    assert count in readable
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{path} is damaged: " in told
    assert f"The other {count} runs are used." in told
    assert all(record["loss"][0] == record["seed"] / 7 for record in runs if record["name"] == "a")

    runs.save({"name": "c", "seed": 0, "loss": []})
    assert len(list(RunFile(path, KEYS))) == count + 1, "saving writes an intact file"
    assert capsys.readouterr().err == ""


def lines(*texts):
    return gzip.compress("".join(f"{text}\n" for text in texts).encode())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"key": ["a", 0], "loss": 0.5, "checksum": ""}\n', "an uncompressed file of an earlier version"),
        (lines(seal({"name": "a", "seed": 0})), "has format None, but this version reads only format 2"),
        (lines(seal({"name": "a", "seed": 0, "format": 3})), "has format 3, but this version reads only format 2"),
        (lines(seal({"seed": 0, "format": FORMAT})), "of another command: they have no name"),
    ],
)
def test_another_format_is_refused_and_not_overwritten(tmp_path, content, words):
    path = tmp_path / "runs.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        RunFile(path, KEYS)
    assert path.read_bytes() == content
