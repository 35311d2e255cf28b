"""A fixture for tests of torch."""

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """One thread is fastest for small models."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
