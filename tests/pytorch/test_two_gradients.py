"""What a second gradient evaluation gets wrong if one is not careful."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from closures import closure_of
from torch import nn

from vsgd import NETWORKS, PAPER
from vsgd.torch import VSGD

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(dim=1)


def closure_for(model, opt, scale=lambda loss: loss):
    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        scale(loss).backward()
        return loss

    return closure


def test_dropout_masks_are_the_same_and_the_generator_moves_on_once():
    masks = []

    class Watched(nn.Dropout):
        def forward(self, x):
            out = super().forward(x)
            masks.append((out != 0).clone())
            return out

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), Watched(0.5), nn.Linear(50, 3))
    opt = VSGD(model.parameters())
    torch.manual_seed(7)
    opt.step(closure_for(model, opt))
    after_step = torch.rand(1)
    assert len(masks) == 3
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    torch.manual_seed(7)
    closure_for(model, opt)()
    assert torch.equal(torch.rand(1), after_step)
    opt.zero_grad()
    opt.step(closure_for(model, opt))
    assert not torch.equal(masks[0], masks[-1]), "the next step has masks of its own"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_running_statistics_are_updated_once(compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    twin[1].momentum = 1.0  # the first minibatch has no predecessors in the average
    called = torch.compile(model, backend="aot_eager") if compiled else model
    opt = VSGD(model.parameters())
    opt.step(closure_for(called, opt))
    twin(X)
    torch.testing.assert_close(dict(model[1].named_buffers()), dict(twin[1].named_buffers()))
    assert model[1].num_batches_tracked == 1


def test_a_buffer_that_a_module_adds_later_is_restored_after_a_probe():
    class Counter(nn.Module):
        def forward(self, x):
            if calls[0] == 5:  # registered after the parts of the model are known
                self.register_buffer("calls", torch.zeros(()))
            calls[0] += 1
            if hasattr(self, "calls"):
                self.calls += 1
            return x

    torch.manual_seed(0)
    calls = [0]
    counter = Counter()
    model = nn.Sequential(nn.Linear(6, 8), counter, nn.Linear(8, 3))
    opt = VSGD(model.parameters())
    probes = steps = 0
    for _ in range(40):
        before = calls[0]
        opt.step(closure_for(model, opt))
        opt.zero_grad()
        if hasattr(counter, "calls"):
            steps += 1
            probes += calls[0] - before > 1
    assert probes > 0
    assert counter.calls == steps


class Count(nn.Module):
    """Counts its calls in a buffer, if it has one."""

    def forward(self, x):
        if isinstance(getattr(self, "calls", None), torch.Tensor):
            self.calls += 1
        return x


def test_a_skipped_step_restores_a_buffer_and_a_module_that_were_added_before_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Count(), Count(), nn.Linear(8, 3))
    opt = VSGD(model.parameters())
    for _ in range(5):
        opt.step(closure_for(model, opt))
        opt.zero_grad()
    model[1].register_buffer("calls", torch.zeros(()))
    model[2] = Count()
    model[2].register_buffer("calls", torch.zeros(()))
    opt.step(closure_for(model, opt, lambda loss: loss * torch.nan))
    assert opt.info().skipped == 1
    assert model[1].calls == model[2].calls == 0


def test_a_buffer_may_become_an_attribute():
    model = nn.Sequential(nn.Linear(6, 8), Count(), nn.Linear(8, 3))
    model[1].register_buffer("calls", torch.zeros(()))
    opt = VSGD(model.parameters())
    for step in range(20):
        if step == 4:
            del model[1].calls
            model[1].calls = 1.0
        opt.step(closure_for(model, opt))
        opt.zero_grad()


def test_micro_batches_with_equal_losses_and_other_gradients_get_no_warning():
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    opt = VSGD(model.parameters())
    rows = torch.tensor([[1.0, 1, 0, 0], [1.0, 1, 1, 0]])
    target = torch.ones(1, 1)
    opt.minimize([lambda x=x: F.binary_cross_entropy_with_logits(model(x[None]), target) for x in rows])


@pytest.mark.parametrize(
    "make", [lambda m: VSGD(m.parameters()), lambda m: VSGD(m.parameters(), per_sample=m)], ids=["minibatch", "samples"]
)
def test_a_scaled_loss_gives_the_same_training(make):
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        opt = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        for _ in range(25):
            opt.step(closure_for(model, opt, scaler.scale), scaler=scaler)
            scaler.update()
        results.append(dict(model.state_dict()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("call", [1, 2])
def test_an_overflow_is_skipped_and_the_scale_is_lowered(call):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    opt = VSGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = copy.deepcopy(model.state_dict())
    calls = []

    def scale(loss):
        calls.append(0)
        return scaler.scale(loss) * (float("inf") if len(calls) == call else 1.0)

    opt.step(closure_for(model, opt, scale), scaler=scaler)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    opt.step(closure_for(model, opt, scaler.scale), scaler=scaler)
    scaler.update()
    assert scaler.get_scale() == 2.0**9


def test_autocast_and_clipping_inside_the_closure():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = VSGD(model.parameters())

    def closure():
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(X), Y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    losses = [float(opt.step(closure)) for _ in range(150)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_compiled_model_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    for inner, called in ((model, torch.compile(model, backend="aot_eager")), (twin, twin)):
        opt = VSGD(inner.parameters())
        for _ in range(20):
            opt.step(closure_for(called, opt))
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_compiled_model_stays_compiled(dropout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 3))
    graphs, calls, evaluations = [], [], []

    def backend(graph, inputs):
        graphs.append(graph)

        def compiled(*arguments):
            calls.append(0)
            torch.rand(())  # compiled code draws random numbers of its own
            return graph.forward(*arguments)

        return compiled

    called = torch.compile(model, backend=backend)
    opt = VSGD(model.parameters())
    for _ in range(30):
        opt.step(closure_of(opt, lambda: evaluations.append(0) or F.cross_entropy(called(X), Y)))
    assert len(graphs) <= 2, "one, and another where more is known not to change"
    assert len(calls) == len(evaluations) - 1, "all but the one that counts operations"


def test_rounding_is_no_sign_of_a_closure_that_does_not_repeat_itself():
    """The gradient of a bias before BatchNorm is zero but for rounding, which differs from evaluation to evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    opt, orders = VSGD(model.parameters()), [torch.randperm(len(X)) for _ in range(3)]

    def loss():
        order = orders.pop()
        return F.cross_entropy(model(X[order]), Y[order])

    opt.step(closure_of(opt, loss))
    assert not orders


def long_after_a_while(scale: float, steps: int):
    """Closure calls at each step, when the loss of the last one is multiplied."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    opt = VSGD(model.parameters())
    calls = []
    for step in range(steps):
        calls.append(0)
        rows = torch.randint(len(X), (8,))

        def loss(rows=rows, times=scale if step == steps - 1 else 1.0):
            calls[-1] += 1
            return times * F.cross_entropy(model(X[rows]), Y[rows])

        opt.step(closure_of(opt, loss))
    return calls


def test_an_unusually_long_gradient_is_looked_at_twice():
    assert long_after_a_while(1.0, steps=23)[11:] == [1, 2, *[1] * 9, 2], "ten steps after the last second gradient"
    assert long_after_a_while(100.0, steps=18)[-1] == 2, "five will do where the first is long"
    assert long_after_a_while(100.0, steps=17)[-1] == 1


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_a_deep_network_learns_one_minibatch_by_heart(activation):
    """Without noise all coordinates step at once, and the curvature that counts can change between two looks at it."""
    torch.manual_seed(0)
    layers = [layer for _ in range(11) for layer in (nn.Linear(64, 64), activation())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    opt = VSGD(model.parameters())
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    closure = closure_of(opt, lambda: F.cross_entropy(model(x), y))
    losses = [float(opt.step(closure)) for _ in range(300)]
    assert max(losses) < 50
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("algorithm", [NETWORKS._replace(probe_interval=1), PAPER], ids=["networks", "paper"])
def test_a_probe_leaves_tensors_without_a_gradient_where_they_are(algorithm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = VSGD(model.parameters(), algorithm=algorithm)
    for _ in range(12):
        opt.minimize(lambda: F.cross_entropy(model(X), Y))
    frozen = [model[0].weight, model[2].bias]
    for parameter in frozen:
        parameter.requires_grad_(False)
    seen = []

    def loss():
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
        return F.cross_entropy(model(X), Y)

    opt.minimize(loss)
    first, second = seen
    moved = [not torch.equal(*pair) for pair in zip(first, second, strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]


class TestGradientsOfOthers:
    """A step leaves on parameters that are not its own what one backward pass leaves."""

    @pytest.mark.parametrize("steps", [1, 12])
    def test_they_are_accumulated_once(self, steps):
        torch.manual_seed(0)
        model, head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)
        scale = torch.ones(3, requires_grad=True)
        opt = VSGD(model.parameters())
        for _ in range(steps):
            head.weight.grad, head.bias.grad, scale.grad = None, torch.ones(3), torch.ones(3)
            with opt.iterates():
                expected = torch.autograd.grad(
                    F.cross_entropy(head(model(X)) * scale, Y), [head.weight, head.bias, scale]
                )
            opt.minimize(lambda: F.cross_entropy(head(model(X)) * scale, Y))
            torch.testing.assert_close(head.weight.grad, expected[0])
            torch.testing.assert_close(head.bias.grad, expected[1] + 1)
            torch.testing.assert_close(scale.grad, expected[2] + 1)

    def test_a_failed_step_leaves_them_as_they_were(self):
        torch.manual_seed(0)
        model, head = nn.Linear(6, 8), nn.Linear(8, 3)
        opt = VSGD(model.parameters())
        head.weight.grad = before = torch.ones(3, 8)

        def closure():
            loss = F.cross_entropy(head(model(X)), Y)
            loss.backward()
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            opt.step(closure)
        assert head.weight.grad is before
        assert torch.equal(before, torch.ones(3, 8))
        assert head.bias.grad is None


class TestRepeatability:
    def test_a_hidden_state_that_is_none_at_first_is_found_in_the_second_step(self):
        torch.manual_seed(0)
        model = nn.GRU(6, 4, batch_first=True)
        hidden = None

        def loss():
            nonlocal hidden
            out, new = model(X[:, None], hidden)
            hidden = new.detach()
            return out.square().mean()

        def first_step():
            nonlocal hidden
            hidden = None
            return loss()

        opt = VSGD(model.parameters())
        opt.minimize(first_step)
        with pytest.raises(RuntimeError, match="does not compute the same"):
            opt.minimize(loss)

    def test_noise_that_starts_later_gets_a_warning(self):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        generator = torch.Generator().manual_seed(0)
        opt = VSGD(model.parameters())
        opt.minimize(lambda: F.cross_entropy(model(X), Y))
        for group in opt.param_groups:
            group["steps"] = 2000
        with pytest.warns(UserWarning, match="does not compute the same"):
            opt.minimize(lambda: F.cross_entropy(model(X + torch.randn(X.shape, generator=generator)), Y))

    def test_gradients_after_a_check_are_those_of_the_first_call(self):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        opt = VSGD(model.parameters())
        for _ in range(2):
            opt.minimize(lambda: F.cross_entropy(model(X), Y))
        with opt.iterates():
            expected = torch.autograd.grad(F.cross_entropy(model(X), Y), [*model.parameters()])
        for group in opt.param_groups:
            group["steps"], group["unprobed"] = 2000, 1
        opt.minimize(lambda: F.cross_entropy(model(X), Y))
        torch.testing.assert_close([p.grad for p in model.parameters()], [*expected])


def test_micro_batches_that_are_all_the_same_get_a_warning():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    opt = VSGD(model.parameters())
    closures = []
    for k in range(2):
        part = X[16 * k : 16 * k + 16]
        closures.append(lambda: model(part).square().mean())  # noqa: B023  # the mistake itself
    with pytest.warns(UserWarning, match="each must bind its own batch"):
        opt.minimize(closures)


@pytest.mark.parametrize("scale", [1e-18, 1e-30])
def test_gradients_too_small_to_be_squared_get_a_warning(scale):
    model = nn.Linear(6, 3)
    opt = VSGD(model.parameters())
    with pytest.warns(UserWarning, match="Multiply the loss by a constant"):
        opt.minimize(lambda: scale * F.cross_entropy(model(X), Y))


def test_gradients_added_to_those_that_a_step_has_left_are_an_error():
    model = nn.Linear(6, 3)
    opt = VSGD(model.parameters())
    opt.minimize(lambda: F.cross_entropy(model(X), Y))
    F.cross_entropy(model(X), Y).backward()  # accumulates in place
    with pytest.raises(RuntimeError, match="pass the micro-batches as a list"):
        opt.minimize(lambda: F.cross_entropy(model(X), Y))
