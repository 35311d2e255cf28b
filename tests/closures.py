"""Closures for `opt.step`."""

from __future__ import annotations


def closure_of(opt, loss_of):
    """Return a closure that clears gradients, computes those of `loss_of()` and returns the loss."""

    def closure():
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return closure
