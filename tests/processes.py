"""Start and stop the processes of a distributed test on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 3600
"""Seconds after which a process of a test is considered to hang. It only ends tests that would never end, so it is much
longer than any run on a busy machine, or on one that suspends processes."""


class Process(NamedTuple):
    """One of several processes that run the same script."""

    rank: int
    world: int
    meeting: Path
    """The file of the process group's store."""
    folder: Path
    """The folder that all processes share."""
    arguments: list[str]

    def join(self) -> None:
        """Join the process group. It waits longer than the test does."""
        import torch.distributed as dist

        limit = timedelta(seconds=2 * TIMEOUT)
        dist.init_process_group("gloo", f"file://{self.meeting}", limit, rank=self.rank, world_size=self.world)


def this_process() -> Process:
    """Return the process of a script that `run_all` has started."""
    rank, world, meeting, folder, *arguments = sys.argv[1:]
    return Process(int(rank), int(world), Path(meeting), Path(folder), arguments)


def run_all(script: Path, world: int, folder: Path, *arguments: object) -> list[tuple[int, str]]:
    """Run a script in `world` processes. Return exit code and standard error of each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    # a file of an earlier run contains the addresses of its processes
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    processes = [
        subprocess.Popen(
            [sys.executable, script, *map(str, (rank, world, meeting, folder, *arguments))],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def run_well(script: Path, world: int, folder: Path, *arguments: object) -> None:
    """Call `run_all` with a script that must not fail."""
    for code, error in run_all(script, world, folder, *arguments):
        assert code == 0, error[-3000:]
