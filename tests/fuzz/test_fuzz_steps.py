"""State, settings, parameters and gradients changed by hand: the next steps succeed, or are refused without effect."""

from __future__ import annotations

import copy
import math
import traceback

import pytest
import torch
import torch.nn.functional as F
from fuzzing import cases, generator, no_hang
from interrupting import SOURCE
from torch import nn
from trainees import DTYPES, KINDS, ODDITIES, SCALARS, Trainee, X, Y, oddly_shaped, with_numbers

from vsgd.torch import VSGD
from vsgd.torch.optimizer import PATIENCE

REFUSALS = (TypeError, ValueError, RuntimeError, FloatingPointError)


class ByHand(Exception):
    """An error of the closure itself."""


def is_explained(error):
    """Return whether an error was raised by vsgd itself, or passed on from the closure."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename.startswith(SOURCE) or any(frame.name == "closure" for frame in frames)


def weights(trainee):
    return [p.detach().clone() for p in trainee.model.parameters()]


def is_finite(trainee):
    return all(p.isfinite().all() for p in trainee.model.parameters())


def is_same(first, second):
    """Return whether weights are the same to the bit."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9))
        for a, b in zip(first, second, strict=True)
    )


def closure_of(trainee, change):
    def closure():
        trainee.opt.zero_grad()
        x = X.to(next(trainee.model.parameters()).dtype)
        loss = F.cross_entropy(trainee.model(x).float(), Y)
        loss.backward()
        change()
        return loss

    return closure


def refusal_of(trainee, steps, change=lambda: None):
    """Take steps. Return the error that refuses one of them, which must be explained and have no effect; or None."""
    for _ in range(steps):
        before, refusal = weights(trainee), None
        with no_hang():
            try:
                trainee.opt.step(closure_of(trainee, change))
            except (*REFUSALS, ByHand) as error:
                refusal = error
        if refusal is not None:
            text = "".join(traceback.format_exception(refusal))
            assert is_explained(refusal), text
            assert is_same(weights(trainee), before), text
            return refusal
    return None


def attack(kind, name, count, change):
    """Apply a change to a copy of a trained model, and train it further, for each case. Return the number of refusals.

    A change may cause weights that are not finite, if it wrote such numbers. Training must then raise an error.
    """
    rng, refused = generator(f"{name} {kind}"), 0
    original = Trainee(kind)
    for _ in range(count):
        trainee = copy.deepcopy(original)
        if rng.random() < 0.5:  # otherwise the copy has only the state
            trainee.train(1)
        inside = change(trainee, rng)
        refusal = refusal_of(trainee, 3, *filter(None, [inside]))
        refused += refusal is not None
        if refusal is None and not is_finite(trainee):
            assert isinstance(refusal_of(trainee, PATIENCE), FloatingPointError)
        restore(trainee, original)
        assert refusal_of(trainee, 3) is None
        assert is_finite(trainee)
    print(f"{name}, {kind}: {count} cases, {refused} refused")
    return refused


def restore(trainee, original):
    """Restore weights and state from a checkpoint, with a new optimizer."""
    for p, value in zip(trainee.model.parameters(), original.model.parameters(), strict=True):
        p.data, p.grad = value.detach().clone(), None
        p.requires_grad_(True)
    for handle in vars(trainee).pop("hooks", []):
        handle.remove()
    trainee.opt = VSGD(trainee.model.parameters())
    trainee.opt.load_state_dict(original.opt.state_dict())


# --- the state --------------------------------------------------------------------------------------------------------


def edit_state(trainee, rng):
    states = trainee.opt.state
    p = rng.choice(list(states))
    state = states[p]
    key = rng.choice(sorted(state))
    how = rng.randrange(11)
    if how == 0:
        del state[key]
    elif how == 1:
        state[rng.choice(["average", "iterate", "left_basis", "moment", 7])] = state[key]
    elif how == 2:
        state[key] = rng.choice(ODDITIES)
    elif how == 3:
        state[key] = oddly_shaped(state[key], rng)
    elif how == 4:
        state[key] = state[key].to(rng.choice(DTYPES))
    elif how == 5:
        states.clear()
    elif how == 6:
        del states[p]
    elif how == 7:
        states[p] = rng.choice([{}, states[rng.choice(list(states))], dict(state)])
    elif how == 8:
        states[rng.choice([nn.Parameter(torch.ones(3)), "text", None])] = dict(state)
    else:
        state[key].copy_(with_numbers(state[key], rng))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # a probe size of 1e300 was written into the state
@pytest.mark.parametrize("kind", KINDS)
def test_state_edited_by_hand(kind):
    assert attack(kind, "state", cases(40, 500), edit_state) > 0


# --- settings ---------------------------------------------------------------------------------------------------------


def edit_settings(trainee, rng):
    group = rng.choice(trainee.opt.param_groups)
    values = [*SCALARS, *ODDITIES, 10**400, -(10**400), torch.tensor(0.5), torch.tensor(math.nan)]
    group[rng.choice(["lr", "weight_decay", "steps_per_epoch", "algorithm"])] = rng.choice(values)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_edited_by_hand(kind):
    assert attack(kind, "settings", cases(30, 200), edit_settings) > 0


# --- parameters -------------------------------------------------------------------------------------------------------


def edit_parameters(trainee, rng):
    p = rng.choice(list(trainee.model.parameters()))
    params = trainee.opt.param_groups[0]["params"]
    how = rng.randrange(12)
    with torch.no_grad():
        if how == 0:
            p.copy_(with_numbers(p, rng))
        elif how == 1:
            p.data = torch.randn(rng.choice([(), (0,), (1,), (3, 5), (8, 5), (5, 8), (2, 2, 2)])).to(p.dtype)
        elif how == 2:
            p.data = p.data.to(rng.choice(DTYPES[:3]))
        elif how == 3:
            trainee.model.to(rng.choice(DTYPES[:3]))
        elif how == 4:
            p.data = p.data.repeat_interleave(2, -1)[..., ::2]
        elif how == 5:
            p.data = p.data.flatten()[:1].expand(p.shape)
        elif how == 6:
            p.requires_grad_(False)
        elif how == 7:
            p.mul_(rng.choice([0.0, 1e-30, 1e10, -1.0]))
        elif how == 8:
            p.data = torch.zeros(2 * p.numel(), dtype=p.dtype)[1 : p.numel() + 1].view(p.shape)
        elif how == 9:
            del params[rng.randrange(len(params))]
        elif how == 10:
            params.append(rng.choice([p, nn.Parameter(torch.ones(3)), torch.ones(2), "text"]))
        else:
            p.grad = rng.choice([None, torch.ones_like(p), torch.full_like(p, math.nan)])


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_changed_by_hand(kind):
    assert attack(kind, "parameters", cases(40, 250), edit_parameters) > 0


# --- gradients --------------------------------------------------------------------------------------------------------


def change_gradient(trainee, rng):
    """Return a function that the closure calls after the backward pass."""
    p = rng.choice(list(trainee.model.parameters()))
    how, number = rng.randrange(12), rng.choice(SCALARS)
    at, late = rng.randrange(1000), rng.choice([0, 1, 2])
    calls = []

    def fail(*_):
        raise ByHand

    def inside():
        calls.append(0)
        if len(calls) <= late:  # a later evaluation of the same or another step
            return
        grad = p.grad
        if how == 0:
            p.grad = None
        elif how == 1 and grad is not None and not grad.is_sparse:
            grad.view(-1)[at % grad.numel()] = number
        elif how == 2:
            p.grad = torch.zeros((), dtype=p.dtype).expand(p.shape)
        elif how == 3:
            p.grad = torch.ones_like(p).repeat_interleave(2, -1)[..., ::2]
        elif how == 4:
            p.grad = torch.ones_like(p).to_sparse()
        elif how == 5:
            p.data = p.data.repeat_interleave(2, 0)
        elif how == 6:
            p.data.fill_(number)
        elif how == 7:
            trainee.opt.step(lambda: None)
        elif how == 8:
            trainee.opt.state.clear()
        elif how == 9:
            fail()
        elif how == 10:
            trainee.opt.load_state_dict(trainee.opt.state_dict())
        else:
            trainee.hooks = [p.register_hook(fail)]

    return inside


@pytest.mark.parametrize("kind", KINDS)
def test_changes_inside_the_closure(kind):
    assert attack(kind, "closure", cases(40, 150), change_gradient) > 0
