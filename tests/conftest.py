"""Settings of all tests: a cache folder for compiled code, and Ctrl-C ends subprocesses."""

import os
import signal
from pathlib import Path

# not in the cache folder of the user
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".cache")

# shells ignore SIGINT for background processes
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter):
    """Print one line if tests of pages were skipped, with the command that enables them."""
    skipped = [each for each in terminalreporter.stats.get("skipped", []) if "tests/pages/" in each.nodeid]
    if skipped:
        text = f"{len(skipped)} tests of pages skipped: no Chromium found; get it with `apt-get install chromium`"
        terminalreporter.write_line(text, yellow=True)
