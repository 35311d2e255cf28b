"""Damaged machine code on disk is compiled again, with correct results, at most one warning, and no error."""

from __future__ import annotations

from fuzzing import cases
from kernels import run, write_package


def test_damaged_machine_code(tmp_path):
    count = cases(20, 1000)
    code = f"from cache_attack import attack; attack(jit, tiny, {count})"
    out, err = run(write_package(tmp_path / "package"), tmp_path / "cache", code)
    assert err == ""
    print(f"machine code: {count} caches, {out.strip()} warnings")
    assert int(out) > count / 4
