import jax
import pytest


@pytest.fixture(autouse=True)
def single_precision():
    """JAX as it is by default; other tests switch to 64 bits."""
    with jax.enable_x64(False):
        yield
