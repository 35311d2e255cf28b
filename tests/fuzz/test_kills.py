"""SIGKILL at random moments: files are whole or absent, and the same command ends where it would have ended."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from fuzzing import cases, generator

from vsgd.files.storage import load

COMMAND = [sys.executable, "-m", "vsgd"]


def killed(words, seconds):
    """Run for so long at most; whether it had to be killed."""
    process = subprocess.Popen([*COMMAND, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    errors = process.communicate()[1].decode()
    assert process.returncode in (0, -9), errors
    return process.returncode != 0


def ran(words):
    """How long it took to the end."""
    started = time.monotonic()
    subprocess.run([*COMMAND, *map(str, words)], check=True, capture_output=True, timeout=300)
    return time.monotonic() - started


@pytest.mark.slow
def test_fit_goes_on_after_a_kill(tmp_path):
    rng = np.random.default_rng(0)
    rows = [" ".join(f"{j}:{rng.random():.3f}" for j in sorted(rng.choice(99, 9, False))) for _ in range(30_000)]
    (tmp_path / "d.svm").write_text("".join(f"{i % 3} {row}\n" for i, row in enumerate(rows)))
    words = ["fit", tmp_path / "d.svm", "--passes", 12, "--resume", "--model"]
    whole = ran([*words, tmp_path / "whole.npz"])
    kills, moments, model = 0, generator("fit"), tmp_path / "m.npz"
    while kills < cases(5, 50):
        if killed([*words, model], moments.uniform(0.2, 1.0) * whole):
            kills += 1
            if model.exists():
                load(model)
        else:
            assert model.read_bytes() == (tmp_path / "whole.npz").read_bytes()
            model.unlink()
    ran([*words, model])
    assert model.read_bytes() == (tmp_path / "whole.npz").read_bytes()


@pytest.mark.slow
def test_figures_go_on_after_a_kill(tmp_path):
    words = ["figures", "6", "--runs", 30, "--out"]
    whole = ran([*words, tmp_path / "whole"])
    kills, moments, out = 0, generator("figures"), tmp_path / "killed"
    while kills < cases(5, 50):
        if killed([*words, out], moments.uniform(0.2, 1.0) * whole):
            kills += 1
        else:
            for path in out.glob("results/**/*.npz"):
                path.unlink()
    ran([*words, out])
    for path in (tmp_path / "whole").glob("results/**/*.npz"):
        assert (out / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()
