"""After damage to machine code on disk, or an interrupted compilation, code is compiled again with correct results."""

from __future__ import annotations

from fuzzing import cases
from kernels import CORRECT, run, write_package


def test_damaged_machine_code(tmp_path):
    count = cases(20, 1000)
    code = f"from cache_attack import attack; attack(jit, tiny, {count})"
    out, err = run(write_package(tmp_path / "package"), tmp_path / "cache", code)
    assert err == ""
    print(f"machine code: {count} caches, {out.strip()} warnings")
    assert int(out) > count / 4


def test_interrupted_compilations(tmp_path):
    code = f"from cache_attack import interrupt_compilations; interrupt_compilations(jit, tiny, {cases(20_000, 1000)})"
    package = write_package(tmp_path / "package")
    out, err = run(package, tmp_path / "cache", code)
    count, result = out.split()
    assert (result, err) == ("4.5", "")
    print(f"compilations: {count} interrupted")
    assert int(count) > 0
    assert run(package, tmp_path / "cache") == (CORRECT, "")
