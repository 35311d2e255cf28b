"""Other processes that train the same model. Only this package imports `torch.distributed`."""

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]


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
