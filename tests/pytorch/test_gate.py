"""Nothing reaches compiled code that does not fit, and nothing is left half-done."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from closures import closure_of
from torch import nn

from vsgd import COLUMNS, NETWORKS, PAPER
from vsgd.torch import VSGD

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(steps: int = 6, **options):
    model = network()
    opt = VSGD(model.parameters(), **options)
    closure = closure_of(opt, lambda: F.cross_entropy(model(X), Y))
    for _ in range(steps):
        opt.step(closure)
    return model, opt, closure


def test_an_algorithm_of_another_front_end_is_refused():
    with pytest.raises(TypeError, match=r"vsgd\.Networks or vsgd\.Paper"):
        VSGD(network().parameters(), algorithm=COLUMNS)
    _, opt, closure = trained()
    opt.param_groups[0]["algorithm"] = COLUMNS
    with pytest.raises(TypeError, match=r"vsgd\.Networks or vsgd\.Paper"):
        opt.step(closure)


def test_a_model_instead_of_parameters_is_refused():
    with pytest.raises(TypeError, match=r"VSGD\(model.parameters\(\), per_sample=model\)"):
        VSGD(network())


def test_a_learning_rate_that_was_left_over_is_pointed_out():
    with pytest.warns(UserWarning, match="multiplies the learning rates"):
        VSGD(network().parameters(), lr=1e-3)


@pytest.mark.parametrize("algorithm", [None, PAPER], ids=["networks", "paper"])
@pytest.mark.parametrize(
    "key", ["grad", "grad_sq", "curv", "curv_sq", "memory", "seen", "totals", "iterate", "left_cov"]
)
@pytest.mark.parametrize("value", [torch.zeros(1, 1), torch.zeros(7), torch.zeros(40, dtype=torch.int64), None, "text"])
def test_a_state_that_does_not_fit_is_refused_and_nothing_loaded(algorithm, key, value):
    _, opt, closure = trained(**({} if algorithm is None else {"algorithm": algorithm}))
    before = copy.deepcopy(opt.state_dict()["state"])
    saved = copy.deepcopy(opt.state_dict())
    if value is None and key not in saved["state"][0]:
        pytest.skip("it is not there to be taken away")
    if value is None and key == "iterate":
        pytest.skip("without it, training goes on from the weights")
    saved["state"][0][key] = value
    with pytest.raises(ValueError, match=key):
        opt.load_state_dict(saved)
    torch.testing.assert_close(opt.state_dict()["state"], before, rtol=0, atol=0)
    opt.step(closure)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("key", ["grad", "grad_sq", "curv", "curv_sq", "memory", "totals", "iterate", "left_cov"])
def test_numbers_that_no_training_leaves_are_refused(key, value):
    _, opt, closure = trained()
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0][key].view(-1)[1] = value
    before = copy.deepcopy(opt.state_dict()["state"])
    with pytest.raises(ValueError, match=rf"'(totals|left_basis|{key})'.* of parameter 0.*Nothing was loaded"):
        opt.load_state_dict(saved)
    torch.testing.assert_close(opt.state_dict()["state"], before, rtol=0, atol=0)
    opt.step(closure)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: saved["param_groups"][0].pop("lr"), "has no 'lr'"),
        (lambda saved: saved["param_groups"][0].update(steps=2.5), "'steps' of group 0 is 2.5"),
        (lambda saved: saved["param_groups"][0].update(steps=10**400), "'steps' of group 0 is 1000"),
        (lambda saved: saved["param_groups"][0].update(samples=-1.0), "'samples' of group 0 is -1.0"),
        (lambda saved: saved["param_groups"][0].update(averaging=[2.0**40, 0.0, 0.0]), "averaging window of group 0"),
        (lambda saved: saved["param_groups"][0].update(params=[0, 0, 1, 2]), "'params'"),
        (lambda saved: saved["param_groups"][0]["algorithm"].update(name="Columns"), "Networks or Paper"),
        (lambda saved: saved["param_groups"][0]["algorithm"].pop("epsilon"), "'epsilon': None"),
        (lambda saved: saved["param_groups"][0]["algorithm"].update(epsilon=1e300), "'epsilon': 1e.300"),
        (lambda saved: saved["state"].update({9: {}}), "parameter 9, which is in no group"),
        (lambda saved: saved.pop("state"), "not one of VSGD"),
    ],
)
def test_a_checkpoint_that_lacks_something_is_refused(change, words):
    """Loaded once, and a KeyError in the next step."""
    _, opt, closure = trained()
    saved = copy.deepcopy(opt.state_dict())
    change(saved)
    with pytest.raises(ValueError, match=rf"{words}.*Nothing was loaded"):
        opt.load_state_dict(saved)
    opt.step(closure)


def trained_table():
    torch.manual_seed(0)
    table, words = nn.Embedding(9, 3, sparse=True), torch.arange(16) % 9
    opt = VSGD(table.parameters())
    closure = closure_of(opt, lambda: F.cross_entropy(table(words), Y))
    for _ in range(6):
        opt.step(closure)
    return table, opt, closure


@pytest.mark.parametrize("make", [trained, trained_table], ids=["dense", "table"])
@pytest.mark.parametrize("loaded", [False, True], ids=["between steps", "after loading"])
@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(7),
        torch.zeros(9, 3, dtype=torch.int64),
        torch.zeros(8, 5).to_sparse(),
        torch.zeros(8, 5, device="meta"),
        None,
        "text",
    ],
    ids=["shape", "integers", "sparse", "meta", "nothing", "text"],
)
def test_a_state_edited_by_hand_is_refused_and_nothing_changes(make, loaded, value):
    _, opt, closure = make()
    if loaded:
        opt.load_state_dict(opt.state_dict())
    first = opt.param_groups[0]["params"][0]
    before = first.detach().clone()
    opt.state[first]["curv"] = value
    with pytest.raises(ValueError, match=r"'curv' of parameter 0.*opt\.state\.clear\(\)"):
        opt.step(closure)
    assert torch.equal(first, before)
    opt.state.clear()
    opt.step(closure)


def test_a_key_of_the_state_that_is_not_a_parameter_is_refused():
    _, opt, closure = trained()
    opt.state["text"] = {"moment": torch.ones(3)}
    with pytest.raises(ValueError, match="an entry for 'text', which is not a parameter"):
        opt.step(closure)


@pytest.mark.parametrize("make", [trained, trained_table], ids=["dense", "table"])
def test_an_entry_of_the_state_that_was_replaced_by_a_copy_is_used_and_saved(make):
    results = []
    for replaces in (False, True):
        _, opt, closure = make()
        for state in opt.state.values():
            state.update({key: value.clone() for key, value in state.items()} if replaces else {})
        for _ in range(5):
            opt.step(closure)
        results.append(opt.state_dict()["state"])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_something_else_in_the_list_of_parameters_is_refused():
    model, opt, closure = trained()
    before = copy.deepcopy(model.state_dict())
    opt.param_groups[0]["params"].append("text")
    with pytest.raises(TypeError, match="parameter 4 of group 0 is str, it must be a tensor"):
        opt.step(closure)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    opt.param_groups[0]["params"][4] = model[0].weight
    with pytest.raises(ValueError, match="parameter 0 of group 0 and parameter 4 of group 0 share memory"):
        opt.step(closure)


def test_counts_in_another_precision_are_taken():
    _, opt, closure = trained()
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        state.update({key: state[key].to(torch.bfloat16) for key in ("seen", "steps")})
    opt.load_state_dict(saved)
    opt.step(closure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_so_small_that_the_square_of_a_probe_vanishes(dtype):
    p = nn.Parameter(torch.full((6,), 1e-30, dtype=dtype))
    opt = VSGD([p])
    for _ in range(20):
        opt.step(closure_of(opt, lambda: (p.float() - 1).square().sum()))
    assert torch.isfinite(p).all()
    assert all(torch.isfinite(value).all() for value in opt.state[p].values())


@pytest.mark.parametrize("shape", [(1,), (8, 6), (80, 50)])
def test_a_parameter_that_was_resized_is_refused(shape):
    model, opt, closure = trained()
    model[0].weight.data = torch.randn(shape)
    with pytest.raises(ValueError, match="changed its shape"):
        opt.step(closure)


def closure_that(change, weight, opt):
    """A closure that changes the memory of a parameter before it uses it."""

    def closure():
        opt.zero_grad()
        weight.data = change(weight.data)
        loss = weight.sum()
        loss.backward()
        return loss

    return closure


def test_a_closure_that_resizes_a_parameter_is_refused():
    model, opt, closure = trained()
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="must not change the shape"):
        opt.step(closure_that(lambda data: torch.randn(9, 5), model[0].weight, opt))
    assert torch.equal(model[0].weight, before)
    opt.step(closure)


@pytest.mark.parametrize("algorithm", [NETWORKS, PAPER], ids=["networks", "paper"])
def test_a_closure_that_resizes_a_parameter_after_the_backward_pass_is_refused(algorithm):
    model, opt, closure = trained(algorithm=algorithm)
    before = model[0].weight.detach().clone()

    def resizing():
        loss = closure()
        model[0].weight.data = torch.randn(9, 5)
        return loss

    with pytest.raises(RuntimeError, match="must not change the shape"):
        opt.step(resizing)
    assert torch.equal(model[0].weight, before)
    opt.step(closure)


def test_a_closure_that_recasts_a_parameter_corrupts_nothing():
    model, opt, _ = trained()
    opt.step(closure_that(lambda data: data.double(), model[0].weight, opt))
    model.float()
    opt.step(closure_of(opt, lambda: F.cross_entropy(model(X), Y)))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_gradients_without_memory_and_with_lazy_signs():
    p = nn.Parameter(torch.ones(5))
    opt = VSGD([p])
    for step in range(12):

        def closure(step=step):
            p.grad = torch._efficientzerotensor(5) if step == 9 else torch._neg_view(-2 * p.detach())
            return p.detach().square().sum()

        opt.step(closure)
    assert torch.isfinite(p).all()
    assert (p.abs() < 1).all()


def test_parameters_that_overlap_are_refused():
    buffer = torch.zeros(10)
    with pytest.raises(ValueError, match="share memory"):
        VSGD([nn.Parameter(buffer[:6]), nn.Parameter(buffer[4:])])


def test_forward_outside_the_closure_is_told():
    layer = nn.Linear(5, 3, bias=False)
    opt = VSGD(layer.parameters())
    loss = F.cross_entropy(layer(X), Y)

    def closure():
        opt.zero_grad()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError, match="forward pass itself"):
        opt.step(closure)


@pytest.mark.parametrize("what", ["data", "generator", "hidden state"])
def test_a_closure_that_does_not_repeat_itself_is_refused_in_the_first_step(what):
    model = network()
    opt = VSGD(model.parameters())
    generator, carried = torch.Generator().manual_seed(1), [torch.zeros(16, 5)]
    batches = iter(torch.randn(10, 16, 5))
    before = copy.deepcopy(model.state_dict())

    def loss():
        x = X
        if what == "data":
            x = next(batches)
        elif what == "generator":
            x = X + torch.randn(16, 5, generator=generator)
        else:
            carried[0] = carried[0] + 1
            x = X + carried[0]
        return F.cross_entropy(model(x), Y)

    with pytest.raises(RuntimeError, match="Usual causes"):
        opt.step(closure_of(opt, loss))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not opt.state


class Queue(nn.Module):
    """Keeps what it has seen, as a codebook or a queue of negatives does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(16, 5))

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().clone() + self.calls  # replaced, not written to
        return self.layer(x)


def test_buffers_of_any_module_see_each_minibatch_once():
    model = Queue()
    opt = VSGD(model.parameters())
    calls = []

    def loss():
        calls.append(1)
        return F.cross_entropy(model(X), Y)

    for _ in range(25):
        opt.step(closure_of(opt, loss))
    assert len(calls) > 25
    assert model.calls == 25
    assert torch.equal(model.last, X + 25)
