"""Other processes that train the same model: what they tell each other, so that all take the same step.

Every process evaluates its own part of the minibatch. All decisions of a step follow from numbers that are equal in all
processes, so that collectives always pair up. Nothing outside this module and `statistics` knows of other processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from vsgd.torch.closure import Evaluation
from vsgd.torch.shards import is_sharded

OTHER_MODEL = (
    "process {other} does not have the same {what} as process 0, so the processes cannot train one model. Build the "
    "model from the same seed, or wrap it in DistributedDataParallel, which copies the weights of process 0; resume "
    "all processes from the same checkpoint."
)

NOT_AVERAGED = (
    "the gradients of process {other} are not those of process 0. Wrap the model in DistributedDataParallel, which "
    'averages them, or say VSGD(..., samples="replicas"), which averages them itself. For processes that train models '
    "of their own: VSGD(..., process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True))."
)

ALREADY_AVERAGED = (
    'with samples="replicas" each process must leave its own gradient, but all have left the same one. If the '
    "model is wrapped in DistributedDataParallel, let that not average: "
    "model.register_comm_hook(None, vsgd.torch.local_gradients). Give each process its own part of the data."
)

OTHER_CLOSURES = "the processes gave different numbers of micro-batches ({counts}); give each as many closures"

OTHER_GRADIENTS = (
    "parameter {index} has a {kinds} gradient in different processes; it must be dense in all, or sparse in all, and "
    "under DistributedDataParallel every process must have one"
)

KINDS = ("no", "dense", "sparse")

PEER_LOST = "another process has ended or does not answer, look at its error: {lost}"

FAILURE = "vsgd/failure"
"""The key under which the first process that fails leaves its error for those it cannot reach."""

NOTIFY_TIMEOUT = timedelta(seconds=10)
"""How long a process that has failed waits for the others to take notice. They may wait elsewhere, for its gradient."""


class PeerError(RuntimeError):
    """Another process has failed."""


class Replicas(NamedTuple):
    """The processes that train one model, seen from one of them, which may be the only one."""

    group: Any
    messages: Any
    """The same processes, for short messages: these wait for no device, and meet no collective of a closure."""
    rank: int
    size: int
    are_samples: bool
    """Does each process leave its own gradient, which is a sample? Otherwise they come averaged."""
    reduce_dtype: torch.dtype | None = None
    """The precision in which moments of the samples are sent; None: that of the sums."""

    def gather_rows(self, values: Tensor) -> list[Tensor]:
        """Tensors of all processes that differ in their length."""
        lengths = [int(row[0]) for row in self.numbers(len(values))]
        dtype = self.reduce_dtype if values.is_floating_point() else None
        padded = values.new_zeros(max(lengths), *values.shape[1:], dtype=dtype)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:length].to(values.dtype) for part, length in zip(parts, lengths, strict=True)]

    def add_up(self, values: Tensor) -> None:
        """The sum over all processes, in place."""
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

    def numbers(self, *values: float, timeout: timedelta = timedelta()) -> list[list[float]]:
        """A few numbers of each process. Zero is the timeout of the group."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return [mine.tolist()]
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.messages, async_op=True).wait(timeout)
        return [part.tolist() for part in parts]

    def mean(self, value: float) -> float:
        return sum(row[0] for row in self.numbers(value)) / self.size

    def all(self, value: bool) -> bool:
        return all(row[0] for row in self.numbers(value))

    def any(self, value: bool) -> bool:
        return any(row[0] for row in self.numbers(value))

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """An error of one process within is an error of all. There must be no other communication within."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.numbers_unless_failed(error)

    def numbers_unless_failed(self, error: Exception | None, *values: float) -> list[list[float]]:
        """A few numbers of each process. If one has an error, all raise it."""
        store = store_of(self.messages)
        mine = None if error is None else f"process {self.rank} of {self.size} raised {type(error).__name__}: {error}"
        try:
            if mine is not None and store is not None:
                store.compare_set(FAILURE, "", mine)
            rows = self.numbers(mine is not None, *values, timeout=NOTIFY_TIMEOUT if mine else timedelta())
            if not any(row[0] for row in rows):
                return [row[1:] for row in rows]
            texts: list[str | None] = [None] * self.size
            dist.all_gather_object(texts, mine, group=self.messages)
            if mine is not None and store is not None:
                store.delete_key(FAILURE)
        except RuntimeError as lost:
            texts = [first_failure(store) or mine]
            if error is None or texts != [mine]:
                raise PeerError(texts[0] or PEER_LOST.format(lost=lost)) from (error or lost)
        first = next(text for text in texts if text is not None)
        if error is None:
            raise PeerError(first)
        error.add_note(f"All {self.size} processes stop: {first}")
        raise error


ALONE = Replicas(group=None, messages=None, rank=0, size=1, are_samples=False)

_MESSAGES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def replicas_of(group: Any, are_samples: bool, reduce_dtype: torch.dtype | None) -> Replicas:
    """The processes of a group, or all there are."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) < 2:
        return ALONE
    group = dist.group.WORLD if group is None else group
    if group not in _MESSAGES:
        ranks, store = dist.get_process_group_ranks(group), store_of(group)
        limit = None if store is None else store.timeout
        _MESSAGES[group] = dist.new_group(ranks, limit, backend="gloo", use_local_synchronization=True)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return Replicas(group, _MESSAGES[group], rank, size, are_samples, reduce_dtype)


def store_of(group: Any) -> Any:
    """Where the processes of a group leave texts for each other; None where torch has no public way to it."""
    return group.get_group_store() if hasattr(group, "get_group_store") else None


def first_failure(store: Any) -> str | None:
    """What the first process that failed has left, if the process that keeps the store still runs."""
    try:
        return store.get(FAILURE).decode() if store is not None and store.check([FAILURE]) else None
    except RuntimeError:
        return None


def checksum(tensors: Sequence[Tensor]) -> int:
    """Of the bits of tensors."""
    total = 0
    for tensor in tensors:
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        total = zlib.crc32(dense.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data, total)
    return total


def check_models(replicas: Replicas, parameters: Sequence[Tensor], steps: int) -> None:
    """Refuse processes that do not hold the same model, or are not equally far."""
    if replicas.size == 1:
        return
    known = [p for p in parameters if not nn.parameter.is_lazy(p)]
    whole = [p for p in known if not is_sharded(p)]
    shapes = zlib.crc32(repr([(tuple(p.shape), str(p.dtype)) for p in known]).encode())
    facts = {"shapes of parameters": shapes, "parameters": checksum(whole), "number of steps": steps}
    check_same(replicas, list(facts.values()), [OTHER_MODEL.format(what=what, other="{other}") for what in facts])


def check_averaged(replicas: Replicas, evaluation: Evaluation) -> None:
    """Refuse gradients that should be averaged and are not, or should not be and are."""
    if replicas.size == 1 or any(map(is_sharded, evaluation.grads)):
        return
    sums = [row[0] for row in replicas.numbers(checksum(list(evaluation.grads.values())))]
    if not replicas.are_samples:
        check_same(replicas, [int(sums[replicas.rank])], [NOT_AVERAGED])
    elif len(set(sums)) == 1 and any(bool(grad.norm() != 0) for grad in evaluation.grads.values()):
        raise RuntimeError(ALREADY_AVERAGED)


def check_same(replicas: Replicas, values: Sequence[int], messages: Sequence[str]) -> None:
    """Whole numbers that must be the same in all processes, each with what to say otherwise."""
    rows = replicas.numbers(*values)
    for k, message in enumerate(messages):
        for other, row in enumerate(rows):
            if row[k] != rows[0][k]:
                raise RuntimeError(message.format(other=other))


def agreed(
    replicas: Replicas,
    run: Callable[[], Any],
    evaluate: Callable[[Callable[[], Any]], Evaluation],
    parameters: Sequence[Tensor],
    closures: int,
) -> Evaluation:
    """An evaluation with the mean loss of all processes. Where only others have a gradient this one has zeros.

    An error of one process is raised by all. Gradients that come averaged are waited for inside the closure, so
    the processes ask each other for errors before they send the first of them.
    """
    if replicas.size == 1:
        return evaluate(run)
    asked = replicas.are_samples

    def ask(error: Exception | None = None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            replicas.numbers_unless_failed(error)

    error, here = None, None
    awaited = [] if asked else [p for p in parameters if p.requires_grad and not is_sharded(p)]
    hook = register_multi_grad_hook(awaited, lambda grad: ask(), mode="any")
    try:
        here = evaluate(run)
    except PeerError:
        raise
    except Exception as caught:
        error = caught
    finally:
        hook.remove()
    ask(error)
    grads = {} if here is None else here.grads
    kinds = [1 + grads[p].is_sparse if p in grads else 0 for p in parameters]
    loss = 0.0 if here is None else float(here.loss)
    rows = replicas.numbers_unless_failed(error, closures, loss, *kinds)
    counts, losses, *columns = zip(*rows, strict=True)
    assert here is not None
    if len(set(counts)) > 1:
        raise RuntimeError(OTHER_CLOSURES.format(counts=", ".join(f"{count:.0f}" for count in counts)))
    everywhere: dict[Tensor, Tensor] = {}
    for index, (parameter, column) in enumerate(zip(parameters, columns, strict=True)):
        found = {int(kind) for kind in column}
        if found >= {1, 2} or (len(found) > 1 and not replicas.are_samples):
            raise RuntimeError(OTHER_GRADIENTS.format(index=index, kinds=" or ".join(KINDS[k] for k in sorted(found))))
        if max(found):
            everywhere[parameter] = grads[parameter] if parameter in grads else no_gradient(parameter, 2 in found)
    return here._replace(loss=here.loss.new_tensor(sum(losses) / replicas.size), grads=everywhere)


def no_gradient(parameter: Tensor, sparse: bool) -> Tensor:
    """What a process leaves that has not used a parameter."""
    if not sparse:
        return torch.zeros_like(parameter)
    rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(rows, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape)
