"""Tests on a simulated accelerator. It stays registered, so they run in a separate process: `make test-device`."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from threads import one_thread

__all__ = ["one_thread"]

HERE = Path(__file__).parent
NO_COMPILER = "no C++ compiler found for the simulated device; get one with `apt-get install g++`, or set CXX"


def pytest_ignore_collect(collection_path, config):
    """Skip these tests in a run with other tests, and without torch."""
    paths = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    alone = all(HERE in (path, *path.parents) for path in paths)
    return True if find_spec("torch") is None or not alone else None


def pytest_terminal_summary(terminalreporter):
    skipped = [each for each in terminalreporter.stats.get("skipped", []) if NO_COMPILER in str(each.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped: {NO_COMPILER}", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def sim():
    """Return the module of the simulated device, which builds and registers it."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip(NO_COMPILER)
    import simulated_device

    return simulated_device


@pytest.fixture(autouse=True)
def uncompiled():
    """Run without `torch.compile`, whose backends do not know the device. Tests of the compiler change this."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield
