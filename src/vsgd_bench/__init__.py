"""Experiments: test problems, simulations, the figures of the paper, and comparisons with other optimizers."""
