"""Other processes that train the same model: what they tell each other, so that all take the same step.

Every process evaluates its own part of the minibatch. All decisions of a step follow from numbers that are equal in all
processes, so that collectives always pair up. Nothing outside this module and `statistics` knows of other processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    'with samples="replicas" each process must leave its own gradient, but all have left the same one. Do not wrap the '
    "model in DistributedDataParallel, or take the step within `with model.no_sync():`; and give each process its own "
    "part of the data."
)

OTHER_CLOSURES = "the processes gave different numbers of micro-batches ({counts}); give each as many closures"

OTHER_GRADIENTS = (
    "parameter {index} has a {kinds} gradient in different processes; it must be dense in all, or sparse in all, and "
    "under DistributedDataParallel every process must have one"
)

KINDS = ("no", "dense", "sparse")

PEER_FAILED = "If another process failed first, this one was left alone with it: look at the error of the other."


class Replicas(NamedTuple):
    """The processes that train one model, seen from one of them, which may be the only one."""

    group: Any
    rank: int
    size: int
    device: torch.device
    """Where short messages are made up: the backend must be able to send them."""
    are_samples: bool
    """Does each process leave its own gradient, which is a sample? Otherwise they come averaged."""

    def gather(self, values: Tensor) -> Tensor:
        """The same tensor of all processes, stacked."""
        if self.size == 1:
            return values[None]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)

    def gather_rows(self, values: Tensor) -> list[Tensor]:
        """Tensors of all processes that differ in their length."""
        lengths = self.gather(torch.tensor([len(values)], device=self.device))[:, 0].tolist()
        padded = values.new_zeros(max(lengths), *values.shape[1:])
        padded[: len(values)] = values
        return [part[:length] for part, length in zip(self.gather(padded), lengths, strict=True)]

    def add_up(self, values: Tensor) -> None:
        """The sum over all processes, in place."""
        dist.all_reduce(values, group=self.group)

    def numbers(self, *values: float) -> list[list[float]]:
        """A few numbers of each process."""
        mine = torch.tensor(values, dtype=torch.float32 if self.device.type == "mps" else torch.float64)
        rows: list[list[float]] = self.gather(mine.to(self.device)).tolist()
        return rows

    def mean(self, value: float) -> float:
        return sum(row[0] for row in self.numbers(value)) / self.size

    def all(self, value: bool) -> bool:
        return all(row[0] for row in self.numbers(value))

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
        self.raise_any(error, [row[0] for row in self.numbers(error is not None)])

    def raise_any(self, error: Exception | None, failed: Sequence[float]) -> None:
        """Raise the error of this process, or tell of the first process that `failed`."""
        if any(failed):
            texts: list[str | None] = [None] * self.size
            text = None if error is None else f"{type(error).__name__}: {error}"
            dist.all_gather_object(texts, text, group=self.group)
            first = next(k for k, flag in enumerate(failed) if flag)
            told = f"process {first} of {self.size} raised {texts[first]}"
            if error is None:
                raise RuntimeError(told)
            error.add_note(f"All {self.size} processes stop: {told}")
            raise error


ALONE = Replicas(group=None, rank=0, size=1, device=torch.device("cpu"), are_samples=False)


def replicas_of(group: Any, parameters: Sequence[Tensor], are_samples: bool) -> Replicas:
    """The processes of a group, or all there are."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) < 2:
        return ALONE
    return Replicas(group, dist.get_rank(group), dist.get_world_size(group), parameters[0].device, are_samples)


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

    An error of one process is raised by all. Gradients that come averaged are the exception: the others then wait
    inside the closure, and end when the process does that failed.
    """
    if replicas.size == 1:
        return evaluate(run)
    finished, error, here = False, None, None

    def closure() -> Any:
        nonlocal finished
        loss = run()
        finished = True
        return loss

    try:
        here = evaluate(closure)
    except Exception as caught:
        if not finished and not replicas.are_samples:
            if isinstance(caught, RuntimeError):
                caught.add_note(PEER_FAILED)
            raise
        error = caught
    grads = {} if here is None else here.grads
    kinds = [1 + grads[p].is_sparse if p in grads else 0 for p in parameters]
    loss = 0.0 if here is None else float(here.loss)
    failed, counts, losses, *columns = zip(*replicas.numbers(error is not None, closures, loss, *kinds), strict=True)
    replicas.raise_any(error, failed)
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
