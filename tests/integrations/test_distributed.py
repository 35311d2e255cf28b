"""Two processes with gloo, as started by `torchrun`: replicas stay bit-for-bit equal, also with micro-batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import TIMEOUT


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_replicas_stay_equal(framework, tmp_path):
    script = Path(__file__).with_name("distributed.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, script, framework, tmp_path], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("replicas are equal") == 2
