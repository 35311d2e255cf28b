"""PyTorch: an optimizer with no learning rate to choose."""

from vsgd.errors import needs_extra

with needs_extra("vsgd.torch", "torch"):
    from vsgd.torch.batch_size import BatchSizer
    from vsgd.torch.closure import is_probing
    from vsgd.torch.comm_hook import local_gradients
    from vsgd.torch.diagnostics import Diagnosis, TensorBoard, plot
    from vsgd.torch.optimizer import VSGD

__all__ = ["VSGD", "BatchSizer", "Diagnosis", "TensorBoard", "is_probing", "local_gradients", "plot"]
