"""vSGD for PyTorch."""
