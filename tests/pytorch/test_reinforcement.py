"""Reinforcement learning with the programs of the guide."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "cartpole.py"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("gymnasium")
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("method", ["reinforce", "actor-critic", "dqn"])
def test_every_method_plays_and_learns(example, method):
    torch.manual_seed(0)
    env = example["gymnasium"].make("CartPole-v1")
    scores = example["METHODS"][method](env, 4, 0)
    assert len(scores) == 4
    assert min(scores) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_reinforce_solves_cartpole_within_400_episodes(example, seed):
    torch.manual_seed(seed)
    scores = example["reinforce"](example["gymnasium"].make("CartPole-v1"), 400, seed)
    assert example["is_solved"](scores)
