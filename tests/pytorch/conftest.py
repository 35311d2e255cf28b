"""Tests of `vsgd.torch`: left out where there is no torch, and run on one thread, which is fastest for small models."""

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
