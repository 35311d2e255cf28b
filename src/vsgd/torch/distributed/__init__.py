"""Other processes that train the same model. Only this package imports `torch.distributed`."""

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from vsgd.torch.distributed.agreement import Agreement, check_averaged, evaluate_on_all_ranks, reduce_checks
from vsgd.torch.distributed.messages import (
    ALONE,
    AVERAGED,
    DifferenceError,
    PeerError,
    Processes,
    Replicas,
    check_replicas,
    processes_of,
    raised_by_all,
)
from vsgd.torch.distributed.shards import (
    Shards,
    check_sharding,
    is_sharded,
    key_of,
    like,
    local_of,
    shards_of,
    summed,
)

__all__ = [
    "ALONE",
    "AVERAGED",
    "Agreement",
    "DifferenceError",
    "PeerError",
    "Processes",
    "Replicas",
    "Shards",
    "check_averaged",
    "check_replicas",
    "check_sharding",
    "evaluate_on_all_ranks",
    "is_sharded",
    "key_of",
    "like",
    "local_gradients",
    "local_of",
    "processes_of",
    "raised_by_all",
    "reduce_checks",
    "shards_of",
    "summed",
]


# DistributedDataParallel reads the annotations of a hook, and needs types
def local_gradients(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the gradients of this process: a hook that prevents DistributedDataParallel from averaging them.

    `VSGD(..., distributed=Replicas())` needs the gradient of each process.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, vsgd.torch.local_gradients)

    Args:
        state: not used.
        bucket: gradients of this process.

    Returns:
        A future with these gradients.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
