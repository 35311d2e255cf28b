"""Small kernels in a separate package, and processes with a separate cache of compiled code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import vsgd

TINY = """
from vsgd import parts
from vsgd.parts import Pair, times

def combine(pair, plus):
    return times(pair.left, parts.FACTOR) - parts.raised(pair.right) + plus

def scaled_by(factor):
    def scaled(x):
        return times(x, factor)
    return scaled

def positive(x):
    if x < 0:
        raise ValueError("negative")
    return x

def impossible(x):
    return x.nothing
"""

PARTS = """
from typing import NamedTuple

FACTOR = 3.0
OFFSET = 0.5

class Pair(NamedTuple):
    left: float
    right: float

def times(a, b):
    return a * b

def raised(a, by=OFFSET):
    return a + by
"""

PREPARE = """
import sys, vsgd
vsgd.__path__.append(sys.argv[1])
from vsgd import jit, tiny
jit.NOTICE_SECONDS = 600.0
jit.WAITING_SECONDS = 600.0
arguments = tiny.Pair(left=2.0, right=1.0), 0.0
"""
AT_ONCE = """
import threading
class AtOnce(threading.Timer):
    def start(self):
        self.function(*self.args, **self.kwargs)
threading.Timer = AtOnce
"""
"""Announce every compilation, however short, so that tests do not depend on timing."""
COMBINE = "print(jit.cached_jit(tiny.combine)(*arguments))"
CORRECT = "4.5\n"


def write_package(folder: Path) -> Path:
    """Two modules of the package: a kernel, and the functions that it calls."""
    folder.mkdir()
    (folder / "tiny.py").write_text(TINY)
    (folder / "parts.py").write_text(PARTS)
    return folder


class Output(NamedTuple):
    out: str
    err: str


def start(package: Path, cache: Path, code: str = COMBINE) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, (Path(vsgd.__file__).parents[1], Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-B", "-c", PREPARE + code, str(package)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(package: Path, cache: Path, code: str = COMBINE) -> Output:
    return Output(*start(package, cache, code).communicate())
