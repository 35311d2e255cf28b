"""PyTorch: an optimizer with no learning rate to choose."""

from vsgd.errors import needs_extra

with needs_extra("vsgd.torch", "torch"):
    from vsgd.torch.closure import is_probing
    from vsgd.torch.diagnostics import Diagnosis, TensorBoard, plot
    from vsgd.torch.optimizer import VSGD

__all__ = ["VSGD", "Diagnosis", "TensorBoard", "is_probing", "plot"]
