"""Run commands in separate processes and measure their peak memory. Linux only."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from processes import TIMEOUT

SCRIPT = """
import sys
from vsgd.cli import main
try:
    code = main(sys.argv[2:])
except SystemExit as ended:
    code = ended.code
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
open(sys.argv[1], "w").write(status["VmHWM"].split()[0])
sys.exit(code)
"""
"""Program that prints its own peak memory. The value of `wait4` would include memory of the parent process."""


class Measured(NamedTuple):
    code: int
    out: str
    err: str
    megabytes: float


def measured(*words, **options) -> Measured:
    """Run `vsgd` and measure the largest resident set of the process."""
    with tempfile.NamedTemporaryFile() as peak:
        command = [sys.executable, "-c", SCRIPT, peak.name, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, **options)
        return Measured(done.returncode, done.stdout, done.stderr, int(Path(peak.name).read_text() or 0) / 1e3)


def refused(*words, saying="", most=800, **options) -> Measured:
    """Check that a command ends with one line, exit code 2 and little memory."""
    result = measured(*words, **options)
    assert result.code == 2, result
    assert result.err.count("\n") == 1, result.err
    assert saying in result.err, result.err
    assert 0 < result.megabytes < most, result
    return result
