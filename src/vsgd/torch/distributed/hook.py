"""A communication hook for DistributedDataParallel, which reads its annotations and so needs them as types."""

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]


def local_gradients(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Let DistributedDataParallel leave each process its own gradient, as `VSGD(..., distributed=Replicas())` needs it.

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, vsgd.torch.local_gradients)

    Args:
        state: not used.
        bucket: gradients of this process, which stay as they are.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
