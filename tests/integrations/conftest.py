"""Tests of `vsgd.integrations`. A file is skipped if its framework is missing. Nothing is downloaded."""

import warnings
from importlib.util import find_spec

import pytest
from threads import one_thread

__all__ = ["one_thread"]

NEEDS = {
    "test_transformers.py": ("transformers", "accelerate", "peft"),
    "test_distributed.py": ("transformers", "accelerate", "lightning"),
    "test_accelerate.py": ("accelerate",),
    "test_lightning.py": ("lightning",),
    "test_plain_loops.py": ("torch",),
    "test_run_log.py": ("torch", "tqdm"),
}

collect_ignore = [name for name, packages in NEEDS.items() if not all(map(find_spec, packages))]


@pytest.fixture(autouse=True)
def warnings_of_frameworks():
    """Ignore warnings of the frameworks about few workers, missing GPUs and future changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
