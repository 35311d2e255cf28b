"""`vsgd compare`: optimizers on real networks, side by side."""
