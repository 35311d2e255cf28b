"""Run by test_elastic.py: examples/elastic.py, in which one worker of each attempt kills itself at a random moment.

The worker counts its own steps, so the moments do not depend on how busy the machine is. Arguments: the example, the
number of attempts that end in a kill, the arguments of the example.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import threading

import torch.distributed as dist

MAX_STEPS, MAX_SECONDS = 24, 0.05
"""A worker is killed after at most this many steps, and then somewhere in the middle of a step."""


def load(path):
    spec = importlib.util.spec_from_file_location("elastic", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_a_kill(global_batch, attempt):
    """Return a replacement of `global_batch` that kills the worker after some calls."""
    rng = random.Random(attempt)
    victim, after, seconds = rng.randrange(2), rng.choice([0, *range(1, MAX_STEPS)]), rng.uniform(0, MAX_SECONDS)
    calls = 0

    def counted(step):
        nonlocal calls
        if calls == 0:
            dist.barrier()  # both workers have printed their first step
        if calls == after and dist.get_rank() == victim:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        calls += 1
        return global_batch(step)

    return counted


if __name__ == "__main__":
    _, path, kills, *arguments = sys.argv
    example = load(path)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < int(kills):
        example.global_batch = with_a_kill(example.global_batch, attempt)
    sys.argv = [path, *arguments]
    example.main()
