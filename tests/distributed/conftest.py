"""Tests with several processes. They are skipped without torch."""

from importlib.util import find_spec

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
