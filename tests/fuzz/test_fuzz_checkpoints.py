"""Damaged or crafted checkpoints of `VSGD` are either loaded and usable, or rejected without any change."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from fuzzing import cases, generator, mutated, no_hang
from trainees import DTYPES, KINDS, ODDITIES, Trainee, oddly_shaped, with_numbers


def strided(value, rng):
    """Change the memory layout only; the state stays valid."""
    return value.repeat_interleave(2, -1)[..., ::2]


def damage_state(saved, rng):
    """Damage the state of one parameter."""
    state = saved["state"][rng.choice(sorted(saved["state"]))]
    key = rng.choice(sorted(state))
    how = rng.randrange(8)
    if how == 0:
        del state[key]
    elif how == 1:
        state[rng.choice(["average", "iterate", "left_basis", "right_cov", "moment", 7])] = state[key]
    elif how == 2:
        state[key] = state[rng.choice(sorted(state))]
    elif how == 3:
        state[key] = rng.choice(ODDITIES)
    elif how == 4:
        state[key] = state[key].to(rng.choice(DTYPES))
    else:
        state[key] = rng.choice([oddly_shaped, with_numbers, with_numbers, strided])(state[key], rng)


def damage_groups(saved, rng):
    group = rng.choice(saved["param_groups"])
    options = rng.choice([group, group["algorithm"]])
    key = rng.choice(sorted(options))
    how = rng.randrange(6)
    if how == 0:
        del options[key]
    elif how == 1:
        saved["param_groups"].append(copy.deepcopy(group))
    elif how == 2:
        group["params"] = rng.choice([[], [0], [0, 0], group["params"][::-1], [*group["params"], 99], "abcd"])
    else:
        options[key] = rng.choice(ODDITIES)


def damage_parts(saved, rng):
    """Remove, exchange or replace whole parts."""
    states = saved["state"]
    first, second = rng.choices(sorted(states), k=2)
    how = rng.randrange(6)
    if how == 0:
        del saved[rng.choice(sorted(saved))]
    elif how == 1:
        saved[rng.choice(sorted(saved))] = rng.choice(ODDITIES)
    elif how == 2:
        del states[first]
    elif how == 3:
        states[first], states[second] = states[second], states[first]
    elif how == 4:
        states[rng.choice([99, "0", None, (1,)])] = states[first]
    else:
        states[first] = rng.choice(ODDITIES)


def attempt(trainee, pristine, saved):
    """Load a checkpoint that may be damaged, restore the trainee, and return whether it was accepted."""
    before, refusal = trainee.bits(), None
    weights = copy.deepcopy(trainee.model.state_dict())
    with no_hang():
        try:
            trainee.opt.load_state_dict(saved)
        except ValueError as error:
            refusal = str(error)
    if refusal is not None:
        assert refusal.endswith("Nothing was loaded.")
        assert trainee.bits() == before, refusal
        return False
    # weights or probes that are much too large cause non-finite losses, which raise an error
    with no_hang(), contextlib.suppress(FloatingPointError):
        trainee.train(12)
    assert all(torch.isfinite(value).all() for value in trainee.numbers())
    trainee.model.load_state_dict(weights)
    trainee.opt.load_state_dict(pristine)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_crafted_checkpoints(kind):
    rng, count, taken = generator(f"checkpoint {kind}"), cases(80, 1500), 0
    trainee = Trainee(kind)
    pristine = copy.deepcopy(trainee.opt.state_dict())
    for _ in range(count):
        saved = copy.deepcopy(pristine)
        for _ in range(rng.choice([1, 1, 2])):
            damage = rng.choice([damage_state, damage_state, damage_groups, damage_parts])
            with contextlib.suppress(Exception):  # the first damage has removed what the second would change
                damage(saved, rng)
        taken += attempt(trainee, pristine, saved)
    print(f"checkpoints, {kind}: {count} crafted, {count - taken} refused")
    assert 0 < taken < count


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_checkpoints(kind):
    """Damage the bytes of `torch.save`. An error of `torch.load` is a rejection."""
    rng, count, unread, taken = generator(f"bytes {kind}"), cases(60, 1500), 0, 0
    trainee = Trainee(kind)
    pristine = copy.deepcopy(trainee.opt.state_dict())
    file = io.BytesIO()
    torch.save(pristine, file)
    for _ in range(count):
        try:
            with no_hang():
                saved = torch.load(io.BytesIO(mutated(file.getvalue(), rng)), weights_only=True)
        except Exception:  # torch may raise any kind of error
            unread += 1
            continue
        taken += attempt(trainee, pristine, saved)
    print(f"checkpoints, {kind}: {count} damaged, {unread} refused by torch, {count - unread - taken} by us")
    assert unread + taken > 0
