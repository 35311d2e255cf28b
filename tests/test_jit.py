"""Compiled functions: the functions they call, and the cache of machine code, which is never stale or required."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from kernels import AT_ONCE, COMBINE, CORRECT, run, start, write_package

import vsgd
from vsgd import core, jit
from vsgd.algorithms import columns, paper
from vsgd_bench import baselines


def machine_code(cache: Path) -> dict[str, int]:
    return {str(file.relative_to(cache)): file.stat().st_mtime_ns for file in jit.machine_code(cache)}


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """A package, and a cache with its machine code."""
    folder = tmp_path_factory.mktemp("warm")
    write_package(folder / "package")
    assert run(folder / "package", folder / "cache") == (CORRECT, "")
    return folder


@pytest.fixture
def package(warm) -> Path:
    return warm / "package"


@pytest.fixture
def cache(warm, tmp_path) -> Path:
    """A copy of the warm cache."""
    return Path(shutil.copytree(warm / "cache", tmp_path / "cache"))


# --- what a function reaches --------------------------------------------------------------------------------------


def test_functions_are_reached_by_name_and_as_attributes_of_modules():
    found = set(jit.reached(baselines.paper_update))
    assert {baselines.paper_update, paper.update, paper.learn, vsgd.core.ema} <= found
    assert not {columns.update, paper.probe} & found


def test_functions_of_other_packages_are_left_to_numba():
    packages = {each.__module__.partition(".")[0] for each in jit.reached(baselines.networks_probe)}
    assert packages == {"vsgd", "vsgd_bench"}


def test_the_digest_is_another_for_another_function():
    assert jit.digest(paper.update) == jit.digest(paper.update) != jit.digest(columns.update)


def test_the_digest_is_another_for_another_default_of_a_constant(monkeypatch):
    before = jit.digest(paper.update)
    monkeypatch.setitem(paper.Paper._field_defaults, "memory", 3.0)
    assert jit.digest(paper.update) != before


# --- machine code on disk -----------------------------------------------------------------------------------------


def test_a_second_process_compiles_nothing(package, cache):
    before = machine_code(cache)
    assert run(package, cache) == (CORRECT, "")
    assert before
    assert machine_code(cache) == before


def test_change_of_any_dependency_compiles_again(tmp_path):
    """The changes are in a file that numba does not check."""
    package, cache = write_package(tmp_path / "package"), tmp_path / "cache"
    code = "print(jit.cached_jit(tiny.combine)(*arguments) == tiny.combine(*arguments))"
    assert run(package, cache, code) == ("True\n", "")
    parts = package / "parts.py"
    for before, after in [
        ("a * b", "a * b * b"),
        ("FACTOR = 3.0", "FACTOR = 4.0"),
        ("OFFSET = 0.5", "OFFSET = 1.5"),
        ("left: float\n    right: float", "right: float\n    left: float"),
    ]:
        assert before in parts.read_text()
        parts.write_text(parts.read_text().replace(before, after))
        assert run(package, cache, code) == ("True\n", ""), after
    assert len(list((cache / "vsgd").iterdir())) == 5


def test_other_constants_of_a_closure_are_another_function(package, tmp_path):
    """Two processes compile one function each, and the third loads both."""
    for factors in ("2.0,", "3.0,", "2.0, 3.0"):
        code = f"print([jit.cached_jit(tiny.scaled_by(factor))(10.0) for factor in ({factors})])"
        wanted = [10 * float(factor) for factor in factors.split(",") if factor]
        assert run(package, tmp_path, code) == (f"{wanted}\n", "")
    assert len(list((tmp_path / "vsgd").iterdir())) == 2


def test_processes_that_start_together_do_not_disturb_each_other(package, tmp_path):
    processes = [start(package, tmp_path) for _ in range(3)]
    assert [process.communicate() for process in processes] == [(CORRECT, "")] * 3
    assert run(package, tmp_path) == (CORRECT, "")


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def emptied(content: bytes) -> bytes:
    return b""


def mutated(content: bytes) -> bytes:
    return content[:-9] + bytes(9)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [truncated, emptied, mutated])
def test_damage_is_seen(cache, suffix, damage):
    (file,) = cache.rglob(f"*.{suffix}")
    assert jit.is_whole(file)
    file.write_bytes(damage(file.read_bytes()))
    assert not jit.is_whole(file)


@pytest.mark.parametrize(("suffix", "damage"), [("nbi", truncated), ("nbc", emptied), ("nbc", mutated)])
def test_damaged_files_are_replaced(package, cache, suffix, damage):
    (file,) = cache.rglob(f"*.{suffix}")
    file.write_bytes(damage(file.read_bytes()))
    out, err = run(package, cache)
    assert out == CORRECT
    assert err.count("is damaged; compiling again") == 1
    assert len(machine_code(cache)) == 2
    assert all(jit.is_whole(file) for file in jit.machine_code(cache))


def test_folders_in_place_of_files_are_replaced_with_one_warning(package, cache):
    (index,), (code,) = cache.rglob("*.nbi"), cache.rglob("*.nbc")
    index.unlink()
    index.mkdir()
    code.write_bytes(emptied(code.read_bytes()))
    out, err = run(package, cache)
    assert out == CORRECT
    assert err.count("compiling again") == 1
    assert all(jit.is_whole(file) for file in jit.machine_code(cache))


INTEGERS = "print(jit.cached_jit(tiny.combine)(tiny.Pair(left=2, right=1), 0.0))"


@pytest.mark.parametrize("before", ["", INTEGERS + "\n"], ids=["first types of arguments", "other types"])
def test_a_folder_that_another_process_writes_is_left_alone(package, cache, before):
    """There is no warning, since a slow compilation elsewhere is no error: under load, any process may have to wait."""
    (folder,) = (cache / "vsgd").iterdir()
    files = machine_code(folder)
    code = f"""
import pathlib
from vsgd.disk import locked
jit.WAITING_SECONDS = 0.0
with locked(pathlib.Path({str(folder)!r})):
    {COMBINE}
"""
    assert run(package, cache, before + code) == (CORRECT * (2 if before else 1), "")
    assert machine_code(folder) == files


def test_a_process_waits_for_another_that_compiles_the_same(package, tmp_path):
    """Of four processes that start together, one compiles each type of arguments."""
    code = """
dispatchers = []
caching = jit.caching
def remembered(*arguments):
    dispatchers.append(caching(*arguments))
    return dispatchers[-1]
jit.caching = remembered
{}
print(sum(len(each.stats.cache_misses) for each in dispatchers))
"""
    processes = [start(package, tmp_path, code.format(each)) for each in [COMBINE, INTEGERS] * 2]
    outputs = [process.communicate() for process in processes]
    assert [(out.split()[0], err) for out, err in outputs] == [(CORRECT.strip(), "")] * 4
    assert sum(int(out.split()[1]) for out, _ in outputs) == 2, outputs


def test_threads_that_start_together_compile_once(package, tmp_path):
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    print({*pool.map(lambda _: jit.cached_jit(tiny.combine)(*arguments), range(8))})
"""
    assert run(package, tmp_path, code) == ("{4.5}\n", "")
    assert len(machine_code(tmp_path)) == 2


def test_machine_code_of_other_types_is_not_run(package, cache):
    """Machine code of other types may be there if files were copied together with their checksums."""
    assert run(package, cache, INTEGERS) == (CORRECT, "")
    first, second = sorted(cache.rglob("*.nbc"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    jit.seal(cache)
    out, err = run(package, cache, COMBINE + "\n" + INTEGERS)
    assert out == CORRECT * 2
    assert err.count("is not usable (it has machine code for other types of arguments); compiling again") == 2
    assert run(package, cache, COMBINE + "\n" + INTEGERS) == (CORRECT * 2, "")


def test_a_full_disk_does_not_stop_the_work(package, tmp_path):
    """A limit on the size of files makes writing fail as a full disk does."""
    pytest.importorskip("resource")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    out, err = run(package, tmp_path, limit + COMBINE)
    assert out == CORRECT
    assert err.count("is not usable ([Errno 27] File too large); compiling again") == 1
    assert machine_code(tmp_path) == {}
    assert run(package, tmp_path) == (CORRECT, "")
    assert machine_code(tmp_path)


def test_other_types_of_arguments_are_cached_and_survive_a_full_disk(package, cache):
    """Call a kernel with integers after floats."""
    again = "\nprint(jit.cached_jit(tiny.combine)(tiny.Pair(left=2, right=1), 0.0))"
    limit = "\nimport resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    assert run(package, cache, COMBINE + again) == (CORRECT * 2, "")
    assert run(package, cache, COMBINE + again) == (CORRECT * 2, "")
    out, err = run(package, cache, COMBINE + limit + again.replace("0.0", "0"))
    assert out == CORRECT * 2
    assert err.count("compiling again") == 1


def test_a_cache_that_cannot_be_made_is_done_without(package, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert run(package, tmp_path / "cache") == (CORRECT, "")


def test_numba_does_not_fall_back_on_a_folder_of_its_own(package, cache):
    """The name of such a folder would not depend on the source."""
    (folder,) = {file.parent for file in jit.machine_code(cache)}
    shutil.rmtree(folder)
    folder.write_text("a file, not a folder")
    assert run(package, cache) == (CORRECT, "")
    assert not list(package.rglob("*.nb?"))


def assert_is_not_used(package, cache):
    """Check that the kernel is compiled: loading it from the cache would print no message."""
    out, err = run(package, cache, AT_ONCE + COMBINE)
    assert out == CORRECT
    assert "the result cannot be kept" in err


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_not_used(package, cache, mode):
    """Otherwise other users could have their code executed."""
    (cache / "vsgd").chmod(mode)
    before = machine_code(cache)
    assert_is_not_used(package, cache)
    assert machine_code(cache) == before


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(package, cache):
    os.chown(cache / "vsgd", 12345, 12345)
    assert_is_not_used(package, cache)


def test_folders_that_nobody_uses_are_removed(package, cache):
    now = time.time()
    for name, days in (("train-0123", jit.UNUSED_DAYS + 1), ("train-4567", jit.UNUSED_DAYS - 1)):
        (cache / "vsgd" / name / "sub").mkdir(parents=True)
        os.utime(cache / "vsgd" / name, (0, now - 86400 * days))
    (used,) = (cache / "vsgd").glob("combine-*")
    os.utime(used, (0, now - 86400 * 1000))
    before = machine_code(cache)
    assert run(package, cache) == (CORRECT, "")
    assert {path.name for path in (cache / "vsgd").iterdir()} == {used.name, "train-4567"}
    assert machine_code(cache) == before
    assert now - used.stat().st_mtime < 3600


def test_a_long_compilation_is_announced(package, tmp_path):
    out, err = run(package, tmp_path, AT_ONCE + COMBINE)
    assert out == CORRECT
    assert err == "vsgd: compiling combine for this processor, once; later runs take it from the cache\n"
    assert run(package, tmp_path, AT_ONCE + COMBINE) == (CORRECT, "")
    (tmp_path / "file").write_text("")
    _, err = run(package, tmp_path / "file", AT_ONCE + COMBINE)
    assert err.startswith("vsgd: compiling combine for this processor; the result cannot be kept ([Errno 20]")
    assert err.count("\n") == 1


def test_interrupted_compilation_is_repeated(package, tmp_path):
    code = """
import sys
def interrupt(frame, event, argument):
    if frame.f_code.co_name == "compile" and "dispatcher" in frame.f_code.co_filename:
        sys.settrace(None)
        raise KeyboardInterrupt
sys.settrace(interrupt)
jit.WAITING_SECONDS = 0.0
try:
    jit.cached_jit(tiny.combine)(*arguments)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run(package, tmp_path, code + COMBINE) == ("interrupted\n" + CORRECT, "")
    assert machine_code(tmp_path)


def test_errors_of_the_function_are_its_own(package, tmp_path):
    code = """
for function in (tiny.positive, tiny.impossible):
    try:
        jit.cached_jit(function)(-1.0)
    except Exception as error:
        print(type(error).__name__)
"""
    assert run(package, tmp_path, code) == ("ValueError\nTypingError\n", "")


def clipped(value, limit):
    return core.clip(value, limit)


def increased(value, condition):
    return core.add_one(value, condition)


@pytest.mark.parametrize("value", [-5.0, -1.0, 0.0, 0.5, 2.0, math.inf, -math.inf, math.nan])
def test_compiled_clip_equals_the_plain_one_and_keeps_nan(value):
    clip = jit.compiled(clipped)
    for number in (np.float32, np.float64):
        found, expected = clip(number(value), number(1.5)), min(max(value, -1.5), 1.5)
        assert math.isnan(found) if math.isnan(value) else found == expected


@pytest.mark.parametrize("condition", [False, True])
def test_compiled_add_one_keeps_the_precision(condition):
    add_one = jit.compiled(increased)
    for number in (np.float32, np.float64):
        assert add_one(number(2.5), condition) == core.add_one(number(2.5), condition) == 2.5 + condition
    assert all(signature.return_type == signature.args[0] for signature in add_one.nopython_signatures)
