"""Weight decay that is estimated from the steps per epoch, and momentum that switches itself on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from vsgd import NETWORKS, PAPER
from vsgd.algorithms.strategy import Totals
from vsgd.torch import VSGD

FEW_ROWS = 200
BATCH = 16


def noisy_rows(rows: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 20, generator=generator)
    y = x[:, :1] + torch.randn(rows, 1, generator=generator)
    return x.to(dtype), y.to(dtype)


def network(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)


def train(model, opt, steps, scale=1.0, rows=FEW_ROWS):
    x, y = noisy_rows(rows, next(model.parameters()).dtype)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(rows, (BATCH,), generator=generator)
        opt.minimize(lambda chosen=chosen: scale * (model(x[chosen]) - y[chosen]).square().mean())
    return model


def totals(opt) -> list[Totals]:
    return [Totals(*opt.state[p]["totals"]) for group in opt.param_groups for p in group["params"]]


def held_out_loss(model) -> float:
    x, y = noisy_rows(4000)
    with torch.no_grad():
        return float((model(x[FEW_ROWS:]) - y[FEW_ROWS:]).square().mean())


class TestEstimatedDecay:
    def test_few_noisy_rows_are_fitted_less_closely(self):
        models = [network(), network()]
        for model, epoch in zip(models, (None, FEW_ROWS / BATCH), strict=True):
            train(model, VSGD(model.parameters(), steps_per_epoch=epoch), 200)
        plain, decayed = map(held_out_loss, models)
        assert decayed < 0.95 * plain

    def test_vanishes_with_the_number_of_steps_per_epoch(self):
        model, other = network(torch.float64), network(torch.float64)
        train(model, VSGD(model.parameters()), 100)
        train(other, VSGD(other.parameters(), steps_per_epoch=1e15), 100)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
    def test_does_not_depend_on_the_scale_of_the_loss(self, scale):
        model, other = network(torch.float64), network(torch.float64)
        train(model, VSGD(model.parameters(), steps_per_epoch=3), 60)
        train(other, VSGD(other.parameters(), steps_per_epoch=3), 60, scale)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)

    def test_matrices_decay_and_vectors_do_not(self):
        model = network()
        opt = VSGD(model.parameters(), steps_per_epoch=3)
        train(model, opt, 40)
        decays = [tensor.weight_decay for tensor in opt.info().tensors]
        assert [decay > 0 for decay in decays] == [True, False, True, False]

    def test_rare_rows_of_a_table_decay_more(self):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        nn.init.normal_(table.weight)
        plain = copy.deepcopy(table)
        codes = [torch.tensor([0, 1]) if step % 10 else torch.tensor([0, 9]) for step in range(400)]
        noise = torch.randn(400, 2, 4, generator=torch.Generator().manual_seed(1))
        norms = []
        for each, epoch in ((plain, None), (table, 20)):
            opt = VSGD(each.parameters(), steps_per_epoch=epoch)
            for rows, error in zip(codes, noise, strict=True):
                opt.minimize(lambda each=each, rows=rows, error=error: (each(rows) - 1 - error).square().mean())
            norms.append(each.weight.detach().norm(dim=1))
        shrinkage = norms[1] / norms[0]
        assert shrinkage[9] < shrinkage[0]
        assert shrinkage[5] == 1  # never touched

    def test_strength_of_the_user_replaces_the_estimate(self):
        model, other = network(), network()
        train(model, VSGD(model.parameters(), weight_decay=0.1, steps_per_epoch=3), 30)
        train(other, VSGD(other.parameters(), weight_decay=0.1), 30)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def test_weights_that_are_zero_stay_finite(self):
        model = network()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        train(model, VSGD(model.parameters(), steps_per_epoch=1), 30)
        assert all(parameter.isfinite().all() for parameter in model.parameters())

    def test_constant_loss_changes_nothing_to_nan(self):
        model = network()
        opt = VSGD(model.parameters(), steps_per_epoch=2)
        for _ in range(20):
            opt.minimize(lambda: 0 * sum(p.sum() for p in model.parameters()) + 1)
        assert all(parameter.isfinite().all() for parameter in model.parameters())

    @pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 0.5, "8"])
    def test_impossible_steps_per_epoch_are_refused(self, value):
        with pytest.raises(ValueError, match=r"steps_per_epoch is .*len\(loader\)"):
            VSGD(network().parameters(), steps_per_epoch=value)

    def test_groups_may_differ(self):
        model = network()
        groups = [{"params": model[0].parameters(), "steps_per_epoch": 3}, {"params": model[2].parameters()}]
        opt = VSGD(groups)
        train(model, opt, 40)
        assert [tensor.weight_decay > 0 for tensor in opt.info().tensors] == [True, False, False, False]

    def test_resumes_to_the_bit(self):
        model = network()
        opt = VSGD(model.parameters(), steps_per_epoch=3)
        train(model, opt, 25)
        other = copy.deepcopy(model)
        resumed = VSGD(other.parameters())
        resumed.load_state_dict(opt.state_dict())
        train(model, opt, 25)
        train(other, resumed, 25)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)


class Valley(nn.Module):
    """A noise-free quadratic with a condition number of 1,000, in coordinates that no basis decouples."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        q, _ = torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64))
        self.hessian = q @ torch.diag(torch.logspace(0, 3, 30, dtype=torch.float64)) @ q.T
        self.theta = nn.Parameter(torch.ones(30, dtype=torch.float64))

    def forward(self):
        return self.theta @ self.hessian @ self.theta / 2


class TestMomentum:
    @staticmethod
    def minimized(algorithm):
        valley = Valley()
        opt = VSGD(valley.parameters(), algorithm=algorithm)
        largest = 0.0
        for _ in range(500):
            opt.minimize(valley)
            largest = max(largest, float(totals(opt)[0].momentum))
        with opt.iterates():
            return float(valley().detach()), largest

    def test_speeds_up_convergence_without_noise(self):
        with_momentum, largest = self.minimized(NETWORKS)
        without, none = self.minimized(NETWORKS._replace(max_momentum=0.0))
        assert largest > 0.1
        assert none == 0
        assert with_momentum < without

    def test_stays_off_at_the_optimum_of_a_noisy_problem(self):
        model = nn.Linear(20, 1)
        opt = VSGD(model.parameters())
        generator = torch.Generator().manual_seed(1)
        coefficients = []
        for _ in range(1500):
            x, noise = torch.randn(8, 20, generator=generator), torch.randn(8, 1, generator=generator)
            opt.minimize(lambda x=x, noise=noise: (model(x) - noise).square().mean())
            coefficients.append(float(totals(opt)[0].momentum))
        assert sum(coefficients[500:]) / 1000 < 0.02

    def test_the_published_algorithm_has_none(self):
        model = network()
        opt = VSGD(model.parameters(), algorithm=PAPER)
        train(model, opt, 60)
        assert all(each.momentum == 0 and each.agreement == 0 for each in totals(opt))

    def test_lr_of_zero_freezes_the_iterates(self):
        valley = Valley()
        opt = VSGD(valley.parameters())
        for _ in range(150):
            opt.minimize(valley)
        assert totals(opt)[0].momentum > 0
        opt.param_groups[0]["lr"] = 0.0
        before = opt.state[valley.theta]["iterate"].clone()
        opt.minimize(valley)
        assert torch.equal(opt.state[valley.theta]["iterate"], before)

    def test_stays_off_beside_a_table(self):
        torch.manual_seed(0)
        table, read = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1)
        opt = VSGD([*table.parameters(), *read.parameters()])
        codes = torch.tensor([0, 1, 2])
        for _ in range(150):
            opt.minimize(lambda: (read(table(codes)) - 5).square().mean())
        assert opt.state[read.weight]["totals"][Totals._fields.index("momentum")] == 0
