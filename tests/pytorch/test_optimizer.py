"""The optimizer as its users meet it."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from closures import closure_of
from torch import nn

from vsgd import NETWORKS, PAPER
from vsgd.torch import VSGD, Replicas, Rows


def make_model(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(step: int = 0, dtype=torch.float32, rows: int = 16):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 5, generator=generator)
    return x.to(dtype), (x[:, :3].argmax(dim=1))


def closure_for(model, opt, step: int = 0, dtype=torch.float32):
    x, y = batch(step, dtype)

    return closure_of(opt, lambda: F.cross_entropy(model(x), y))


def train(model, opt, steps: range, dtype=torch.float32):
    return [float(opt.step(closure_for(model, opt, step, dtype))) for step in steps]


def snapshot(model, opt):
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        group.pop("param_names", None)  # text, which the comparison below does not take
        group["algorithm"] = {k: v for k, v in group["algorithm"].items() if k != "name"}
    return copy.deepcopy(dict(model.state_dict())), saved


def assert_same(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


KINDS = {
    "minibatch": lambda m, **k: VSGD(m.parameters(), **k),
    "samples": lambda m, **k: VSGD(m.parameters(), per_sample=m, **k),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@kinds
def test_learns(make):
    model = make_model()
    losses = train(model, make(model), range(300))
    assert sum(losses[-20:]) / 20 < 0.6 * losses[0]


@kinds
@pytest.mark.parametrize("split", [1, 4, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resumes_bit_for_bit(make, split, dtype):
    """From a file that holds nothing but tensors and numbers; after 4 steps the averages are still being started."""
    model = make_model(dtype)
    opt = make(model, algorithm=NETWORKS._replace(probe_interval=3))
    train(model, opt, range(split), dtype)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    train(model, opt, range(split, split + 25), dtype)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = make_model(dtype)
    again.load_state_dict(saved["model"])
    resumed = make(again)
    resumed.load_state_dict(saved["opt"])
    train(again, resumed, range(split, split + 25), dtype)
    assert_same(snapshot(again, resumed), snapshot(model, opt))


def test_state_of_another_model_is_refused():
    model = make_model()
    opt = VSGD(model.parameters())
    train(model, opt, range(3))
    before = snapshot(model, opt)
    other = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    other_opt = VSGD(other.parameters())
    train(other, other_opt, range(3))
    with pytest.raises(ValueError, match="another model"):
        opt.load_state_dict(other_opt.state_dict())
    with pytest.raises(ValueError, match="group"):
        opt.load_state_dict(VSGD(nn.Linear(2, 2).parameters()).state_dict())
    assert_same(snapshot(model, opt), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_precisions(dtype):
    model = make_model(dtype)
    opt = VSGD(model.parameters())
    losses = train(model, opt, range(200), dtype)
    assert all(p.dtype == dtype for p in model.parameters())
    assert sum(losses[-20:]) / 20 < 0.8 * losses[0]


def test_memory_layout_does_not_matter():
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=layout).double()
        opt = VSGD(model.parameters())
        x = torch.randn(8, 3, 6, 6, dtype=torch.float64)
        for _ in range(30):
            opt.step(closure_of(opt, lambda model=model, x=x: model(x).abs().mean()))
        results.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*results)


class TestGroups:
    def test_each_has_its_multiplier_decay_and_options(self):
        model = make_model()
        groups = [
            {"params": model[0].parameters(), "lr": 0.0},
            {"params": model[2].parameters(), "weight_decay": 0.1, "algorithm": PAPER._replace(epsilon=1e-4)},
        ]
        opt = VSGD(groups)
        before = copy.deepcopy(model.state_dict())
        train(model, opt, range(20))
        assert torch.equal(model[0].weight, before["0.weight"])
        assert not torch.equal(model[2].weight, before["2.weight"])
        assert opt.param_groups[1]["algorithm"].epsilon == 1e-4
        assert opt.param_groups[0]["algorithm"] is NETWORKS

    def test_a_schedule_multiplies_the_rates(self):
        model = make_model()
        opt = VSGD(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.5**t)
        train(model, opt, range(1))
        schedule.step()
        assert opt.param_groups[0]["lr"] == 0.5

    def test_a_group_may_come_later(self):
        model = make_model()
        opt = VSGD(model[0].parameters())
        train(model, opt, range(15))
        opt.add_param_group({"params": model[2].parameters()})
        before = model[2].weight.detach().clone()
        train(model, opt, range(15, 40))
        assert not torch.equal(model[2].weight, before)

    def test_weight_decay_shrinks_by_the_rms_of_the_step(self):
        results = []
        for decay in (0.0, 0.25):
            model = make_model(torch.float64)
            opt = VSGD(model.parameters(), algorithm=PAPER)
            train(model, opt, range(20), torch.float64)
            before = model[0].weight.detach().clone()
            opt.param_groups[0]["weight_decay"] = decay
            opt.step(closure_for(model, opt, 20, torch.float64))
            results.append(model[0].weight.detach() - before)
        plain, decayed = results
        torch.testing.assert_close(decayed + before, (plain + before) / (1 + 0.25 * plain.square().mean().sqrt()))

    @pytest.mark.parametrize("bad", [{"lr": -1.0}, {"weight_decay": -0.1}, {"lr": math.nan}, {"lr": math.inf}])
    def test_bad_values_are_refused(self, bad):
        with pytest.raises(ValueError, match="must be finite and at least 0"):
            VSGD(make_model().parameters(), **bad)

    @pytest.mark.parametrize("name", ["compact", "maximize"])
    @pytest.mark.parametrize("value", [3, None, "yes"])
    def test_flags_that_are_not_true_or_false_are_refused(self, name, value):
        with pytest.raises(ValueError, match=f"{name} is {value!r}, it must be True or False"):
            VSGD(make_model().parameters(), **{name: value})

    @pytest.mark.parametrize(("name", "value"), [("lr", math.nan), ("lr", math.inf), ("weight_decay", -1.0)])
    def test_bad_values_set_between_steps_are_refused_and_nothing_changes(self, name, value):
        model = make_model()
        opt = VSGD(model.parameters())
        train(model, opt, range(15))
        before = copy.deepcopy(model.state_dict())
        opt.param_groups[0][name] = value
        with pytest.raises(ValueError, match=f"{name} is {value:g}, it must be finite and at least 0"):
            train(model, opt, range(15, 16))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)

    @pytest.mark.parametrize("value", [10**400, "text", None, torch.ones(2)], ids=["400 digits", "text", "None", "two"])
    @pytest.mark.parametrize("name", ["lr", "weight_decay"])
    def test_values_that_are_not_numbers_are_refused(self, name, value):
        model = make_model()
        opt = VSGD(model.parameters())
        train(model, opt, range(2))
        opt.param_groups[0][name] = value
        with pytest.raises(ValueError, match=f"{name} is .* it must be a number"):
            train(model, opt, range(2, 3))

    def test_a_schedule_of_another_optimizer_gets_one_warning(self):
        model = make_model()
        opt = VSGD(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-3, total_steps=100, cycle_momentum=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(40):
                train(model, opt, [step])
                schedule.step()
        (warning,) = caught
        assert "an lr of at most" in str(warning.message)

    def test_a_warm_up_gets_no_warning(self):
        model = make_model()
        opt = VSGD(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: min(1.0, t / 100))
        for step in range(40):
            train(model, opt, [step])
            schedule.step()
        assert opt.param_groups[0]["lr"] == 0.4

    def test_a_learning_rate_in_a_group_gets_a_warning(self):
        model = make_model()
        with pytest.warns(UserWarning, match="lr=0.0001 multiplies the learning rates"):
            VSGD([{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters()}])

    def test_deprecated_arguments_mean_what_they_did(self):
        model = make_model()
        with pytest.warns(DeprecationWarning, match=r"Rows\(model, reduction='sum', reweight=True\)"):
            old = VSGD(model.parameters(), per_sample=model, reduction="sum", reweight=True)
        assert old._rows[1:] == ("sum", True)
        with pytest.warns(DeprecationWarning, match=r"Replicas\(as_samples=True, reduce_dtype=torch.bfloat16\)"):
            old = VSGD(model.parameters(), samples="replicas", reduce_dtype=torch.bfloat16)
        assert old._distributed == Replicas(as_samples=True, reduce_dtype=torch.bfloat16)
        with pytest.raises(TypeError, match="unexpected argument 'momentum'"):
            VSGD(model.parameters(), momentum=0.9)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"per_sample": "model"}, "must be a model or a vsgd.torch.Rows"),
            ({"per_sample": Rows("model")}, "must be a model or a vsgd.torch.Rows"),
            ({"per_sample": Rows(nn.Linear(1, 1), reduction="max")}, "reduction is 'max'"),
            ({"distributed": "replicas"}, "must be a vsgd.torch.Replicas"),
            ({"distributed": Replicas(), "per_sample": nn.Linear(1, 1)}, "every row is a sample"),
        ],
    )
    def test_impossible_samples_are_refused(self, settings, message):
        with pytest.raises((TypeError, ValueError), match=message):
            VSGD(make_model().parameters(), **settings)

    @pytest.mark.parametrize(("as_samples", "dtype"), [(True, torch.float16), (False, torch.bfloat16)])
    def test_a_reduce_dtype_that_does_nothing_or_overflows_is_refused(self, as_samples, dtype):
        with pytest.raises(ValueError, match="reduce_dtype is"):
            VSGD(make_model().parameters(), distributed=Replicas(as_samples, dtype))

    def test_complex_parameters_are_refused(self):
        with pytest.raises(TypeError, match="complex64"):
            VSGD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])


def test_maximize_mirrors_minimize():
    down, up = make_model(), make_model()
    first, second = VSGD(down.parameters()), VSGD(up.parameters(), maximize=True)
    for step in range(40):
        x, y = batch(step)

        def closure(sign, model, opt, x=x, y=y):
            opt.zero_grad()
            loss = sign * F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        first.step(lambda closure=closure: closure(1, down, first))
        second.step(lambda closure=closure: closure(-1, up, second))
    assert_same(dict(down.state_dict()), dict(up.state_dict()))


def test_unused_and_frozen_parameters_are_left_alone():
    model = make_model()
    model[0].bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(3))
    opt = VSGD([*model.parameters(), unused])
    calls = 0
    for step in range(40):
        closure = closure_for(model, opt, step)

        def counted(closure=closure):
            nonlocal calls
            calls += 1
            return closure()

        opt.step(counted)
    assert torch.equal(unused, torch.ones(3))
    assert unused not in opt.state
    assert calls < 70, "an unused parameter must not ask for a second gradient for ever"


def test_a_probe_interval_saves_evaluations():
    model = make_model()
    opt = VSGD(model.parameters())
    calls = []
    for step in range(50):
        closure = closure_for(model, opt, step)
        opt.step(lambda closure=closure: (calls.append(0), closure())[1])
    due = 50 + 1 + 3 + 4  # a check, three to start with, then at steps 10, 20, 30, 40
    assert due <= len(calls) <= due + 4, "a few more where gradients are long"


def test_hooks_and_gradients_are_there_after_a_step():
    model = make_model()
    opt = VSGD(model.parameters())
    seen = []
    opt.register_step_post_hook(lambda *_: seen.append(1))
    closure = closure_for(model, opt)
    closure()
    expected = [p.grad.clone() for p in model.parameters()]
    opt.step(closure)
    assert seen == [1]
    assert_same([p.grad for p in model.parameters()], expected)


@kinds
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_alike(make, copied):
    model = make_model()
    opt = make(model)
    train(model, opt, range(15))
    twin, twin_opt = copied((model, opt))
    train(model, opt, range(15, 30))
    train(twin, twin_opt, range(15, 30))
    assert_same(snapshot(twin, twin_opt), snapshot(model, opt))


def test_a_parameter_that_only_the_first_evaluation_reaches_is_put_back():
    model = make_model()
    extra = nn.Parameter(torch.ones(3))
    opt = VSGD([*model.parameters(), extra], algorithm=PAPER)
    x, y = batch()
    for step in range(15):
        calls = []

        def closure(step=step, calls=calls):
            opt.zero_grad()
            calls.append(0)
            logits = model(x) + (extra if step > 1 and len(calls) == 1 else 0)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            return loss

        opt.step(closure)
    assert torch.equal(extra, torch.ones(3))


class TestBadInput:
    @kinds
    def test_no_closure(self, make):
        with pytest.raises(TypeError, match=r"def closure\(\)"):
            make(make_model()).step()

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (lambda loss: None, "return loss"),
            (lambda loss: loss.item(), "returned float"),
            (lambda loss: loss.expand(2), "shape"),
        ],
    )
    def test_what_the_closure_returns(self, result, message):
        model = make_model()
        opt = VSGD(model.parameters())
        before = snapshot(model, opt)
        closure = closure_for(model, opt)
        with pytest.raises((TypeError, ValueError), match=message):
            opt.step(lambda: result(closure()))
        assert_same(snapshot(model, opt), before)

    def test_a_loss_that_does_not_depend_on_the_parameters(self):
        opt = VSGD(make_model().parameters())
        with pytest.raises(RuntimeError, match="no gradient"):
            opt.step(lambda: torch.tensor(1.0))

    @kinds
    @pytest.mark.parametrize("call", [1, 2])
    def test_an_exception_in_the_closure_changes_nothing(self, make, call):
        model = make_model()
        opt = make(model, algorithm=NETWORKS._replace(probe_interval=1))
        train(model, opt, range(15))
        before = snapshot(model, opt)
        closure, calls = closure_for(model, opt), []

        def failing():
            calls.append(0)
            if len(calls) == call:
                raise OSError("disk")
            return closure()

        with pytest.raises(OSError, match="disk"):
            opt.step(failing)
        assert len(calls) == call
        assert_same(snapshot(model, opt), before)

    @kinds
    @pytest.mark.parametrize("call", [1, 2])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_step_that_is_not_finite_is_skipped(self, make, call, value):
        model = make_model()
        opt = make(model, algorithm=NETWORKS._replace(probe_interval=1))
        train(model, opt, range(15))
        before = copy.deepcopy((model.state_dict(), opt.state_dict()["state"]))
        closure, calls = closure_for(model, opt), []
        x, y = batch()

        def broken():
            calls.append(0)
            if len(calls) != call:
                return closure()
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) * value
            loss.backward()
            return loss

        opt.step(broken)
        assert_same((model.state_dict(), opt.state_dict()["state"]), before)
        assert opt.param_groups[0]["skipped"] == 1
        train(model, opt, range(1))
        assert opt.param_groups[0]["skipped_in_a_row"] == 0

    def test_ten_in_a_row_are_an_error(self):
        model = make_model()
        opt = VSGD(model.parameters())

        def broken():
            opt.zero_grad()
            loss = model(batch()[0]).sum() * float("nan")
            loss.backward()
            return loss

        for _ in range(9):
            opt.step(broken)
        with pytest.raises(FloatingPointError, match="10 steps in a row"):
            opt.step(broken)

    def test_batchnorm_mixes_samples(self):
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        opt = VSGD(model.parameters(), per_sample=model)
        with pytest.raises(Exception, match="BatchNorm"):
            opt.step(closure_for(model, opt))
