"""Machine code that is kept on disk is never older than the text it was compiled from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import vsgd
from vsgd import COLUMNS, PAPER
from vsgd.kernels import calling, compiled, compiled_with, digest_of
from vsgd.linear import kernel

STEP = """
from vsgd import Moments, rule
from vsgd.kernels import kept
state = rule.State(mean=Moments(0.5, 1.0, 1.0, 1.0), memory=5.0, seen=20.0)
print(kept(rule.step)(1.0, state, Moments(1.0, 1.0, 1.0, 1.0), 1.0)[0])
"""


def step(package: Path, cache: Path) -> str:
    """Where a process of its own goes from 1."""
    environment = {**os.environ, "PYTHONPATH": str(package), "XDG_CACHE_HOME": str(cache)}
    run = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, check=True)
    return run.stdout


def machine_code(cache: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in cache.rglob("*.nbc")}


def test_another_rule_is_compiled_anew(tmp_path):
    shutil.copytree(Path(vsgd.__file__).parent, tmp_path / "package" / "vsgd")
    expected = step(tmp_path / "package", tmp_path / "cache")
    kept = machine_code(tmp_path / "cache")
    assert step(tmp_path / "package", tmp_path / "cache") == expected
    assert kept
    assert machine_code(tmp_path / "cache") == kept, "the second process compiled nothing"

    rule = tmp_path / "package" / "vsgd" / "rule.py"
    text = rule.read_text()
    assert "theta - eta * batch.grad" in text
    rule.write_text(text.replace("theta - eta * batch.grad", "theta - eta * batch.grad - eta * batch.grad"))
    assert step(tmp_path / "package", tmp_path / "cache") != expected


SCALE = (1.0,)


def scaled(x):
    return x * SCALE[0]


def test_constants_of_another_type_are_compiled_anew():
    single, double = (compiled_with(scaled, SCALE=(kind(1),)) for kind in (np.float32, np.float64))
    assert single is not double
    assert single(np.float32(0.1)) == np.float32(0.1)
    assert compiled_with(scaled, SCALE=(np.float32(1),)) is single


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert step(Path(vsgd.__file__).parents[1], tmp_path / "cache")


def test_machine_code_of_other_constants_has_another_name():
    """Two processes compile, a third loads both: by one name its linker would take one for the other."""
    names = {calling(kernel.train, compiled_with, OPTIONS=options).__qualname__ for options in (PAPER, COLUMNS)}
    assert len(names) == 2


def test_functions_among_constants_are_told_apart_by_name():
    """Where they are in memory is different in every process."""
    assert digest_of({"F": compiled(scaled)}) == digest_of({"F": scaled}) != digest_of({"F": step})
