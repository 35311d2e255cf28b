"""The suite "science": problems other than images and text. Data are generated from the seed. Each run takes seconds.

The held-out loss is that of the quantity of interest, without noise. If training minimizes another loss, a column of
the targets selects the loss of each row.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsgd_bench.compare import data, networks
from vsgd_bench.compare.data import Split
from vsgd_bench.compare.workloads import Task, Workload


def smooth_mlp(*widths: int) -> nn.Sequential:
    """Return linear layers with tanh between them, so that all derivatives exist."""
    layers = [module for a, b in itertools.pairwise(widths) for module in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def gradient(output: Tensor, x: Tensor) -> Tensor:
    """Return the derivative of the output of each row with respect to its inputs."""
    (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return found


# --- physics-informed network -------------------------------------------------------------------------------------

MODES = 3
BOUNDARY_WEIGHT = 30.0


class Potential(nn.Module):
    """A function u of the plane; `forward` returns u and its Laplacian."""

    def __init__(self) -> None:
        super().__init__()
        self.net = smooth_mlp(2, 40, 40, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.net(x).squeeze(1)
            slope = gradient(u, x)
            laplacian = gradient(slope[:, 0], x)[:, 0] + gradient(slope[:, 1], x)[:, 1]
            return torch.stack([u, laplacian], 1)


def weighted_squares(output: Tensor, target: Tensor) -> Tensor:
    """Return the weighted squared error. Columns of the target: u, its weight, the Laplacian, its weight."""
    u, weight, laplacian, laplacian_weight = target.unbind(1)
    errors = weight * (output[:, 0] - u).square() + laplacian_weight * (output[:, 1] - laplacian).square()
    return errors.mean()


def poisson(seed: int, sparse: bool) -> Task:
    """Solve Δu = f on the unit square with u = 0 on its boundary. The held-out loss is the error of u."""
    rng = torch.Generator().manual_seed(seed)
    weights = torch.randn(MODES, MODES, generator=rng)
    k = math.pi * torch.arange(1, MODES + 1)

    def rows(points: Tensor, weight: float, laplacian_weight: float) -> Tensor:
        waves = torch.sin(points[:, 0:1, None] * k[:, None]) * torch.sin(points[:, 1:2, None] * k)
        u, laplacian = (waves * weights).sum((1, 2)), -(waves * weights * (k[:, None] ** 2 + k**2)).sum((1, 2))
        scale = weights.square().sum().sqrt() / 2  # RMS of u over the square
        parts = (u / scale, torch.full_like(u, weight), laplacian / scale, torch.full_like(u, laplacian_weight))
        return torch.stack(parts, 1)

    inside, held_out = torch.rand(400, 2, generator=rng), torch.rand(1000, 2, generator=rng)
    edge = torch.rand(100, 2, generator=rng)
    edge[torch.arange(100), torch.arange(100) % 2] = (torch.arange(100) % 4 < 2).float()
    x = torch.cat([inside, edge])
    y = torch.cat([rows(inside, 0.0, 1 / 50), rows(edge, BOUNDARY_WEIGHT, 0.0)])
    return Task(Potential(), Split(x, y, held_out, rows(held_out, 1.0, 0.0)), weighted_squares)


# --- coordinate network -------------------------------------------------------------------------------------------


class Siren(nn.Module):
    """A network of sines with the initialization of Sitzmann et al. (2020)."""

    def __init__(self, width: int = 64, depth: int = 3, frequency: float = 15.0):
        super().__init__()
        self.frequency = frequency
        self.layers = nn.ModuleList([nn.Linear(2, width), *(nn.Linear(width, width) for _ in range(depth - 1))])
        self.read = nn.Linear(width, 1)
        with torch.no_grad():
            for k, weight in enumerate(p for p in self.layers.parameters() if p.dim() == 2):
                bound = 1 / 2 if k == 0 else math.sqrt(6 / width) / frequency
                weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(self.frequency * layer(x))
        gray: Tensor = self.read(x).squeeze(1)
        return gray


def siren(seed: int, sparse: bool) -> Task:
    """Fit an image of rings, stripes and a disc. The held-out rows are other pixels."""
    rng = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(5000, 2, generator=rng) - 1
    middle, angle = 0.6 * torch.rand(2, generator=rng) - 0.3, math.pi * torch.rand((), generator=rng)
    radius = (x - middle).norm(dim=1)
    stripes = torch.sin(12 * (x[:, 0] * angle.cos() + x[:, 1] * angle.sin()))
    gray = 0.5 * torch.cos(14 * radius) + 0.3 * stripes + 0.4 * (radius < 0.4).float()
    return Task(Siren(), data.shuffled(x, gray, seed), F.mse_loss)


# --- Hamiltonian network ------------------------------------------------------------------------------------------


class Hamiltonian(nn.Module):
    """A learned energy (Greydanus et al. 2019); `forward` returns the time derivatives of positions and momenta."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = smooth_mlp(4, 64, 64, 1)

    def forward(self, state: Tensor) -> Tensor:
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            slope = gradient(self.energy(state), state)
            return torch.cat([slope[:, 2:], -slope[:, :2]], 1)


def hamiltonian(seed: int, sparse: bool) -> Task:
    """Learn two pendulums coupled by a spring from noisy derivatives. The held-out derivatives are exact."""
    rng = torch.Generator().manual_seed(seed)
    q, p = 4 * torch.rand(2500, 2, generator=rng) - 2, 2 * torch.rand(2500, 2, generator=rng) - 1
    force = -2 * torch.sin(q) - (q - q.flip(1))
    split = data.shuffled(torch.cat([q, p], 1), torch.cat([p, force], 1), seed)
    noise = 0.05 * torch.randn(split.y.shape, generator=rng)
    return Task(Hamiltonian(), split._replace(y=split.y + noise), F.mse_loss)


# --- graph network ------------------------------------------------------------------------------------------------

ATOMS, KINDS, SHELLS = 6, 3, 12


class Molecule(nn.Module):
    """Message passing over distances. The energy is invariant to translation, rotation and order of atoms."""

    shells: Tensor

    def __init__(self, width: int = 24):
        super().__init__()
        self.embed = nn.Embedding(KINDS, width)
        self.register_buffer("shells", torch.linspace(0.5, 4.0, SHELLS))
        self.filters = nn.ModuleList(nn.Linear(SHELLS, width) for _ in range(2))
        self.mix = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(2))
        self.read = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, atoms: Tensor) -> Tensor:
        places, kinds = atoms[..., :3], atoms[..., 3].long()
        others = 1 - torch.eye(ATOMS)
        distances = ((places[:, :, None] - places[:, None]).square().sum(-1) + 1 - others).sqrt()
        shells = torch.exp(-4 * (distances[..., None] - self.shells).square()) * others[..., None]
        x = self.embed(kinds)
        for weigh, mix in zip(self.filters, self.mix, strict=True):
            x = x + mix((weigh(shells) * x[:, None]).sum(2))
        energy: Tensor = self.read(x).sum((1, 2))
        return energy


def molecules(seed: int, sparse: bool) -> Task:
    """Learn the energy of random clusters of three kinds of atoms, a sum of Morse potentials."""
    rng = torch.Generator().manual_seed(seed)
    count = 2000
    corners = torch.tensor([[i, j, k] for i in (0.0, 1.0) for j in (0.0, 1.0) for k in (0.0, 1.0)])
    order = torch.rand(count, 8, generator=rng).argsort(1)[:, :ATOMS]
    places = 1.5 * corners[order] + 0.25 * torch.randn(count, ATOMS, 3, generator=rng)
    kinds = torch.randint(KINDS, (count, ATOMS), generator=rng)
    size, depth = torch.tensor([0.5, 0.65, 0.8]), torch.tensor([1.0, 0.6, 0.8])
    first, second = torch.triu_indices(ATOMS, ATOMS, 1)
    distances = (places[:, first] - places[:, second]).norm(dim=2)
    stretch = 1 - torch.exp(-1.5 * (distances - size[kinds[:, first]] - size[kinds[:, second]]))
    energies = (depth[kinds[:, first]] * depth[kinds[:, second]] * (stretch.clamp(min=-3).square() - 1)).sum(1)
    x = torch.cat([places, kinds[..., None].float()], 2)
    return Task(Molecule(), data.shuffled(x, (energies - energies.mean()) / energies.std(), seed), F.mse_loss)


# --- inverse problem ----------------------------------------------------------------------------------------------

CELLS, HEAT_STEPS, HEAT_STEP = 32, 8, 0.4


class Rod(nn.Module):
    """A rod of unknown conductivity; `forward` returns temperatures after `HEAT_STEPS` implicit time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.log_conductivity = nn.Parameter(torch.zeros(CELLS - 1))

    def forward(self, before: Tensor) -> Tensor:
        flow = self.log_conductivity.exp()
        left, right = torch.arange(CELLS - 1), torch.arange(1, CELLS)
        between = torch.zeros(CELLS, CELLS).index_put((left, right), flow)
        between = between + between.T
        step = torch.eye(CELLS) + HEAT_STEP * (torch.diag(between.sum(1)) - between)
        after: Tensor = before @ torch.linalg.matrix_power(torch.linalg.inv(step), HEAT_STEPS)
        return after


def rod(seed: int, sparse: bool) -> Task:
    """Identify the conductivity of a rod from noisy measurements. The held-out measurements have no noise."""
    rng = torch.Generator().manual_seed(seed)
    truth = Rod()
    with torch.no_grad():
        steps = torch.randn(CELLS - 1, generator=rng).cumsum(0)
        truth.log_conductivity.copy_(1.5 * (steps - steps.mean()) / steps.std())
        before = torch.randn(1500, CELLS, generator=rng)
        split = data.shuffled(before, truth(before), seed)
    return Task(Rod(), split._replace(y=split.y + 0.1 * torch.randn(split.y.shape, generator=rng)), F.mse_loss)


# --- tabular regression -------------------------------------------------------------------------------------------


def heavy_tails(seed: int, sparse: bool) -> Task:
    """Fit a table with absolute loss. Columns and noise are t-distributed with two degrees of freedom.

    The held-out rows have no noise.
    """
    rng = torch.Generator().manual_seed(seed)

    def student(*shape: int) -> Tensor:
        chi = torch.randn(*shape, 2, generator=rng).square().mean(-1)
        return torch.randn(*shape, generator=rng) / chi.sqrt()

    x = student(5000, 12).clamp(-30, 30)
    y = torch.tanh(x[:, 0] * x[:, 1]) + x[:, 2].abs().sqrt() + torch.where(x[:, 3] > 0, x[:, 4].tanh(), 0.5)
    split = data.shuffled(x, y, seed)
    split = data.standardized(split._replace(y=split.y + 0.3 * student(len(split.y))))
    return Task(nn.Sequential(networks.mlp(12, 64, 64, 1), nn.Flatten(0)), split, F.l1_loss)


# --- reinforcement learning ---------------------------------------------------------------------------------------

DISCOUNT = 0.95
EPISODE = 120


def cart_pole(state: Tensor, force: Tensor) -> Tensor:
    """Return the state of the classic cart-pole problem after 0.04 seconds (Barto, Sutton & Anderson 1983)."""
    x, speed, angle, turn = state.unbind(1)
    push = (force + 0.05 * turn.square() * angle.sin()) / 1.1
    turning = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
    moving = push - 0.05 * turning * angle.cos() / 1.1
    step = 0.04
    return torch.stack([x + step * speed, speed + step * moving, angle + step * turn, turn + step * turning], 1)


class Value(nn.Module):
    """A value function; `forward` returns the values of a state and of the next state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = networks.mlp(4, 64, 64, 1)

    def forward(self, states: Tensor) -> Tensor:
        values: Tensor = self.net(states.flatten(0, 1)).view(-1, 2)
        return values


def temporal_difference(values: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of the value: to a one-step target in training, to the return on held-out rows.

    Columns of the target: the reward, the discount of the next value, the return, whether to use the return.
    """
    reward, discount, total, use_return = target.unbind(1)
    goal = torch.where(use_return > 0, total, reward + discount * values[:, 1].detach())
    return F.mse_loss(values[:, 0], goal)


def value_learning(seed: int, sparse: bool) -> Task:
    """Learn the values of a weak cart-pole controller from a fixed buffer. Held-out targets are returns."""
    rng = torch.Generator().manual_seed(seed)
    episodes = 150
    state = torch.randn(episodes, 4, generator=rng) * torch.tensor([0.5, 0.5, 0.1, 0.5])
    states, alive = [state], [torch.ones(episodes)]
    for _ in range(EPISODE):
        force = 10 * torch.tanh(state @ torch.tensor([0.0, 0.0, 2.0, 0.5]))
        state = cart_pole(state, force)
        up = (state[:, 2].abs() < 0.3) & (state[:, 0].abs() < 2.4)
        states.append(state)
        alive.append(alive[-1] * up)
    total, returns = torch.full((episodes,), 1.0), []
    for k in reversed(range(EPISODE)):
        total = (1 - DISCOUNT) * alive[k + 1] + DISCOUNT * alive[k + 1] * total
        returns.append(total)
    pairs = torch.stack([torch.stack(states[:-1], 1), torch.stack(states[1:], 1)], 2)
    stays, total = torch.stack(alive[1:], 1), torch.stack(returns[::-1], 1)
    target = torch.stack([(1 - DISCOUNT) * stays, DISCOUNT * stays, total, torch.zeros_like(total)], 2)
    lives = torch.stack(alive[:-1], 1) > 0
    held_out = torch.arange(episodes) % 5 == 0
    x, y = (part[~held_out][lives[~held_out]] for part in (pairs, target))
    x_test, y_test = (part[held_out][lives[held_out]] for part in (pairs, target))
    y_test[:, 3] = 1
    return Task(Value(), Split(x, y, x_test, y_test), temporal_difference)


SCIENCE_WORKLOADS = (
    Workload("poisson", "Poisson equation, physics-informed MLP", poisson, 500, 800, full_batch=True),
    Workload("siren", "Image by coordinates, SIREN", siren, 200, 60),
    Workload("hamiltonian", "Coupled pendulums, Hamiltonian network", hamiltonian, 50, 30),
    Workload("molecules", "Energies of molecules, graph network", molecules, 32, 15),
    Workload("rod", "Heat conductivity, inverse problem", rod, 40, 40),
    Workload("heavy-tails", "Table with heavy tails, MLP, absolute loss", heavy_tails, 32, 15),
    Workload("cart-pole", "Cart with a pole, value learning", value_learning, 64, 8),
)
