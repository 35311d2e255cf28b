"""Solve the heat equation with a physics-informed network: vSGD against AdamW.

python examples/pinn.py --seeds 5

The equation is u_t = 0.1 u_xx for x and t in [0, 1], with u(x, 0) = sin(πx) + sin(3πx) / 2 and u = 0 at both ends.
"""

from __future__ import annotations

import math

import torch
from against_adamw import RATES, Batch, Task, arguments, compare
from torch import Tensor, nn

DIFFUSION, STEPS, POINTS = 0.1, 800, 128


def solution(x: Tensor, t: Tensor) -> Tensor:
    """Return the exact solution."""

    def mode(k: int) -> Tensor:
        return torch.sin(k * math.pi * x) * torch.exp(-DIFFUSION * (k * math.pi) ** 2 * t)

    return mode(1) + mode(3) / 2


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared residual of the equation plus that of initial and boundary values."""
    x, t, edge = batch
    x, t = x.requires_grad_(), t.requires_grad_()
    u = model(torch.stack([x, t], dim=1))[:, 0]
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    initial = model(torch.stack([x.detach(), torch.zeros_like(t)], dim=1))[:, 0]
    boundary = model(torch.stack([edge, t.detach()], dim=1))[:, 0]
    residual = (u_t - DIFFUSION * u_xx).square().mean()
    return residual + (initial - solution(x.detach(), torch.zeros_like(t))).square().mean() + boundary.square().mean()


@torch.no_grad()
def error(model: nn.Module) -> float:
    """Return the relative L2 error of the network on a grid."""
    x, t = (
        axis.flatten() for axis in torch.meshgrid(torch.linspace(0, 1, 50), torch.linspace(0, 1, 50), indexing="ij")
    )
    exact = solution(x, t)
    return ((model(torch.stack([x, t], dim=1))[:, 0] - exact).norm() / exact.norm()).item()


def make(seed: int) -> Task:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    batches = [(torch.rand(POINTS), torch.rand(POINTS), torch.randint(2, (POINTS,)).float()) for _ in range(STEPS)]
    return Task(model, batches, loss, error)


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    compare(f"Heat equation, {STEPS} updates, relative L2 error", make, options.seeds, (*RATES, 0.3))
