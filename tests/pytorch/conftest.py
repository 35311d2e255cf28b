"""Tests of `vsgd.torch`: left out where there is no torch, and run on one thread, which is fastest for small models."""

from importlib.util import find_spec

from threads import one_thread

__all__ = ["one_thread"]

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
