"""Train with moving targets: a GAN on a ring of Gaussians, and Q-learning with a target network.

    python benchmarks/moving_targets.py

vSGD without tuning is compared with Adam at three learning rates. Lower is better in both tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsgd.torch import VSGD

SEEDS = 5
Make = Callable[[nn.Module], torch.optim.Optimizer]


def newest(opt: Any) -> AbstractContextManager[None]:
    """Return a context in which the newest weights are used instead of their average."""
    return opt.iterates() if isinstance(opt, VSGD) else nullcontext()


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


# --- a GAN --------------------------------------------------------------------------------------------------------


def ring(count: int, rng: torch.Generator) -> Tensor:
    """Return points around eight centers on a circle of radius 2."""
    angle = torch.randint(8, (count,), generator=rng) * (2 * math.pi / 8)
    centers = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    return centers + 0.05 * torch.randn(count, 2, generator=rng)


def sliced_distance(a: Tensor, b: Tensor) -> float:
    """Return the mean Wasserstein distance of projections over 64 directions."""
    angle = torch.arange(64) * (math.pi / 64)
    directions = torch.stack([angle.cos(), angle.sin()])
    return float(((a @ directions).sort(0).values - (b @ directions).sort(0).values).abs().mean())


def gan(make: Make, seed: int, steps: int = 3000) -> float:
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    generator, discriminator = mlp(8, 2), mlp(2, 1)
    generator_opt, discriminator_opt = make(generator), make(discriminator)

    def learn(opt: torch.optim.Optimizer, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        def closure() -> Tensor:
            model.zero_grad()
            value = loss()
            value.backward()
            return value

        opt.step(closure)

    for _ in range(steps):
        real, noise = ring(128, rng), torch.randn(2, 128, 8, generator=rng)
        judge = partial(_judge, generator, discriminator, real, noise[0])
        learn(discriminator_opt, discriminator, judge)
        learn(generator_opt, generator, partial(_fool, generator, discriminator, noise[1]))
    with torch.no_grad():
        return sliced_distance(generator(torch.randn(4000, 8, generator=rng)), ring(4000, rng))


def _judge(generator: nn.Module, discriminator: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
    return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(generator(noise).detach())).mean()


def _fool(generator: nn.Module, discriminator: nn.Module, noise: Tensor) -> Tensor:
    return F.softplus(-discriminator(generator(noise))).mean()


# --- Q-learning ---------------------------------------------------------------------------------------------------

PLACES, ACTIONS, DISCOUNT = 40, 3, 0.95


def chain() -> tuple[Tensor, Tensor, Tensor]:
    """Return transitions, rewards and exact values of a random walk on a line."""
    place = torch.arange(PLACES)
    to = torch.zeros(PLACES, ACTIONS, PLACES)
    for action, move in enumerate((-1, 0, 1)):
        for slip, chance in ((-1, 0.1), (0, 0.8), (1, 0.1)):
            to[place, action, (place + move + slip).clamp(0, PLACES - 1)] += chance
    reward = (torch.sin(place * 0.5) + 2 * (place == PLACES - 1))[:, None].expand(PLACES, ACTIONS)
    values = torch.zeros(PLACES, ACTIONS)
    for _ in range(2000):
        values = reward + DISCOUNT * to @ values.amax(1)
    return to, reward, values


def q_learning(make: Make, seed: int, steps: int = 4000, renewed: int = 100) -> float:
    """Return the RMS error of the learned values relative to the standard deviation of the exact ones."""
    to, reward, exact = chain()
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    features = torch.cat([torch.eye(PLACES), torch.linspace(-1, 1, PLACES)[:, None]], 1)
    model, target = mlp(PLACES + 1, ACTIONS), mlp(PLACES + 1, ACTIONS)
    opt = make(model)
    for step in range(steps):
        if step % renewed == 0:
            with newest(opt):
                target.load_state_dict(model.state_dict())
        place = torch.randint(PLACES, (32,), generator=rng)
        action = torch.randint(ACTIONS, (32,), generator=rng)
        following = torch.multinomial(to[place, action], 1, generator=rng).squeeze(1)
        with torch.no_grad():
            wanted = reward[place, action] + DISCOUNT * target(features[following]).amax(1)

        def closure(place: Tensor = place, action: Tensor = action, wanted: Tensor = wanted) -> Tensor:
            opt.zero_grad()
            loss = F.smooth_l1_loss(model(features[place])[torch.arange(32), action], wanted)
            loss.backward()
            return loss

        opt.step(closure)
    with torch.no_grad():
        return float((model(features) - exact).square().mean().sqrt() / exact.std())


def adam(rate: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), rate, betas=(0.5, 0.99))


def main() -> None:
    torch.set_num_threads(1)
    methods: dict[str, Make] = {"vSGD": lambda model: VSGD(model.parameters())}
    for rate in (1e-4, 1e-3, 1e-2):
        methods[f"Adam {rate:g}"] = lambda model, rate=rate: torch.optim.Adam(
            model.parameters(), rate, betas=(0.5, 0.99)
        )
    tables = {
        "GAN on a ring of 8 Gaussians, 3,000 steps: sliced Wasserstein distance": gan,
        "Q-learning on a chain of 40 places, 4,000 steps: error of the values": q_learning,
    }
    for title, task in tables.items():
        print(f"\n{title}\n\n| | {' | '.join(f'seed {seed}' for seed in range(SEEDS))} | mean |")
        print("|---" * (SEEDS + 2) + "|")
        for name, make in methods.items():
            found = [task(make, seed) for seed in range(SEEDS)]
            print(
                f"| {name} | {' | '.join(f'{value:.3f}' for value in found)} | {sum(found) / SEEDS:.3f} |", flush=True
            )


if __name__ == "__main__":
    main()
