"""Damage machine code on disk and load it, many times, in a separate process that may crash."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from pathlib import Path

from fuzzing import generator, mutated, no_hang

FACTORS = 2.0, 3.0


def swap(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def damage(jit, cache, rng):
    files = sorted(file for file in cache.rglob("*.nb*") if file.is_file())
    file = rng.choice(files)
    twin = rng.choice([other for other in files if other.suffixes == file.suffixes])
    how = rng.randrange(8)
    if how == 0:
        file.write_bytes(b"")
    elif how == 1:
        file.write_bytes(rng.randbytes(rng.choice([1, 100, 10_000])))
    elif how in (2, 3):
        file.unlink()
        if how == 3:
            file.mkdir()
    elif how in (4, 5):
        swap(file, twin)
        if how == 5:
            swap(jit.seal_of(file), jit.seal_of(twin))
    else:
        file.write_bytes(mutated(file.read_bytes(), rng))


def attack(jit, tiny, count):
    """Print the number of warnings."""
    rng, cache, told = generator("cache"), Path(os.environ["XDG_CACHE_HOME"]) / "vsgd", 0

    def results():
        """Return new functions at each call, so that machine code is read from disk."""
        with warnings.catch_warnings(record=True) as caught, no_hang():
            warnings.simplefilter("always")
            assert [jit.cached_jit(tiny.scaled_by(factor))(10.0) for factor in FACTORS] == [20.0, 30.0]
        messages = [str(warning.message) for warning in caught]
        assert len(messages) <= len(FACTORS), messages  # one for each kernel
        assert all("compiling again" in message for message in messages), messages
        return len(messages)

    assert results() == 0
    whole = shutil.copytree(cache, cache.with_name("whole"))
    for _ in range(count):
        shutil.rmtree(cache)
        shutil.copytree(whole, cache)
        for _ in range(rng.choice([1, 1, 3])):
            with contextlib.suppress(OSError):  # the checksum of a file that does not exist
                damage(jit, cache, rng)
        told += results()
        results()
    print(told)


class Interrupted(BaseException):
    """Raised during compilation, like `KeyboardInterrupt` by Ctrl-C."""


def interrupt_compilations(jit, tiny, interval):
    """Interrupt compilations at every n-th call of a Python function, until one ends before. Print their number."""
    jit.cached_jit(tiny.scaled_by(2.0))(1.0)  # numba imports modules, which would be broken by an interrupt
    count = calls = moment = 0

    def trace(frame, event, argument):
        nonlocal calls
        calls += 1
        # an exception in a destructor or a callback of the garbage collector would not reach the caller
        if calls >= moment and frame.f_code.co_name in ("compile", "run_pass", "lower", "load_overload"):
            sys.settrace(None)
            raise Interrupted

    while True:
        calls, moment = 0, moment + interval
        sys.settrace(trace)
        try:
            result = jit.cached_jit(tiny.combine)(tiny.Pair(left=2.0, right=1.0), 0.0)
        except Interrupted:
            count += 1
        else:
            print(count, result)
            return
        finally:
            sys.settrace(None)
