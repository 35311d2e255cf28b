"""What all tests share: they keep compiled code in this folder, and Ctrl-C ends what they start."""

import os
import signal
from pathlib import Path

# not in the user's folder, whose content is none of the tests' business
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".cache")

# a shell that runs the tests in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
