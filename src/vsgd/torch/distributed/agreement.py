"""Evaluate closures in all processes together, and compare settings, weights, state and gradients between them.

Nothing here changes a parameter or its state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from vsgd.torch.devices import read_numbers
from vsgd.torch.distributed.messages import DifferenceError, Processes
from vsgd.torch.distributed.shards import holds_shards, is_sharded
from vsgd.torch.process import call_before_forward

if TYPE_CHECKING:
    from vsgd.torch.evaluation import Evaluation

NOT_AVERAGED = (
    "the gradients of process {other} are not those of process 0. Wrap the model in DistributedDataParallel, which "
    "averages them, or use VSGD(..., distributed=Replicas()), which averages them itself. If each process trains a "
    "model of its own, give it a group of its own: Replicas(as_samples=False, process_group=dist.new_group("
    "[dist.get_rank()], use_local_synchronization=True))."
)

ALREADY_AVERAGED = (
    "with distributed=Replicas() each process must leave its own gradient, but all have left the same one. If the "
    "model is wrapped in DistributedDataParallel, prevent that from averaging: "
    "model.register_comm_hook(None, vsgd.torch.local_gradients). Give each process its own part of the data."
)

MIXED_GRADIENTS = "parameter {index} has a sparse gradient in one process and a dense one in another; choose one"

KINDS = ("none", "dense", "sparse")
"""Kinds of gradients, for messages."""


STEP_FACTS = ("lr", "weight_decay", "steps_per_epoch", "algorithm", "maximize", "steps", "unprobed", "skipped_in_a_row")
"""Settings and counters of a group that are compared in every message."""

CONTENT_FACTS = ("skipped", "samples", "gradient_flops", "averaging", "progress")
"""Further numbers of a group that are compared in the first step and after changes."""


def facts_of(groups: Sequence[dict[str, Any]], state: Mapping[Tensor, Any]) -> dict[str, Any]:
    """Return what the processes compare in every message: settings, counters, and which parameters have state."""
    facts: dict[str, Any] = {"the number of groups": len(groups)}
    for k, group in enumerate(groups):
        values = {**group, "lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
        facts |= {f"{name} of group {k}": values[name] for name in STEP_FACTS}
        facts[f"the number of parameters of group {k}"] = len(group["params"])
    parameters = [parameter for group in groups for parameter in group["params"]]
    facts["the presence of state of parameter"] = tuple(bool(state.get(p)) for p in parameters)
    return facts


def contents_of(groups: Sequence[dict[str, Any]], state: Mapping[Tensor, Any]) -> dict[str, Any]:
    """Return what the processes compare in the first step and after changes: weights, state and running numbers."""
    parameters = [p for group in groups for p in group["params"] if not nn.parameter.is_lazy(p)]
    whole = [p for p in parameters if not is_sharded(p)]
    states = [[value for _, value in sorted(state.get(p, {}).items())] for p in whole]
    return {
        "the shape of parameter": tuple((tuple(p.shape), str(p.dtype)) for p in parameters),
        "the values of parameter": tuple(f"checksum {checksum([p]):08x}" for p in whole),
        "the state of parameter": tuple(f"checksum {checksum(each):08x}" for each in states),
        **{f"{name} of group {k}": group[name] for k, group in enumerate(groups) for name in CONTENT_FACTS},
    }


class Agreement:
    """Collects what the processes must have in common at the beginning of a step."""

    def __init__(self) -> None:
        self._is_compared = False
        """Whether weights and states have been compared since they were set from outside."""
        self._changes: list[Any] = []

    def add_changes(self, changes: Sequence[Any]) -> None:
        """Remember whether weights were set since the last step: for each block a bool, or a tensor on a device."""
        self._changes += changes

    def begin(
        self,
        processes: Processes,
        settings: dict[str, Any],
        groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, Any],
    ) -> Processes:
        """Return the processes with the facts that must be equal in all of them during a step."""
        changes, self._changes = self._changes, []
        if processes.size == 1:
            return processes
        is_compared = self._is_compared and not any(read_numbers(changes))
        facts = {**settings, **facts_of(groups, state)}
        facts["whether weights or state were set since the last step"] = not is_compared
        if not is_compared:
            facts |= contents_of(groups, state)
        processes = processes.with_facts(facts)
        if not is_compared:  # before a closure communicates in ways that depend on settings
            self._is_compared = False
            processes.numbers("start of the step")
            self._is_compared = True
        return processes


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of the bits of tensors; of a sparse one, of its indices and values."""
    total = 0
    for tensor in tensors:
        values = tensor.detach().coalesce() if tensor.is_sparse else tensor.detach()
        for part in (values.indices(), values.values()) if values.is_sparse else (values,):
            total = zlib.crc32(part.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data, total)
    return total


# --- evaluations ------------------------------------------------------------------------------------------------------


_BEFORE_FORWARD: ContextVar[Callable[[], None] | None] = ContextVar("vsgd_before_forward", default=None)
"""Function to call before a forward pass that waits for other processes."""


def communicates(module: nn.Module) -> bool:
    """Return whether a module waits for other processes in its forward pass."""
    if isinstance(module, DistributedDataParallel):
        return module.broadcast_buffers and next(module.buffers(), None) is not None
    return isinstance(module, nn.SyncBatchNorm) or holds_shards(module)


def exchange_before_forward(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    exchange = _BEFORE_FORWARD.get()
    if exchange is not None:
        parts = module.modules() if isinstance(getattr(module, "_orig_mod", None), nn.Module) else (module,)
        if any(map(communicates, parts)):
            exchange()


def evaluate_on_all_ranks(
    processes: Processes, evaluate: Callable[[], Evaluation], parameters: Sequence[Tensor]
) -> tuple[Evaluation, Processes]:
    """Evaluate a closure in all processes. A gradient that only other processes have is zero here.

    All processes raise the error of one. A process may wait for others inside the closure, in a forward pass that
    communicates or for averaged gradients. So all exchange a message before both, which reports errors.

    Args:
        processes: those that train the same model.
        evaluate: runs the closure and returns its evaluation.
        parameters: parameters of all groups.

    Returns:
        The evaluation of this process, and the processes. Unless gradients are samples, these have a new fact: which
        parameters have a gradient.
    """
    if processes.size == 1:
        return evaluate(), processes
    call_before_forward(exchange_before_forward)
    reached: set[str] = set()

    def exchange(point: str) -> None:
        if point not in reached:
            reached.add(point)
            processes.numbers(point)

    awaited = [] if processes.are_samples else [p for p in parameters if p.requires_grad and not is_sharded(p)]
    hook = register_multi_grad_hook(awaited, lambda grad: exchange("first gradient"), mode="any")
    token = _BEFORE_FORWARD.set(lambda: exchange("forward pass"))
    try:
        here = evaluate()
    except Exception as error:
        processes.share(error)
    finally:
        _BEFORE_FORWARD.reset(token)
        hook.remove()
    if awaited:
        exchange("first gradient")
    kinds = [1 + here.grads[p].is_sparse if p in here.grads else 0 for p in parameters]
    if processes.are_samples:
        return here._replace(grads=gradients_of_any(processes, here.grads, parameters, kinds)), processes
    processes = processes.with_facts({"the gradient of parameter": tuple(KINDS[kind] for kind in kinds)})
    if not awaited:
        processes.numbers("end of an evaluation")
    return here, processes


def gradients_of_any(
    processes: Processes, grads: dict[Tensor, Tensor], parameters: Sequence[Tensor], kinds: list[int]
) -> dict[Tensor, Tensor]:
    """Return a gradient of each parameter that has one in any process; zeros where this process has none.

    `kinds` are indices into `KINDS`, of the gradient of each parameter in this process.
    """
    found, _ = processes.gather_kinds("end of an evaluation", kinds)
    result: dict[Tensor, Tensor] = {}
    for index, (parameter, found_kinds) in enumerate(zip(parameters, found, strict=True)):
        if found_kinds >= {1, 2}:
            raise DifferenceError(MIXED_GRADIENTS.format(index=index))
        if max(found_kinds):
            grad = grads.get(parameter)
            result[parameter] = zero_gradient(parameter, 2 in found_kinds) if grad is None else grad
    return result


def zero_gradient(parameter: Tensor, sparse: bool) -> Tensor:
    """Return a gradient of zeros. A sparse one has no rows."""
    if not sparse:
        return torch.zeros_like(parameter)
    rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(rows, values, parameter.shape, device=parameter.device)


def reduce_checks(processes: Processes, first: list[Evaluation], usable: bool, probing: bool) -> tuple[bool, bool]:
    """Replace the losses of `first` by their mean over all evaluations and processes.

    Returns:
        Whether the numbers are usable in all processes, and whether any process wants to probe.
    """
    if processes.size == 1:
        return usable, probing
    loss = float(torch.stack([evaluation.loss for evaluation in first]).mean())
    rows = processes.numbers("check of the numbers", usable, probing, loss)
    mean = first[0].loss.new_tensor(sum(row[2] for row in rows) / processes.size)
    first[:] = [evaluation._replace(loss=mean) for evaluation in first]
    return all(row[0] for row in rows), any(row[1] for row in rows)


def check_averaged(processes: Processes, evaluation: Evaluation) -> None:
    """Raise DifferenceError if gradients should be averaged and are not, or should not be and are."""
    if processes.size == 1 or any(map(is_sharded, evaluation.grads)):
        return
    sums = [row[0] for row in processes.numbers("checksums of gradients", checksum(list(evaluation.grads.values())))]
    if not processes.are_samples:
        other = next((k for k, each in enumerate(sums) if each != sums[0]), None)
        if other is not None:
            raise DifferenceError(NOT_AVERAGED.format(other=other))
    elif len(set(sums)) == 1 and any(bool(grad.norm() != 0) for grad in evaluation.grads.values()):
        raise DifferenceError(ALREADY_AVERAGED)
