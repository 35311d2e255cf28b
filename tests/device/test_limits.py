"""Training on devices with fewer features than CUDA, and with other settings of torch."""

import io

import pytest
import torch
import torch.nn.functional as F
from device_cases import CASES, Case, Training, mlp
from torch import nn

from vsgd import NETWORKS, PAPER
from vsgd.torch import VSGD
from vsgd.torch.engine_torch import compiled

# --- memory -------------------------------------------------------------------------------------------------------


def test_opaque_addresses_are_not_compared(sim):
    """Opaque addresses of different tensors may be closer together than the sizes of the tensors."""
    with sim.switched(opaque_addresses=True):
        run = Training(CASES["mlp"], "sim")
        assert torch.equal(torch.tensor(run.run(6)), torch.tensor(Training(CASES["mlp"], "sim").run(6)))


def test_shared_memory_is_refused_where_addresses_are_opaque(sim):
    with sim.switched(opaque_addresses=True):
        memory = torch.zeros(10, device="sim")
        with pytest.raises(ValueError, match="share memory"):
            VSGD([nn.Parameter(memory[:6]), nn.Parameter(memory[5:])])
        VSGD([nn.Parameter(memory[:5]), nn.Parameter(memory[5:])])


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_table_keeps_its_iterates_when_its_memory_moves(device):
    still, moved = Training(CASES["sparse table"], device), Training(CASES["sparse table"], device)
    still.run(10)
    moved.run(10)
    moved.model.table.weight.data = moved.model.table.weight.data.clone()
    assert still.run(10) == moved.run(10)


def move(training, device):
    """Move a model to another device. Its parameters stay the same objects, as with CUDA."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        training.model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    training.device = device


@pytest.mark.parametrize("name", ["mlp", "CNN with BatchNorm", "sparse table"])
@pytest.mark.parametrize(("source", "target"), [("sim", "cpu"), ("cpu", "sim")])
def test_model_continues_after_moving_to_another_device(name, source, target):
    still, moved = Training(CASES[name], "cpu"), Training(CASES[name], source)
    still.run(10)
    moved.run(10)
    moved.opt.zero_grad()
    move(moved, target)
    torch.testing.assert_close(moved.run(10), still.run(10), rtol=1e-8, atol=1e-8)


# --- random numbers -----------------------------------------------------------------------------------------------


def test_dropout_switched_on_later_draws_the_same_numbers_in_both_evaluations():
    """The first steps check that the closure is repeatable. Later ones must be correct without the check."""

    def losses(device):
        run = Training(CASES["dropout"], device)
        run.model.eval()
        first = run.run(3)
        run.model.train()
        return first + run.run(20)

    torch.testing.assert_close(losses("sim"), losses("cpu"), rtol=1e-8, atol=1e-8)


class RandomScale(nn.Module):
    """A custom module with a random factor. `per_sample` must replay it with the same random numbers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return F.dropout(x * self.scale, 0.3, self.training)


def test_random_module_is_replayed_sample_by_sample():
    case = Case(lambda: nn.Sequential(RandomScale(), nn.Linear(6, 3)), per_sample=True)
    here, there = Training(case, "cpu"), Training(case, "sim")
    torch.testing.assert_close(there.run(10), here.run(10), rtol=1e-8, atol=1e-8)


def test_failed_step_restores_the_random_numbers_of_the_device():
    run = Training(CASES["dropout"], "sim")

    def fail():
        torch.rand(3, device="sim")
        raise KeyboardInterrupt

    before = torch.sim.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        run.opt.step(fail)
    assert torch.equal(torch.sim.get_rng_state(), before)


# --- precision and linear algebra ---------------------------------------------------------------------------------


def test_checkpoint_is_loaded_where_there_is_no_float64(sim):
    with sim.switched(float64=False):
        run, resumed = (Training(CASES["CNN with BatchNorm"], "sim", torch.float32) for _ in range(2))
        run.run(4)
        file = io.BytesIO()
        torch.save(run.opt.state_dict(), file)
        file.seek(0)
        resumed.model.load_state_dict(run.model.state_dict())
        resumed.opt.load_state_dict(torch.load(file, map_location="sim"))
        resumed.steps = 4
        assert run.run(4) == resumed.run(4)


def test_diagnosis_needs_no_float64(sim):
    run, same = Training(CASES["mlp"], "sim", torch.float32), Training(CASES["mlp"], "cpu", torch.float32)
    with sim.switched(float64=False):
        run.run(6)
        found = run.opt.info()
        file = io.BytesIO()
        torch.save((run.model.state_dict(), run.opt.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, map_location="cpu")
    same.model.load_state_dict(weights)
    same.opt.load_state_dict(state)
    for ours, theirs in zip(found.tensors, same.opt.info().tensors, strict=True):
        torch.testing.assert_close([*ours.rate], [*theirs.rate], rtol=1e-2, atol=1e-8)


@pytest.mark.parametrize("name", ["mlp", "CNN with BatchNorm", "sparse table", "weight decay"])
def test_diagnosis_of_a_cpu_checkpoint_needs_no_step_on_a_device_without_float64(name, sim):
    run, loaded = (Training(CASES[name], device, torch.float32) for device in ("cpu", "sim"))
    run.run(6)
    with sim.switched(float64=False):
        loaded.model.load_state_dict(run.model.state_dict())
        loaded.opt.load_state_dict(run.opt.state_dict())
        found = loaded.opt.info()
    for ours, theirs in zip(found.tensors, run.opt.info().tensors, strict=True):
        assert ours.coordinates == theirs.coordinates
        for field in ("rate", "memory", "signal_to_noise"):
            torch.testing.assert_close([*getattr(ours, field)], [*getattr(theirs, field)], rtol=1e-3, atol=1e-8)


def test_diagnosis_follows_a_model_that_was_moved_to_a_device_without_float64(sim):
    run = Training(CASES["mlp"], "cpu", torch.float32)
    run.run(6)
    run.opt.zero_grad()
    rates = [[*tensor.rate] for tensor in run.opt.info().tensors]
    with sim.switched(float64=False):
        move(run, "sim")
        torch.testing.assert_close([[*tensor.rate] for tensor in run.opt.info().tensors], rates, rtol=1e-3, atol=1e-8)


def test_missing_linear_algebra_leaves_a_step_whole(sim):
    """A step either succeeds as on other devices, or changes nothing."""
    usual, run = Training(CASES["mlp"], "sim"), Training(CASES["mlp"], "sim")
    with sim.switched(linear_algebra=False):
        losses = run.run(15)
    torch.testing.assert_close(losses, usual.run(15), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(run.weights(), usual.weights(), rtol=1e-8, atol=1e-8)


# --- the default device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", ["CNN with BatchNorm", "GRU", "per-sample table", "micro-batches", "weight decay"])
def test_default_device_does_not_matter(name, device):
    usual, run = Training(CASES[name], device), Training(CASES[name], device)
    expected = usual.run(3), str(usual.opt.info())
    closures = [run.closures() for run.steps in range(3)]  # the data of the test are created on the CPU
    torch.set_default_device("sim")
    try:
        losses = []
        for k, each in enumerate(closures):
            torch.manual_seed(k)
            losses.append(float(run.opt.minimize(each)))
        found = losses, str(run.opt.info())
    finally:
        torch.set_default_device(None)
    assert found == expected


# --- the compiler -------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler():
    """Enable compilation, also of functions that were compiled before."""
    compiled.cache_clear()
    with torch.compiler.set_stance("default"):
        yield
    compiled.cache_clear()


def test_runs_uncompiled_where_the_compiler_does_not_know_the_device(compiler):
    with torch.compiler.set_stance("force_eager"):
        expected = Training(CASES["transformer"], "sim").run(3)
    assert Training(CASES["transformer"], "sim").run(3) == expected


@pytest.mark.slow
def test_every_variant_stays_compiled(compiler, monkeypatch):
    """A function with more variants than torch's limit is no longer compiled."""
    compile_with, calls = torch.compile, []

    def backend(graph, inputs):
        def run(*arguments):
            calls.append(graph)
            return graph(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compile_with(*args, **{**kwargs, "backend": backend}))
    variants = [
        (Case(mlp, options={"algorithm": algorithm}, per_sample=per_sample, micro_batches=count), dtype)
        for algorithm in (NETWORKS, NETWORKS._replace(eigenbasis=False), PAPER)
        for per_sample, count in ((False, 1), (True, 1), (False, 2))
        for dtype in (torch.float32, torch.float64)
    ]
    for case, dtype in variants:
        run = Training(case, "sim", dtype)
        run.run(1)
        calls.clear()
        run.run(1)
        assert calls, (case, dtype)
