"""Passes over files, in this process or in several processes whose models are merged."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm

from vsgd.algorithms.columns import COLUMNS
from vsgd.errors import UserError
from vsgd.files.merging import merge
from vsgd.files.reading import Source, chunks
from vsgd.files.storage import Trained
from vsgd.files.targets import reader_of
from vsgd.linear import Training, as_rows, train_on

ENDING_SECONDS = 10
"""Seconds that a process may take to end before it is killed."""


class Passed(NamedTuple):
    """A model after a pass, the mean loss of rows before their update, the number of rows, and of bad lines."""

    trained: Trained
    loss: float
    rows: int
    skipped: int


OnePass = Callable[[Trained], Passed]


def one_pass(sources: Sequence[Source], trained: Trained, part: tuple[int, ...], rows: int) -> Passed:
    """Train on every chunk once, with its rows shuffled. The model is changed in place.

    Args:
        sources: the files.
        trained: the model.
        part: number of the part, for the seed of shuffling; empty if there is only one.
        rows: number of rows of all files, for the progress bar; 0 for no progress bar.
    """
    total, seen, skipped = 0.0, 0, 0
    training = Training(trained.task._replace(fresh=trained.passes == 0), COLUMNS, trained.batch_size)
    rng = np.random.default_rng((trained.seed, trained.passes, *part))
    quiet = None if rows and sys.stderr is not None and sys.stderr.isatty() else True
    with tqdm(total=rows, unit=" rows", desc=f"pass {trained.passes + 1}", disable=quiet) as bar:
        for source in sources:
            for chunk in chunks(source, trained.schema, trained.chunk_rows, reader_of(trained.loss, trained.classes)):
                count = len(chunk.y)
                skipped += len(chunk.good) - count
                if count:
                    order = rng.permutation(count)
                    loss = train_on(trained.model, as_rows(chunk.X), order, chunk.y, np.ones(count), training)
                    total, seen = total + loss * count, seen + count
                    bar.update(count)
                    bar.set_postfix(loss=f"{loss:.4g}")
    return Passed(trained._replace(passes=trained.passes + 1, rows=seen), total / max(seen, 1), seen, skipped)


def learn_part(connection: Connection, sources: Sequence[Source], part: int) -> None:
    """Run in a worker process: receive models and send them back after a pass, until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles interrupts and ends this process
    with contextlib.suppress(EOFError, OSError):
        while True:
            trained = connection.recv()
            try:
                connection.send(one_pass(sources, trained, (part,), rows=0))
            except (UserError, MemoryError) as error:
                connection.send(error)


def received(connection: Connection, sources: Sequence[Source]) -> Passed:
    """Return the result of a worker process, or raise the error that it sent."""
    try:
        passed = connection.recv()
    except (EOFError, OSError):
        raise UserError(
            f"the process that reads {sources[0].path} ended unexpectedly, perhaps for lack of memory. Lower --jobs."
        ) from None
    if isinstance(passed, BaseException):
        raise passed
    assert isinstance(passed, Passed)
    return passed


def merged(trained: Trained, learned: Sequence[Passed]) -> Passed:
    """Return one pass from the passes over the parts."""
    rows = sum(passed.rows for passed in learned)
    loss = sum(passed.loss * passed.rows for passed in learned) / max(rows, 1)
    model = merge([passed.trained for passed in learned], base=trained)
    return Passed(model, loss, rows, sum(passed.skipped for passed in learned))


def parts_of(sources: Sequence[Source], jobs: int) -> list[list[Source]]:
    """Return the files of each process, distributed in turn."""
    return [list(sources[first::jobs]) for first in range(min(jobs, len(sources)))]


@contextlib.contextmanager
def passes_over(sources: Sequence[Source], jobs: int, rows: int) -> Iterator[OnePass]:
    """Yield a function that makes one pass over all files. With several jobs, each process reads a part of them.

    The result depends on the number of parts, but not on the timing of the processes.
    """
    parts = parts_of(sources, jobs)
    if len(parts) == 1:
        yield lambda trained: one_pass(sources, trained, (), rows)
        return
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in parts]
    workers = [
        context.Process(target=learn_part, args=(there, part, number), daemon=True)
        for number, ((_, there), part) in enumerate(zip(pipes, parts, strict=True))
    ]
    try:
        for worker, (_, there) in zip(workers, pipes, strict=True):
            worker.start()
            there.close()

        def side_by_side(trained: Trained) -> Passed:
            for here, _ in pipes:
                with contextlib.suppress(OSError):  # `received` raises if a process has ended
                    here.send(trained)
            return merged(trained, [received(here, part) for (here, _), part in zip(pipes, parts, strict=True)])

        yield side_by_side
    except BaseException:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
        raise
    finally:
        for here, _ in pipes:
            here.close()  # this ends processes that wait for a model
        for worker in workers:
            if worker.pid is not None:
                worker.join(ENDING_SECONDS)
                if worker.is_alive():
                    worker.kill()
                    worker.join()
