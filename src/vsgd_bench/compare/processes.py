"""Run jobs in worker processes. A job that fails, or whose process dies, does not affect the others."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from vsgd_bench.compare.runs import Job
from vsgd_bench.compare.train import Run, failed, train


class Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


def serve(pipe: Connection) -> None:
    """Run the jobs received from a pipe and send the results, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process stops it
    while True:
        try:
            job: Job = pipe.recv()
            pipe.send(attempt(job))
        except (EOFError, ConnectionError):
            return


def attempt(job: Job) -> Run:
    try:
        return train(*job)
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}".splitlines()[0])


def start() -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that reading raises EOFError after the worker has died
    return Worker(process, ours)


def run_all(jobs: Iterable[Job], processes: int) -> Iterator[tuple[Job, Run]]:
    """Yield jobs and their runs in the order in which they finish."""
    waiting = list(reversed(list(jobs)))
    busy: dict[Any, tuple[Worker, Job]] = {}
    workers = [start() for _ in range(min(processes, len(waiting)))]
    idle = list(workers)
    try:
        while waiting or busy:
            while waiting and idle:
                worker, job = idle.pop(), waiting.pop()
                if not worker.process.is_alive():  # killed while it was idle
                    worker = start()
                    workers.append(worker)
                worker.pipe.send(job)
                busy[worker.pipe] = (worker, job)
            for pipe in wait(list(busy)):
                worker, job = busy.pop(pipe)
                try:
                    run = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    run = failed("its process died")
                    worker.process.join()
                idle.append(worker)
                yield job, run
    finally:
        for worker in workers:
            worker.process.terminate()
