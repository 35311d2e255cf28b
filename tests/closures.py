"""What `opt.step` is given."""

from __future__ import annotations


def closure_of(opt, loss_of):
    """Clears gradients, takes those of `loss_of()` and returns the loss."""

    def closure():
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return closure
