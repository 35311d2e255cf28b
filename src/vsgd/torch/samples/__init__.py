"""Sums over the samples of a minibatch, per coordinate."""
