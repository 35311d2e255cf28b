"""The command line in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from command import succeeds
from processes import TIMEOUT

QUICK = ("--runs", "2", "--updates", "8")


def vsgd(*arguments, **options):
    command = [sys.executable, "-m", "vsgd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, **options)


def assert_one_clear_line(result, *words):
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_writes_a_page_that_needs_nothing_else(tmp_path):
    result = vsgd("figures", 3, 4, *QUICK, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "index.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2
    assert "http" not in page
    assert "Figure 3. Reweighting" in page
    assert "--runs 2 --updates 8" in page
    assert "hard clustering" in (tmp_path / "numbers.md").read_text()
    assert not list(tmp_path.rglob(".*")), "temporary files were left"


def test_uses_stored_results_again_and_keeps_other_figures_on_the_page(tmp_path):
    succeeds("figures", 3, *QUICK, "--out", tmp_path)
    (stored,) = tmp_path.glob("results/figure-3/*.npz")
    written = stored.stat().st_mtime_ns
    succeeds("figures", 3, 4, *QUICK, "--out", tmp_path)
    assert stored.stat().st_mtime_ns == written
    succeeds("figures", 4, *QUICK, "--out", tmp_path)
    assert (tmp_path / "index.html").read_text().count("<section") == 2
    succeeds("figures", 3, *QUICK, "--seed", 1, "--out", tmp_path)
    assert stored.stat().st_mtime_ns != written, "another seed is another result"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("figures", "9"), ["9", "drift"]),
        (("figures", "--runs", "-1"), ["-1", "at least 1"]),
        (("figures", "--runs", "many"), ["many", "whole number"]),
        (("figures", "--updates", "0"), ["at least 2"]),
        (("figures", "3", "--out", "/dev/null/folder"), ["/dev/null/folder", "Choose another"]),
        (("nonsense",), ["nonsense"]),
        ((), ["COMMAND"]),
    ],
)
def test_bad_input_is_one_clear_line(arguments, words):
    assert_one_clear_line(vsgd(*arguments), *words)


INTERRUPTED = """
import signal, sys
from vsgd.cli import main
written = 0

def interrupt(event, arguments):
    global written
    if event == "os.rename" and str(arguments[1]).endswith(".json"):
        written += 1
        if written == 4:
            signal.raise_signal(signal.SIGINT)

sys.addaudithook(interrupt)
sys.exit(main(sys.argv[1:]))
"""
"""Run a command that interrupts itself before it stores the fourth record."""


def test_interrupted_work_is_resumed(tmp_path):
    words = ["figures", "6", "--runs", "2", "--out", str(tmp_path)]
    command = [sys.executable, "-c", INTERRUPTED, *words]
    interrupted = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert interrupted.returncode == 130, interrupted.stderr
    assert "Traceback" not in interrupted.stderr
    assert "continues from there" in interrupted.stderr
    folder = tmp_path / "results" / "figure-6"
    kept = {file: file.stat().st_mtime_ns for file in folder.glob("*.json")}
    assert len(kept) == 3
    assert not (tmp_path / "index.html").exists()
    assert vsgd(*words).returncode == 0
    assert len(list(folder.glob("*.json"))) == 36
    assert all(file.stat().st_mtime_ns == written for file, written in kept.items())


def test_version():
    assert vsgd("--version").stdout.startswith("vsgd 0.")


FULL = "/dev/full"
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="needs /dev/full")


@pytest.mark.parametrize("word", ["--model=--", "--out=--", "--mod=--", "--chunk-rows=--"])
def test_two_dashes_are_not_a_value(word):
    assert_one_clear_line(vsgd("predict", "data.csv", "--model", "m.npz", word), word, "./--")


@needs_full
@pytest.mark.parametrize("words", [["predict", "none.csv", "--model", "none.npz"], ["predict"], ["nonsense"]])
@pytest.mark.parametrize("stream", ["full", "closed"])
def test_a_mistake_is_exit_code_2_without_standard_error(words, stream):
    redirect = f"2>{FULL}" if stream == "full" else "2>&-"
    command = f"{sys.executable} -m vsgd {' '.join(words)} {redirect}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=TIMEOUT)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")


@needs_full
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["fit", "--help"]])
def test_help_that_cannot_be_written_is_exit_code_2(words):
    with open(FULL, "w") as full:
        command = [sys.executable, "-m", "vsgd", *words]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    assert_one_clear_line(result, "standard output")


def test_help_is_exit_code_0():
    result = vsgd("fit", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--delimiter" in result.stdout
