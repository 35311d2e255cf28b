"""PyTorch: an optimizer with no learning rate to choose."""

from vsgd.errors import needs_extra

with needs_extra("vsgd.torch", "torch"):
    from vsgd.torch.diagnostics import Diagnosis, TensorBoard, plot
    from vsgd.torch.distributed import local_gradients
    from vsgd.torch.distributed.messages import Replicas
    from vsgd.torch.noise import BatchSizer
    from vsgd.torch.optimizer import VSGD
    from vsgd.torch.replay import is_probing
    from vsgd.torch.settings import Rows

__all__ = [
    "VSGD",
    "BatchSizer",
    "Diagnosis",
    "Replicas",
    "Rows",
    "TensorBoard",
    "is_probing",
    "local_gradients",
    "plot",
]
