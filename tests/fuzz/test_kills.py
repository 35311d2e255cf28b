"""SIGKILL at random times: files are complete or absent, and repeating the command gives the uninterrupted result."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from fuzzing import cases, generator
from processes import TIMEOUT

from vsgd.files.storage import load
from vsgd_bench.compare.runs import KEYS
from vsgd_bench.results import RunFile

COMMAND = [sys.executable, "-m", "vsgd"]


def killed(words, seconds):
    """Run a command for a limited time, and return whether it was killed."""
    process = subprocess.Popen([*COMMAND, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    errors = process.communicate()[1].decode()
    assert process.returncode in (0, -9), errors
    return process.returncode != 0


def ran(words):
    """Return the duration of a complete run."""
    started = time.monotonic()
    subprocess.run([*COMMAND, *map(str, words)], check=True, capture_output=True, timeout=TIMEOUT)
    return time.monotonic() - started


def usual_seconds(words, first, again):
    """Return the duration of a run after compilation."""
    ran([*words, first])
    return ran([*words, again])


def kill_often(words, seconds, look, when_done):
    """Start a command repeatedly, kill it at random times, and finally let it finish. `seconds` is its duration."""
    kills, moments = 0, generator(words[0])
    while kills < cases(5, 50):
        if killed(words, moments.uniform(0.2, 1.0) * seconds):
            kills += 1
            look()
        else:
            when_done()
    ran(words)
    print(f"{words[0]}: {kills} kills")


@pytest.mark.slow
def test_fit_continues_after_a_kill(tmp_path):
    rng = np.random.default_rng(0)
    rows = [" ".join(f"{j}:{rng.random():.3f}" for j in sorted(rng.choice(99, 9, False))) for _ in range(30_000)]
    (tmp_path / "d.svm").write_text("".join(f"{i % 3} {row}\n" for i, row in enumerate(rows)))
    words = ["fit", tmp_path / "d.svm", "--passes", 12, "--resume", "--model"]
    seconds = usual_seconds(words, tmp_path / "first.npz", tmp_path / "whole.npz")
    (tmp_path / "first.npz").unlink()
    model = tmp_path / "m.npz"

    def check_and_remove():
        assert model.read_bytes() == (tmp_path / "whole.npz").read_bytes()
        model.unlink()

    kill_often([*words, model], seconds, lambda: model.exists() and load(model), check_and_remove)
    check_and_remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.svm", "whole.npz"]


@pytest.mark.slow
def test_figures_go_on_after_a_kill(tmp_path):
    words = ["figures", "6", "--runs", 30, "--out"]
    seconds = usual_seconds(words, tmp_path / "first", tmp_path / "whole")
    out = tmp_path / "killed"

    def remove():
        for path in out.glob("results/**/*.npz"):
            path.unlink()

    kill_often([*words, out], seconds, lambda: None, remove)
    assert names_in(out) == names_in(tmp_path / "whole")
    for path in (tmp_path / "whole").glob("results/**/*.npz"):
        assert (out / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_comparison_continues_after_a_kill(tmp_path):
    """Runs are equal except for their seconds and checksum."""
    chosen = ["--workloads", "digits-logistic", "--optimizers", "vsgd,adam-default,sgd"]
    words = ["compare", "--quick", *chosen, "--jobs", 1, "--out"]
    seconds = usual_seconds(words, tmp_path / "first", tmp_path / "whole")
    out = tmp_path / "killed"

    def records(folder):
        found = RunFile(folder / "quick.jsonl.gz", KEYS)
        return {tuple(r[key] for key in KEYS): json.dumps({**r, "seconds": None}) for r in found}

    expected = records(tmp_path / "whole")

    def check():
        assert records(out).items() <= expected.items()

    def remove():
        check()
        (out / "quick.jsonl.gz").unlink()

    kill_often([*words, out], seconds, check, remove)
    assert records(out) == expected
    assert names_in(out) == names_in(tmp_path / "whole")


def names_in(folder):
    """Return the names of all files, to check that no temporary ones remain."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))
