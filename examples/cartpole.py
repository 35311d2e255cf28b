"""Solve CartPole without tuning: REINFORCE, actor-critic and DQN.

python examples/cartpole.py reinforce --seed 0

CartPole is solved when the moving average of the returns (weight of the newest: 0.05) exceeds 475.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from vsgd.torch import VSGD

DISCOUNT = 0.99
SOLVED = 475.0


class Episode(NamedTuple):
    """Observations, actions and rewards of one episode."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, outputs))


def play(env: gymnasium.Env, seed: int, act: Callable[[Tensor], int]) -> Episode:
    """Play one episode with the actions that `act` chooses."""
    observation, _ = env.reset(seed=seed)
    observations, actions, rewards = [], [], []
    done = False
    while not done:
        observations.append(torch.as_tensor(observation))
        actions.append(act(observations[-1]))
        observation, reward, terminated, truncated, _ = env.step(actions[-1])
        rewards.append(float(reward))
        done = terminated or truncated
    return Episode(torch.stack(observations), torch.tensor(actions), torch.tensor(rewards))


def discounted(rewards: Tensor) -> Tensor:
    """Return the discounted sum of the rewards from each time step on."""
    total, returns = 0.0, []
    for reward in rewards.flip(0).tolist():
        total = reward + DISCOUNT * total
        returns.append(total)
    return torch.tensor(returns).flip(0)


def normalized(values: Tensor) -> Tensor:
    return (values - values.mean()) / (values.std() + 1e-6)


def mean_by_time(returns: Iterable[Tensor]) -> Tensor:
    """Return the mean of the returns at each time step. A finished episode has a return of 0."""
    return nn.utils.rnn.pad_sequence(list(returns), batch_first=True).mean(0)


def reinforce(env: gymnasium.Env, episodes: int, seed: int) -> list[float]:
    """Learn a policy from whole episodes, two for each update. Return the sum of rewards of each episode.

    The baseline is the mean return at the same time step over the last twenty episodes.
    """
    policy = mlp(2)
    opt = VSGD(policy.parameters())

    @torch.no_grad()
    def act(observation: Tensor) -> int:
        return int(Categorical(logits=policy(observation)).sample())

    rollout = opt.iterates()(play)
    scores: list[float] = []
    recent: deque[Tensor] = deque(maxlen=20)
    while len(scores) < episodes and not is_solved(scores):
        played = [rollout(env, 100_000 * seed + len(scores) + k, act) for k in range(2)]
        scores += [float(episode.rewards.sum()) for episode in played]
        returns = [discounted(episode.rewards) for episode in played]
        recent.extend(returns)
        baseline = mean_by_time(recent)
        advantages = torch.cat([each - baseline[: len(each)] for each in returns])
        observations = torch.cat([episode.observations for episode in played])
        actions = torch.cat([episode.actions for episode in played])

        def loss(
            observations: Tensor = observations, actions: Tensor = actions, advantages: Tensor = advantages
        ) -> Tensor:
            return -(advantages * Categorical(logits=policy(observations)).log_prob(actions)).mean()

        opt.minimize(loss)
    return scores


def actor_critic(env: gymnasium.Env, episodes: int, seed: int) -> list[float]:
    """Learn a policy, and the value of states as its baseline. Return the sum of rewards of each episode."""
    policy, critic = mlp(2), mlp(1)
    policy_opt, critic_opt = VSGD(policy.parameters()), VSGD(critic.parameters())

    @torch.no_grad()
    def act(observation: Tensor) -> int:
        return int(Categorical(logits=policy(observation)).sample())

    rollout = policy_opt.iterates()(play)
    scores: list[float] = []
    while len(scores) < episodes and not is_solved(scores):
        episode = rollout(env, 100_000 * seed + len(scores), act)
        scores.append(float(episode.rewards.sum()))
        returns = discounted(episode.rewards)
        with torch.no_grad():
            advantages = normalized(returns - critic(episode.observations)[:, 0])

        def policy_loss(episode: Episode = episode, advantages: Tensor = advantages) -> Tensor:
            chosen = Categorical(logits=policy(episode.observations)).log_prob(episode.actions)
            return -(advantages * chosen).mean()

        def critic_loss(episode: Episode = episode, returns: Tensor = returns) -> Tensor:
            return F.smooth_l1_loss(critic(episode.observations)[:, 0], returns)

        policy_opt.minimize(policy_loss)
        critic_opt.minimize(critic_loss)
    return scores


def dqn(env: gymnasium.Env, episodes: int, seed: int) -> list[float]:
    """Learn the values of actions from a replay buffer. Return the sum of rewards of each episode."""
    network, target = mlp(2), mlp(2)
    opt = VSGD(network.parameters())
    rng = random.Random(seed)
    memory: deque[tuple[Tensor, int, float, Tensor, bool]] = deque(maxlen=20_000)
    scores: list[float] = []
    steps = 0

    def learn() -> None:
        now, actions, rewards, following, ended = zip(*rng.sample(memory, 64), strict=True)
        with torch.no_grad():
            future = target(torch.stack(following)).amax(1) * (1 - torch.tensor(ended).float())
        wanted = torch.tensor(rewards) + DISCOUNT * future
        states, chosen = torch.stack(now), torch.tensor(actions)[:, None]
        opt.minimize(lambda: F.smooth_l1_loss(network(states).gather(1, chosen)[:, 0], wanted))

    while len(scores) < episodes and not is_solved(scores):
        observation = torch.as_tensor(env.reset(seed=100_000 * seed + len(scores))[0])
        score, done = 0.0, False
        while not done:
            explore = rng.random() < max(0.05, 1 - steps / 5_000)
            with torch.no_grad():
                action = rng.randrange(2) if explore else int(network(observation).argmax())
            new, reward, terminated, truncated, _ = env.step(action)
            memory.append((observation, action, float(reward), torch.as_tensor(new), terminated))
            observation, score, done, steps = (
                torch.as_tensor(new),
                score + float(reward),
                terminated or truncated,
                steps + 1,
            )
            if steps % 200 == 0:
                with opt.iterates():
                    target.load_state_dict(network.state_dict())
            if steps > 500 and steps % 2 == 0:
                learn()
        scores.append(score)
    return scores


def is_solved(scores: list[float]) -> bool:
    running = 10.0
    for score in scores:
        running += 0.05 * (score - running)
    return running > SOLVED


METHODS = {"reinforce": reinforce, "actor-critic": actor_critic, "dqn": dqn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    scores = METHODS[arguments.method](gymnasium.make("CartPole-v1"), arguments.episodes, arguments.seed)
    outcome = "solved" if is_solved(scores) else "not solved"
    last = scores[-50:]
    print(f"{outcome} after {len(scores)} episodes; mean of the last {len(last)}: {sum(last) / len(last):.0f}")


if __name__ == "__main__":
    main()
