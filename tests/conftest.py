"""Ctrl-C ends the processes that tests start, even if a shell runs the tests in the background, where it is ignored."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
