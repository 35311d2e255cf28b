"""What all tests share: they keep compiled code in this folder, and Ctrl-C ends what they start."""

import os
import signal
from pathlib import Path

# not in the user's folder, whose content is none of the tests' business
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".cache")

# a shell that runs the tests in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter):
    """Say in one line that tests of pages were skipped, and how to run them."""
    skipped = [each for each in terminalreporter.stats.get("skipped", []) if "tests/pages/" in each.nodeid]
    if skipped:
        text = f"{len(skipped)} tests of pages skipped: no Chromium found; get it with `apt-get install chromium`"
        terminalreporter.write_line(text, yellow=True)
