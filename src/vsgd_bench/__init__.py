"""Test problems, opponents, simulations and the figures they give."""
