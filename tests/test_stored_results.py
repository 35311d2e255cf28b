"""Stored results of `vsgd figures`: damaged ones are computed again, and two processes do not interfere."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command import refuses, succeeds, vsgd
from processes import TIMEOUT

from vsgd.disk import seal, unseal
from vsgd_bench.results import RunFile
from vsgd_bench.sparse.command import KEYS, loss_of

QUICK = ("--runs", "2", "--updates", "8")


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    """A folder with the results of a quick figure."""
    out = tmp_path_factory.mktemp("figure")
    succeeds("figures", 3, *QUICK, "--out", out)
    return out


def stored(out, kind):
    (path,) = out.glob(f"results/figure-3/*.{kind}")
    return path


@pytest.mark.parametrize("kind", ["npz", "json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:40],
        lambda content: b"",
        lambda content: content.replace(b"seconds", b"secomds").replace(b"PK", b"QK"),
        lambda content: b"[" * 100_000,
        lambda content: b"{}",
        lambda content: b"\xff" * 50,
    ],
)
def test_what_is_damaged_is_computed_again(figure, kind, damage):
    path = stored(figure, kind)
    path.write_bytes(damage(path.read_bytes()))
    outcome = vsgd("figures", 3, *QUICK, "--out", figure)
    assert outcome.code == 0
    assert outcome.err.count("is damaged") == 1
    assert "Figure 3" in (figure / "index.html").read_text(encoding="utf-8")


def test_arrays_without_their_note_and_a_note_without_its_arrays(figure):
    for kind, lines in (("json", 0), ("npz", 1)):
        stored(figure, kind).unlink()
        outcome = vsgd("figures", 3, *QUICK, "--out", figure)
        assert (outcome.code, outcome.err.count("is damaged")) == (0, lines)
    assert vsgd("figures", 3, *QUICK, "--out", figure).err == ""


def test_a_changed_number_is_noticed(figure):
    note = stored(figure, "json")
    record = unseal(note.read_bytes())
    note.write_text(seal(record).replace(f'"seconds": {record["seconds"]}', '"seconds": 1234.5'), encoding="utf-8")
    outcome = vsgd("figures", 3, *QUICK, "--out", figure)
    assert "is damaged" in outcome.err
    assert "1234.5" not in outcome.out


def test_something_in_the_way(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "figure-3").write_text("")
    refuses("figures", 3, *QUICK, "--out", tmp_path, saying="figure-3")
    (tmp_path / "index.html").mkdir()
    (tmp_path / "results" / "figure-3").unlink()
    refuses("figures", 3, *QUICK, "--out", tmp_path, saying="index.html")


@pytest.mark.parametrize("numbers", [("--seed", "9" * 30), ("--runs", "9" * 30), ("--updates", "9" * 30)])
def test_numbers_out_of_range(tmp_path, numbers):
    refuses("figures", 3, "--out", tmp_path, *numbers)


def test_two_at_once(tmp_path):
    command = [sys.executable, "-m", "vsgd", "figures", "3", "--out", str(tmp_path), *QUICK]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [(*process.communicate(timeout=TIMEOUT), process.returncode) for process in processes]
    for _, err, code in ended:
        assert (code, err) == (0, "") or (code == 2 and "another process" in err and err.count("\n") == 1)
    assert 0 in [code for _, _, code in ended]
    assert (tmp_path / "index.html").read_text(encoding="utf-8").count("<section") == 1
    assert not list(tmp_path.rglob(".*"))


def test_linear_models_are_fitted_once(tmp_path):
    path = tmp_path / "new" / "sparse.jsonl.gz"
    key = ("problem", "method", "choice", 0)
    assert [loss_of(RunFile(path, KEYS), key, lambda loss=loss: loss) for loss in (0.5, 0.7)] == [0.5, 0.5]
    assert loss_of(RunFile(path, KEYS), (*key[:3], 1), lambda: 0.7) == 0.7
