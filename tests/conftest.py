"""Settings of all tests: a cache folder for compiled code, one thread per process, and Ctrl-C ends subprocesses."""

import os
import signal
from pathlib import Path

# not in the cache folder of the user
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".cache")

# threads of BLAS and OpenMP that wait for each other on busy cores take many times as long as one thread
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# shells ignore SIGINT for background processes
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter):
    """Print one line if tests of pages were skipped, with the command that enables them."""
    skipped = [each for each in terminalreporter.stats.get("skipped", []) if "tests/pages/" in each.nodeid]
    if skipped:
        text = f"{len(skipped)} tests of pages skipped: no Chromium found; get it with `apt-get install chromium`"
        terminalreporter.write_line(text, yellow=True)
