"""examples/elastic.py continues when workers are killed at random times and when their number changes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
KILLED = Path(__file__).with_name("killed_worker.py")
STEPS, EVERY = 700, 10


@contextmanager
def torchrun(folder, workers, script, *arguments, restarts=0):
    """A running job, and the file of its output."""
    log = folder / f"{workers}-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
               f"--max-restarts={restarts}", "--monitor-interval=0.1", script, *map(str, arguments)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as documented in the example
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process, log
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun stops its workers
                process.wait(60)


def finish(process, log, seconds=3600):  # timeout
    assert process.wait(seconds) == 0, log.read_text()[-3000:]
    return log.read_text()


def steps_of(text):
    return [int(step) for step in re.findall(r"^step (\d+):", text, re.MULTILINE)]


def starts_of(text):
    """Return each worker and its first step."""
    found = re.findall(r"process (\d+): from step (\d+)", text)
    return [(int(process), int(step)) for process, step in found]


def checksums_of(text):
    return re.findall(r"checksum (\d+)", text)


@pytest.mark.slow
def test_workers_killed_at_twenty_random_moments(tmp_path):
    arguments, kills = ("--steps", STEPS, "--every", EVERY), 20
    with torchrun(tmp_path, 2, EXAMPLE, tmp_path / "whole.pt", *arguments) as run:
        whole = finish(*run)
    with torchrun(tmp_path, 2, KILLED, EXAMPLE, kills, tmp_path / "killed.pt", *arguments, restarts=kills) as run:
        killed = finish(*run)
    starts = starts_of(killed)
    assert len(starts) == 2 * (kills + 1)
    done = 0
    for part, (_, start) in zip(re.split(r"worker \d of 2, process", killed)[2::2], starts[1::2], strict=True):
        assert done - start <= EVERY  # only steps after the last checkpoint are lost
        done = max([start, *(step + 1 for step in steps_of(part))])
    assert done == STEPS
    assert len(set(checksums_of(killed))) == 1
    assert checksums_of(killed) == checksums_of(whole)  # resuming is bit-for-bit exact


@pytest.mark.slow
def test_another_number_of_workers_continues(tmp_path):
    checkpoint = tmp_path / "run.pt"
    for workers, steps in ((2, 40), (3, 80), (1, 120)):
        with torchrun(tmp_path, workers, EXAMPLE, checkpoint, "--steps", steps, "--every", EVERY) as run:
            text = finish(*run)
        assert {start for _, start in starts_of(text)} == {steps - 40}
        assert len(checksums_of(text)) == workers
        assert len(set(checksums_of(text))) == 1
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)", text, re.MULTILINE)]
    assert sum(losses) / len(losses) < 0.3
