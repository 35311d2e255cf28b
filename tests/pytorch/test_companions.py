"""Several `VSGD` optimizers in one process: networks that train in turn, and parameters of two optimizers."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vsgd import NETWORKS
from vsgd.torch import VSGD


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step):
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(step))


def copy_input(model, opt, steps):
    """Train a network to return its input."""
    for step in steps:
        x = batch(step)
        opt.minimize(lambda x=x: (model(x) - x).square().mean())


def compete(steps, first_of, second_of):
    """Let two networks train in turn, each against the other. Return their weights."""
    one, two = network(0), network(1)
    first, second = VSGD(one.parameters()), VSGD(two.parameters())
    for step in range(steps):
        x = batch(step)
        first_of(first, second, lambda one=one, two=two, x=x: (one(x) - two(x).detach() - x).square().mean())
        second_of(first, second, lambda one=one, two=two, x=x: (two(one(x).detach()) - x).square().mean())
    return [p.detach() for p in (*one.parameters(), *two.parameters())]


def within_iterates(first, second, loss):
    with second.iterates():
        first.minimize(loss)


def test_a_closure_sees_the_iterates_of_networks_that_train_in_turn():
    plain = compete(40, lambda a, b, loss: a.minimize(loss), lambda a, b, loss: b.minimize(loss))
    explicit = compete(40, within_iterates, lambda a, b, loss: within_iterates(b, a, loss))
    for each, other in zip(plain, explicit, strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=0)


@pytest.mark.parametrize("functional", [False, True], ids=["modules", "functional"])
def test_iterates_are_used_however_a_network_is_called(functional):
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    first, second = VSGD(one.parameters()), VSGD(two.parameters())
    used = []

    def judged(x):
        used.append(two.weight.detach().clone())
        return F.linear(x, two.weight, two.bias) if functional else two(x)

    for step in range(30):
        x = batch(step)
        used.clear()
        first.minimize(lambda x=x: (judged(one(x)) - x).square().mean())
        average = two.weight.detach().clone()
        with second.iterates():
            iterate = two.weight.detach().clone()
        second.minimize(lambda x=x: (two(x) + x).square().mean())
    assert not torch.equal(iterate, average)
    assert all(torch.equal(weight, iterate) for weight in used)


def test_a_network_whose_training_has_ended_keeps_its_averaged_weights():
    teacher, student = network(0), network(1)
    first, second = VSGD(teacher.parameters()), VSGD(student.parameters())
    copy_input(teacher, first, range(30))
    average = teacher[0].weight.detach().clone()
    used = []

    def distance(x):
        used.append(teacher[0].weight.detach().clone())
        return (student(x) - teacher(x).detach()).square().mean()

    for step in range(10):
        x = batch(step)
        second.minimize(lambda x=x: distance(x))
    assert all(torch.equal(weight, average) for weight in used)


def test_an_error_leaves_both_networks_with_their_averaged_weights():
    one, two = network(0), network(1)
    first, second = VSGD(one.parameters()), VSGD(two.parameters())
    for step in range(20):
        x = batch(step)
        first.minimize(lambda x=x: (one(x) - two(x).detach() - x).square().mean())
        second.minimize(lambda x=x: (two(one(x).detach()) - x).square().mean())
    before = copy.deepcopy([one.state_dict(), two.state_dict()])

    def broken():
        two(one(x))
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        first.minimize(broken)
    torch.testing.assert_close([one.state_dict(), two.state_dict()], before, rtol=0, atol=0)


class TestIterates:
    def test_blocks_may_be_nested(self):
        model = network(0)
        opt = VSGD(model.parameters())
        copy_input(model, opt, range(20))
        average = copy.deepcopy(model.state_dict())
        with opt.iterates():
            iterate = copy.deepcopy(model.state_dict())
            with opt.iterates():
                torch.testing.assert_close(model.state_dict(), iterate, rtol=0, atol=0)
            torch.testing.assert_close(model.state_dict(), iterate, rtol=0, atol=0)
        torch.testing.assert_close(model.state_dict(), average, rtol=0, atol=0)
        assert not torch.equal(average["0.weight"], iterate["0.weight"])

    def test_a_step_within_equals_one_outside(self):
        results = []
        for within in (False, True):
            model = network(0)
            opt = VSGD(model.parameters())
            for step in range(20):
                with opt.iterates() if within else nullcontext():
                    copy_input(model, opt, [step])
            results.append(model.state_dict())
        torch.testing.assert_close(*results, rtol=0, atol=0)

    def test_a_function_may_be_decorated(self):
        model = network(0)
        opt = VSGD(model.parameters())

        @opt.iterates()
        def weights():
            return model[0].weight.detach().clone()

        copy_input(model, opt, range(20))
        with opt.iterates():
            iterate = model[0].weight.detach().clone()
        assert torch.equal(weights(), iterate)
        assert not torch.equal(model[0].weight, iterate)


class TestSharedParameters:
    def test_two_optimizers_that_step_in_turn_are_an_error(self):
        model = network(0)
        first, second = VSGD(model.parameters()), VSGD(model[2].parameters())
        first.minimize(lambda: model(batch(0)).square().mean())
        second.minimize(lambda: model(batch(0)).square().mean())
        with pytest.raises(RuntimeError, match="another VSGD has changed parameters"):
            first.minimize(lambda: model(batch(0)).square().mean())

    def test_a_new_optimizer_may_take_over(self):
        model = network(0)
        first, second = VSGD(model.parameters()), VSGD(model.parameters())
        first.minimize(lambda: model(batch(0)).square().mean())
        for _ in range(3):
            second.minimize(lambda: model(batch(0)).square().mean())
        assert first is not second


def test_without_averaging_there_is_nothing_to_switch():
    plain = NETWORKS._replace(average_iterates=False)
    one, two = network(0), network(1)
    first, second = VSGD(one.parameters(), algorithm=plain), VSGD(two.parameters(), algorithm=plain)
    for step in range(10):
        x = batch(step)
        first.minimize(lambda x=x: (one(x) - two(x).detach()).square().mean())
        second.minimize(lambda x=x: (two(x) - one(x).detach() - 1).square().mean())
    assert all(p.isfinite().all() for p in (*one.parameters(), *two.parameters()))
