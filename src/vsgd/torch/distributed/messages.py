"""Exchange messages between the processes that train one model, so that all of them take the same step.

Every process evaluates its own part of the minibatch. All decisions of a step follow from numbers that are equal in all
processes, so that collectives always pair up. Each message has a fixed length. It contains the point of the step,
whether the sender has failed, and a digest of the facts that must be equal: settings, counters, and which parameters
have a gradient. Processes that differ therefore raise an error at the next message.
"""

from __future__ import annotations

import functools
import json
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

DIFFERENT = (
    "process {other} differs from process 0 in {what}: {there} instead of {here}. All processes must train one model "
    "with the same settings. Build it from the same seed, or wrap it in DistributedDataParallel, which copies the "
    "weights of process 0. Load checkpoints and change settings, weights and state in all processes alike."
)

OUT_OF_STEP = (
    "process {other} is at another point of the step than process 0: {there!r} instead of {here!r}. Closures must use "
    "the same modules in all processes, and every process must call the optimizer equally often."
)

PEER_LOST = "another process has ended or does not answer; see its error: {lost}"

FAILURE = "vsgd/failure"
"""Key of the store under which the first process that fails leaves its error for those that it cannot reach."""

NOTIFY_TIMEOUT = timedelta(seconds=10)
"""How long a failed process waits for the others to receive its error before it closes its connections."""

READ_TIMEOUT = timedelta(seconds=5)
"""How long it then waits for the others to read its error from the store, which may be a part of this process."""

CLOSING_TAG = 0x7653
"""Tag of a message that no process sends."""

INLINE = 4
"""Number of values that fit into a message of fixed length. Longer lists follow in a second message."""

T = TypeVar("T")
P = ParamSpec("P")


class PeerError(RuntimeError):
    """Another process has failed."""


class DifferenceError(RuntimeError):
    """The processes differ in what must be equal. All of them raise it."""


class Failure(NamedTuple):
    """An error of one process, for the others."""

    summary: str
    traceback: str

    def as_error(self) -> PeerError:
        error = PeerError(self.summary)
        error.add_note(f"{self.summary.partition(' raised')[0]}:\n{self.traceback}")
        return error


class Processes(NamedTuple):
    """The processes that train one model, from the view of one of them, which may be the only one."""

    group: Any
    messages: Any
    """A group of the same processes for messages. It waits for no device, and has no collectives of closures."""
    rank: int
    size: int
    are_samples: bool
    """Whether each process leaves its own gradient, which is a sample. Otherwise gradients are averaged already."""
    reduce_dtype: torch.dtype | None = None
    """Precision in which moments of the samples are sent; None: that of the sums."""
    facts: Mapping[str, Any] = MappingProxyType({})
    """Values that must be equal in all processes, by name."""
    digest: int = 0
    """Checksum of the facts."""

    def with_facts(self, facts: dict[str, Any]) -> Processes:
        """Return these processes with further facts that must be equal in all of them."""
        digest = zlib.crc32(repr(facts).encode(), self.digest)
        return self._replace(facts={**self.facts, **facts}, digest=digest)

    # --- tensors --------------------------------------------------------------------------------------------------

    def gather_rows(self, values: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, which may differ in their length."""
        lengths = [int(row[0]) for row in self.numbers("touched rows", len(values))]
        dtype = self.reduce_dtype if values.is_floating_point() else None
        padded = values.new_zeros(max(lengths), *values.shape[1:], dtype=dtype)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:length].to(values.dtype) for part, length in zip(parts, lengths, strict=True)]

    def add_up(self, values: Tensor) -> None:
        """Replace values by their sum over all processes."""
        if self.reduce_dtype is None:
            dist.all_reduce(values, group=self.group)
            return
        # each process adds up a part in full precision: rounding does not accumulate, and all receive the same sums
        sent = F.pad(values.reshape(-1), (0, -values.numel() % self.size)).to(self.reduce_dtype)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        part = received.view(self.size, -1).to(values.dtype).sum(0).to(self.reduce_dtype)
        dist.all_gather_into_tensor(sent, part, group=self.group)
        values.copy_(sent[: values.numel()].view_as(values))

    # --- numbers --------------------------------------------------------------------------------------------------

    def numbers(self, point: str, *values: float) -> list[list[float]]:
        """Return the numbers that each process sends at this point.

        Raises:
            PeerError: another process has failed.
            DifferenceError: the processes differ in their facts, or are at different points.
        """
        if self.size == 1:
            return [[float(value) for value in values]]
        try:
            return self._exchange(point, values)
        except (PeerError, DifferenceError):
            raise
        except RuntimeError as lost:
            raise self._lost(lost) from lost

    def gather_kinds(self, point: str, kinds: list[int], *values: float) -> tuple[list[set[int]], list[list[float]]]:
        """Return the kinds that each item has in any process, and the values of each process."""
        checksums, *columns = zip(*self.numbers(point, zlib.crc32(bytes(kinds)), *values), strict=True)
        rows = [list(row) for row in zip(*columns, strict=True)]
        if len(set(checksums)) == 1:
            return [{kind} for kind in kinds], rows
        found = zip(*self.numbers(f"{point}: kinds", *kinds), strict=True)
        return [{int(kind) for kind in column} for column in found], rows

    def mean(self, point: str, value: float) -> float:
        """Return the mean of a number over all processes."""
        return sum(row[0] for row in self.numbers(point, value)) / self.size

    def all(self, point: str, value: bool) -> bool:
        """Return whether a value is true in all processes."""
        return all(row[0] for row in self.numbers(point, value))

    def _exchange(self, point: str, values: Sequence[float]) -> list[list[float]]:
        rows = self._gather(self._row(point, values))
        if any(row[0] for row in rows):
            raise next(failure for failure in self._gather_objects(None) if failure is not None).as_error()
        self._check(rows, point)
        lengths = [int(row[3]) for row in rows]
        if max(lengths) > INLINE:
            contents = self._gather([*values, *[0.0] * (max(lengths) - len(values))])
        else:
            contents = [row[4:] for row in rows]
        return [content[:length] for content, length in zip(contents, lengths, strict=True)]

    def _row(self, point: str, values: Sequence[float], failed: bool = False) -> list[float]:
        """Return the numbers of a message: whether it reports a failure, digest, point, number of values, and these."""
        inline = [*values, *[0.0] * INLINE][:INLINE]
        return [float(failed), float(self.digest), float(zlib.crc32(point.encode())), float(len(values)), *inline]

    def _gather(self, values: list[float], timeout: timedelta = timedelta()) -> list[list[float]]:
        """Return equally many numbers of each process. A timeout of zero is that of the group."""
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.messages, async_op=True).wait(timeout)
        return [part.tolist() for part in parts]

    def _gather_objects(self, mine: Any) -> list[Any]:
        found = [None] * self.size
        dist.all_gather_object(found, mine, group=self.messages)
        return found

    def _check(self, rows: list[list[float]], point: str) -> None:
        """Raise DifferenceError unless the processes are equal in their facts, and at the same point."""
        if all(row[1:3] == rows[0][1:3] for row in rows):
            return
        (facts, here), *others = self._gather_objects((dict(self.facts), point))
        for other, (their_facts, there) in enumerate(others, start=1):
            found = first_difference(facts, their_facts)
            if found is not None:
                raise DifferenceError(DIFFERENT.format(other=other, **found))
            if there != here or rows[other][1] != rows[0][1]:
                raise DifferenceError(OUT_OF_STEP.format(other=other, here=here, there=there))

    # --- errors ---------------------------------------------------------------------------------------------------

    @contextmanager
    def sharing_errors(self, point: str) -> Iterator[None]:
        """Raise an error of one process within the block in all of them. The block must not communicate."""
        try:
            yield
        except Exception as error:
            self.share(error)
        self.numbers(point)

    def share(self, error: Exception) -> NoReturn:
        """Raise an error in this process and, by the next message or by a closed connection, in all others."""
        if self.size == 1 or isinstance(error, PeerError | DifferenceError) or hasattr(error, "is_shared"):
            raise error
        error.is_shared = True  # type: ignore[attr-defined]
        summary = f"process {self.rank} of {self.size} raised {type(error).__name__}: {error}"
        mine = Failure(summary, "".join(traceback.format_exception(error)))
        store = store_of(self.messages)
        try:
            if store is not None:
                store.compare_set(FAILURE, "", json.dumps(mine))
            self._gather(self._row("an error", (), failed=True), NOTIFY_TIMEOUT)
            first = next(failure for failure in self._gather_objects(mine) if failure is not None)
            if store is not None:
                store.delete_key(FAILURE)
        except RuntimeError as lost:
            first = first_failure(store) or mine
            if first != mine:  # this error is a consequence
                raise self._lost(lost) from error
            self.close()
            with suppress(RuntimeError):
                if store is not None:
                    store.wait([f"{FAILURE}/{k}" for k in range(self.size) if k != self.rank], READ_TIMEOUT)
        error.add_note(f"All {self.size} processes stop: {first.summary}")
        raise error

    def close(self) -> None:
        """Close the connections to the other processes, so that those that wait for this one raise an error.

        gloo closes the connections of a group if a receive operation times out.
        """
        others = [rank for rank in dist.get_process_group_ranks(self.messages) if rank != dist.get_rank()]
        for group in (self.messages, self.group):
            if "gloo" in dist.get_backend_config(group):
                with suppress(RuntimeError):
                    receiving: Any = dist.irecv(torch.empty(1, device="cpu"), others[0], group, CLOSING_TAG)
                    receiving.wait(timedelta(milliseconds=1))

    def _lost(self, cause: RuntimeError) -> PeerError:
        """Return the error to raise when messages can no longer be sent."""
        store = store_of(self.messages)
        failure = first_failure(store)
        if failure is not None:
            with suppress(RuntimeError):
                store.set(f"{FAILURE}/{self.rank}", "read")
        self.close()  # others may wait for this process
        return PeerError(PEER_LOST.format(lost=cause)) if failure is None else failure.as_error()


_MESSAGES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class Replicas(NamedTuple):
    """Setting of `VSGD`: how the processes of distributed training work together.

        VSGD(model.parameters(), distributed=Replicas(reduce_dtype=torch.bfloat16))

    Args:
        as_samples: whether each process leaves the gradient of its own part of the minibatch. Each part is then a
            sample, and VSGD averages the gradients. Otherwise gradients must be averaged already, as
            DistributedDataParallel and FSDP do, and the minibatch of all processes together is the sample.
        reduce_dtype: `torch.bfloat16` sends the moments of the samples in half the bytes of float32.
        process_group: the processes that train this model; default: all.
    """

    as_samples: bool = True
    reduce_dtype: torch.dtype | None = None
    process_group: Any = None


def processes_of(setting: Replicas) -> Processes:
    """Return the processes of distributed training, or this one alone without distributed training."""
    are_samples, reduce_dtype, group = setting
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) < 2:
        return Processes(group=None, messages=None, rank=0, size=1, are_samples=False)
    group = dist.group.WORLD if group is None else group
    if group not in _MESSAGES:
        ranks, store = dist.get_process_group_ranks(group), store_of(group)
        limit = None if store is None else store.timeout
        _MESSAGES[group] = dist.new_group(ranks, limit, backend="gloo", use_local_synchronization=True)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return Processes(group, _MESSAGES[group], rank, size, are_samples, reduce_dtype)


def raised_by_all(step: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of an optimizer: all processes raise the error of one."""

    @functools.wraps(step)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        opt: Any = args[0]
        try:
            return step(*args, **kwargs)
        except Exception as error:
            processes: Processes = opt.processes()
            processes.share(error)

    return call


def store_of(group: Any) -> Any:
    """Return the key-value store of a group; None where torch has no public access to it."""
    return group.get_group_store() if hasattr(group, "get_group_store") else None


def first_failure(store: Any) -> Failure | None:
    """Return the error of the first process that failed, if the process that holds the store still runs."""
    try:
        return Failure(*json.loads(store.get(FAILURE))) if store is not None and store.check([FAILURE]) else None
    except RuntimeError:
        return None


def first_difference(here: dict[str, Any], there: dict[str, Any]) -> dict[str, Any] | None:
    """Return name and values of the first fact that differs: `what`, `here` and `there` of the message `DIFFERENT`.

    Of a tuple it is one element, of a NamedTuple one field.
    """
    for name in {**here, **there}:
        one, other = here.get(name, "nothing"), there.get(name, "nothing")
        if repr(one) == repr(other):
            continue
        if type(one) is not type(other):
            if isinstance(one, tuple) and isinstance(other, tuple):
                one, other = type(one).__name__, type(other).__name__
        elif isinstance(one, tuple):
            if len(one) != len(other):
                name, one, other = f"the number of values of {name}", len(one), len(other)
            else:
                k = next(k for k, pair in enumerate(zip(one, other, strict=True)) if repr(pair[0]) != repr(pair[1]))
                fields = getattr(one, "_fields", None)
                name, one, other = f"{fields[k]} of {name}" if fields else f"{name} {k}", one[k], other[k]
        return {"what": name, "here": one, "there": other}
    return None
