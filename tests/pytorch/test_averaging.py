"""The parameters are averages of the iterates whenever anyone but the optimizer looks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from vsgd import NETWORKS
from vsgd.torch import VSGD, Rows

BOOTSTRAP = int(NETWORKS.bootstrap)


def network(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)


def batch(step: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 5, generator=generator)
    return x.to(dtype), (x[:, :1].abs() + 0.1 * torch.randn(16, 1, generator=generator)).to(dtype)


def closure_of(model, opt, step, scale=1.0, seen=None):
    x, y = batch(step, next(model.parameters()).dtype)

    def closure():
        opt.zero_grad()
        if seen is not None:
            seen.append([p.detach().clone() for p in model.parameters()])
        loss = scale * (model(x) - y).square().mean()
        loss.backward()
        return loss

    return closure


def train(model, opt, steps, **options):
    for step in steps:
        opt.step(closure_of(model, opt, step, **options))
    return model


def weights(model) -> list:
    return [p.detach().clone() for p in model.parameters()]


def iterates(opt) -> list:
    return [opt.state[p]["iterate"].clone() for group in opt.param_groups for p in group["params"]]


def test_parameters_are_the_average_of_the_iterates_since_the_bootstrap():
    model = network(torch.float64)
    opt = VSGD(model.parameters())
    expected = weights(model)
    for step in range(60):
        window = opt.param_groups[0]["averaging"][0]
        opt.step(closure_of(model, opt, step))
        weight = 1 / window if step >= BOOTSTRAP else 1
        expected = [a + weight * (x - a) for a, x in zip(expected, iterates(opt), strict=True)]
    assert not torch.equal(expected[0], iterates(opt)[0])
    torch.testing.assert_close(weights(model), expected)


@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_the_average_reaches_back_where_that_helps(noise):
    """In stationary noise it reaches back ever further; without noise it lags behind no more than it must."""
    torch.manual_seed(0)
    theta = nn.Parameter(torch.ones(20))
    opt = VSGD([theta])
    for _ in range(300):
        target = noise * torch.randn(20)

        def closure(target=target):
            opt.zero_grad()
            loss = (theta - target).square().sum()
            loss.backward()
            return loss

        opt.step(closure)
    window = opt.param_groups[0]["averaging"][0]
    assert window > 50 if noise else window == pytest.approx(NETWORKS.window_share * 299)


def test_closures_see_the_iterate_and_everyone_else_the_average():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(20))
    before, seen = iterates(opt), []
    train(model, opt, [20], seen=seen)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], before, strict=True))
    assert not torch.equal(weights(model)[0], before[0])


def test_parameters_stay_where_they_are_in_memory():
    """Shared memory stays shared, and views of a parameter stay views of it."""
    model = network().share_memory()
    opt = VSGD(model.parameters())
    places = [p.data_ptr() for p in model.parameters()]
    train(model, opt, range(10))
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(p.is_shared() for p in model.parameters())


def test_an_error_in_the_closure_leaves_the_average_in_place():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(12))
    before, inside = weights(model), iterates(opt)

    def broken():
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        opt.step(broken)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(iterates(opt), inside, strict=True))


@pytest.mark.parametrize("how", ["load_state_dict", "vector_to_parameters", "in place", "data"])
def test_weights_that_the_user_sets_are_where_the_next_step_starts(how):
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(12))
    new = [torch.full_like(p, 0.25) for p in model.parameters()]
    if how == "load_state_dict":
        model.load_state_dict(dict(zip(model.state_dict(), new, strict=True)))
    elif how == "vector_to_parameters":
        nn.utils.vector_to_parameters(torch.cat([p.flatten() for p in new]), model.parameters())
    elif how == "data":
        for p in model.parameters():
            p.data.fill_(0.25)
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.25)
    seen = []
    train(model, opt, [12], seen=seen)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], new, strict=True))


@pytest.mark.parametrize("also", ["algorithm", "precision", "table"])
def test_weights_that_the_user_sets_are_not_lost_if_something_else_changes_too(also):
    model = nn.Embedding(4, 3, sparse=True) if also == "table" else nn.Linear(4, 3)
    opt = VSGD(model.parameters())

    def loss():
        seen.append(model.weight.detach().clone())
        x = torch.arange(4) if also == "table" else torch.eye(4, dtype=model.weight.dtype)
        return (model(x) - 1).square().mean()

    seen = []
    for _ in range(12):
        opt.minimize(loss)
    seen.clear()
    with torch.no_grad():
        model.weight.fill_(0.25)
    if also == "precision":
        model.double()
    else:
        opt.param_groups[0]["algorithm"] = NETWORKS._replace(step_limit=2.0)
    opt.minimize(loss)
    assert (seen[0] == 0.25).all()


def test_a_layer_that_is_initialized_anew_after_loading_starts_anew():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(12))
    again = copy.deepcopy(model)
    resumed = VSGD(again.parameters())
    resumed.load_state_dict(opt.state_dict())
    with torch.no_grad():
        for p in again[2].parameters():
            p.fill_(0.25)
            del resumed.state[p]
    seen = []
    train(again, resumed, [12], seen=seen)
    assert all((p == 0.25).all() for p in seen[0][2:])
    assert torch.equal(seen[0][0], opt.state[model[0].weight]["iterate"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_training_resumes_to_the_bit(dtype, order):
    model = network(dtype)
    opt = VSGD(model.parameters())
    train(model, opt, range(15))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train(model, opt, range(15, 25))

    again = network(dtype)
    resumed = VSGD(again.parameters())
    loads = [lambda: again.load_state_dict(saved[0]), lambda: resumed.load_state_dict(saved[1])]
    for load in loads if order == "model first" else reversed(loads):
        load()
    train(again, resumed, range(15, 25))
    assert all(p.dtype == dtype for p in again.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(model), strict=True))


def test_averages_of_coarse_parameters_are_kept_in_full():
    model = network(torch.bfloat16)
    opt = VSGD(model.parameters())
    train(model, opt, range(40))
    for p in model.parameters():
        average = opt.state[p]["average"]
        assert average.dtype == torch.float32
        assert torch.equal(p, average.to(torch.bfloat16))
        assert opt.state[p]["iterate"].dtype == torch.float32
        assert p.dtype == torch.bfloat16


def test_rows_of_a_table_are_averaged_over_their_own_updates():
    torch.manual_seed(0)
    table = nn.Embedding(4, 3, sparse=True, dtype=torch.float64)
    opt = VSGD(table.parameters(), algorithm=NETWORKS._replace(probe_interval=1))
    target = torch.randn(4, 3, dtype=torch.float64)
    expected, updates = weights(table)[0], [0] * 4
    for step in range(60):
        rows = torch.tensor([0, 1]) if step % 3 else torch.tensor([0, 2])

        def closure(rows=rows, step=step):
            opt.zero_grad()
            noise = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            loss = (table(rows) - target[rows] - 0.1 * noise).square().sum()
            loss.backward()
            return loss

        opt.step(closure)
        for row in rows.tolist():
            updates[row] += 1
            if updates[row] > BOOTSTRAP:
                iterate = opt.state[table.weight]["iterate"][row]
                expected[row] += (iterate - expected[row]) / (updates[row] - BOOTSTRAP) ** 0.5
    torch.testing.assert_close(weights(table)[0], expected)
    torch.testing.assert_close(table.weight[0], target[0], atol=0.1, rtol=0)


def test_nothing_is_kept_where_nothing_is_averaged():
    model = network()
    opt = VSGD(model.parameters(), algorithm=NETWORKS._replace(average_iterates=False))
    train(model, opt, range(10))
    assert all("iterate" not in state for state in opt.state.values())


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
def test_the_scale_of_the_loss_does_not_matter(scale):
    tracks = []
    for factor in (1.0, scale):
        model = network(torch.float64)
        tracks.append(weights(train(model, VSGD(model.parameters()), range(100), scale=factor)))
    torch.testing.assert_close(*tracks, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_nor_where_nobody_has_seen_any_curvature(scale):
    """A loss without curvature: a step for itself is then no longer than the last probe, whatever the gradient."""
    tracks = []
    for factor in (1.0, scale):
        theta = nn.Parameter(torch.ones(3, dtype=torch.float64))
        opt = VSGD([theta], algorithm=NETWORKS._replace(max_horizon=1.0, max_momentum=0.0))
        for step in range(30):
            before = opt.state[theta].get("iterate", theta).detach().clone()

            def closure(factor=factor, theta=theta, opt=opt):
                opt.zero_grad()
                loss = factor * theta.sum()
                loss.backward()
                return loss

            opt.step(closure)
            moved = (opt.state[theta]["iterate"] - before).abs()
            assert moved.max() <= 0.0301, step  # the parameters were 1 at the start
        tracks.append(theta.detach().clone())
    torch.testing.assert_close(*tracks, rtol=1e-9, atol=1e-12)
    assert (tracks[0] < 0.9).all()


# --- rates for more than one step ---------------------------------------------------------------------------------


def test_rates_rise_where_there_is_no_noise():
    """One minibatch, learned by heart: progress is all there is."""
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, [0] * 300)
    assert 1.5 < opt.param_groups[0]["progress"][2] <= NETWORKS.max_horizon


def test_rates_fall_back_where_noise_is_all_there_is():
    torch.manual_seed(0)
    theta = nn.Parameter(torch.ones(20))
    opt = VSGD([theta])
    factors = []
    for _ in range(400):
        target = 3 * torch.randn(20)
        opt.minimize(lambda target=target: (theta - target).square().sum())
        factors.append(opt.param_groups[0]["progress"][2])
    assert max(factors[200:]) < 1.5
    assert factors[-1] < 1.2


def test_rates_do_not_depend_on_how_rows_are_reduced():
    tracks, factors = [], []
    for reduction in (torch.mean, torch.sum):
        model = network(torch.float64)
        opt = VSGD(model.parameters(), per_sample=Rows(model, reduction.__name__))
        for step in range(80):
            x, y = batch(step, torch.float64)
            opt.minimize(lambda x=x, y=y, model=model, reduction=reduction: reduction((model(x) - y).square()))
        tracks.append(weights(model))
        factors.append(opt.param_groups[0]["progress"][2])
    torch.testing.assert_close(*tracks, rtol=1e-8, atol=1e-10)
    assert factors[0] == pytest.approx(factors[1]) != 1


def test_a_checkpoint_has_the_factor_of_the_rates():
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(40))
    twin = copy.deepcopy(model)
    other = VSGD(twin.parameters())
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["progress"] == opt.param_groups[0]["progress"]
    broken = opt.state_dict()
    broken["param_groups"][0]["progress"] = [0.0, 0.0, 0.5, 0.0]
    with pytest.raises(ValueError, match="'progress' of group 0 is"):
        other.load_state_dict(broken)


def test_rates_stay_where_a_table_learns():
    """How much noise its rows have is not known."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="mean"), nn.Linear(4, 1))
    opt = VSGD(model.parameters())
    rows, target = torch.randint(10, (16, 3)), torch.randn(16, 1)
    for _ in range(100):
        opt.minimize(lambda: (model(rows) - target).square().mean())
    assert opt.param_groups[0]["progress"][2] == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("averaging", [1e12, 0.0, 0.0]), ("averaging", [2.0**40, 0.0, 0.0]), ("steps", 10**400), ("samples", 10**400)],
)
def test_a_checkpoint_with_impossible_numbers_is_refused(key, value):
    model = network()
    opt = VSGD(model.parameters())
    train(model, opt, range(5))
    broken = opt.state_dict()
    broken["param_groups"][0][key] = value
    with pytest.raises(ValueError, match="the state is damaged"):
        opt.load_state_dict(broken)
