"""Signals at any line of a step, any number of them: all of the step happens or nothing, and the next one works."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.overrides
from interrupting import Interrupt, count_lines, handled, run_interrupted
from processes import TIMEOUT
from torch import nn

from vsgd.torch import VSGD, is_probing
from vsgd.torch.per_sample.watch import Watch

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="signals of POSIX")

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
WORDS = torch.randint(20, (12,), generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        tokens = torch.stack([x[:, :4], x[:, 1:]], dim=1)
        return self.last(self.attention(tokens, tokens, tokens)[0].mean(1))


def dense(*layers):
    return nn.Sequential(nn.Linear(5, 6), *layers, nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))


def table():
    return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3))


class Case(NamedTuple):
    """A model, and how it is trained."""

    model: Any
    number: int
    """The signal that interrupts it."""
    options: dict[str, Any] = {}  # noqa: RUF012
    parts: int = 1
    """Micro-batches."""
    steps: int = 30
    """Steps before the one that calls the closure most often is looked for; 0: the first one."""
    scaled: bool = False
    inputs: torch.Tensor = X


CASES = {
    "plain": Case(dense, signal.SIGINT),
    "first step": Case(dense, signal.SIGALRM, steps=0),
    "batch norm": Case(lambda: dense(nn.BatchNorm1d(6)), signal.SIGTERM),
    "per sample": Case(Attention, signal.SIGALRM, {"per_sample": True}),
    "per sample, first step": Case(Attention, signal.SIGPROF, {"per_sample": True}, steps=0),
    "embedding": Case(table, signal.SIGPROF, inputs=WORDS),
    "embedding, first step": Case(table, signal.SIGALRM, steps=0, inputs=WORDS),
    "micro-batches": Case(dense, signal.SIGVTALRM, parts=2),
    "weight decay": Case(dense, signal.SIGUSR1, {"weight_decay": 1e-3}),
    "gradient scaler": Case(dense, signal.SIGHUP, scaled=True),
}


class Run:
    """A run of training that can be copied."""

    def __init__(self, model, opt, case):
        self.model, self.opt, self.case = model, opt, case
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if case.scaled else None
        self.calls = 0

    def closure(self, rows):
        def closure():
            self.calls += 1
            self.opt.zero_grad()
            loss = F.cross_entropy(self.model(self.case.inputs[rows]), Y[rows])
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            return loss

        return closure

    def step(self):
        size = len(X) // self.case.parts
        closures = [self.closure(slice(k * size, (k + 1) * size)) for k in range(self.case.parts)]
        return self.opt.step(closures, scaler=self.scaler)

    def copy(self, warm=True):
        """At the same state. `warm`: after one more step, which has left gradients and arranged everything."""
        model, opt = copy.deepcopy((self.model, self.opt))
        run = Run(model, opt, self.case)
        torch.manual_seed(1)
        if warm and self.case.steps:
            run.step()
            run.update()
        run.calls = 0
        return run

    def update(self):
        if self.scaler is not None:
            self.scaler.update()

    def state(self):
        """Everything that a step may change."""
        modules = [*self.model.modules()]
        hooks = [len(value) for module in modules for name, value in vars(module).items() if name.endswith("_hooks")]
        parameters = [*self.model.parameters()]
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.opt.state_dict(),
                "gradients": [None if p.grad is None else p.grad.to_dense().detach() for p in parameters],
                "hooks": [*hooks, *(len(p._backward_hooks or ()) for p in parameters)],
                "random": torch.get_rng_state(),
                "switches": [torch.is_grad_enabled(), is_probing(), *(p.requires_grad for p in parameters)],
            }
        )


def is_equal(first, second):
    """Return whether nested values are the same to the bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return first == second


class Reference(NamedTuple):
    """A run before the step to interrupt, its states before and after that step and the next, and its lines."""

    run: Run
    states: list[Any]
    lines: int


_REFERENCES: dict[str, Reference] = {}


@pytest.fixture(params=CASES)
def reference(request):
    if request.param not in _REFERENCES:
        case = CASES[request.param]
        run = busiest(started(case), case.steps) if case.steps else started(case)
        whole = run.copy()
        states = [whole.state()]
        lines = count_lines(whole.step)
        for _ in range(2):
            whole.update()
            states.append(whole.state())
            whole.step()
        assert not is_equal(states[0], states[1])
        _REFERENCES[request.param] = Reference(run, states, lines)
    return _REFERENCES[request.param]


def started(case):
    torch.manual_seed(0)
    model = case.model()
    options = {**case.options, **({"per_sample": model} if case.options.get("per_sample") else {})}
    return Run(model, VSGD(model.parameters(), **options), case)


def busiest(run, steps):
    """Train until the second step from now is one that calls the closure most often."""
    calls, saved = Counter(), {}
    for k in range(steps):
        saved[k] = copy.deepcopy((run.model, run.opt))
        before = run.calls
        run.step()
        run.update()
        calls[k] = run.calls - before
    most = max(range(2, steps), key=lambda k: calls[k])
    return Run(*saved[most - 1], run.case)


def check(reference, chosen):
    """Interrupt a step where `chosen` says so. Returns whether its changes were taken back."""
    run = reference.run.copy()
    with handled([signal.SIGUSR2], lambda *_: None):  # a second kind of signal has a handler too
        calls, ended = run_interrupted(run.step, chosen, run.case.number)
    state = run.state()
    taken = is_equal(state, reference.states[1])
    assert taken or is_equal(state, reference.states[0]), "a step was left half-done"
    assert taken or ended
    assert bool(calls) == bool(ended)
    if taken:
        run.update()
    run.step()
    assert is_equal(run.state(), reference.states[2] if taken else reference.states[1])
    return not taken


def sample(reference, count):
    """Some lines of a step, evenly spread."""
    return [round((k + 0.5) * reference.lines / count) for k in range(count)]


def test_one_signal(reference):
    taken_back = [check(reference, {line}.__contains__) for line in sample(reference, 10)]
    assert not all(taken_back)


def test_two_signals(reference):
    for line, distance in zip(sample(reference, 6), (1, 2, 5, 20, 60, 300), strict=True):
        check(reference, {line, line + distance}.__contains__)
    for first in (1, 4, 7):  # while handlers are replaced
        check(reference, {first, first + 1}.__contains__)
    for last in (1, 3, 5, 8, 12):  # while they are put back
        check(reference, {reference.lines - last, reference.lines - last + 1}.__contains__)


def test_many_signals(reference):
    for every in (13, 50, 331):
        check(reference, lambda line, every=every: line % every == every - 1)


@pytest.mark.slow
def test_one_signal_at_every_line(reference):
    for line in range(reference.lines):
        check(reference, {line}.__contains__)


@pytest.mark.slow
def test_two_signals_at_every_line(reference):
    for line in range(reference.lines):
        check(reference, {line, line + 1 + line % 7}.__contains__)


@pytest.mark.slow
def test_signals_at_every_nth_line(reference):
    for every in range(9, 200):
        check(reference, lambda line, every=every: line % every == every - 1)


def test_signals_while_torch_handles_a_mode_leave_no_mode_behind(monkeypatch):
    """With `per_sample`, a mode sees every function. Torch takes it off its stack while it handles a call."""
    case, files = CASES["per sample"], (torch.overrides.__file__, contextlib.__file__)
    run = started(case)
    for _ in range(4):
        run.step()
    for line in range(0, count_lines(run.step, files), 7):
        calls, ended = run_interrupted(run.step, {line}.__contains__, case.number, files=files)
        assert calls == len(ended)  # no other error replaces that of the handler
        ended.clear()
        with monkeypatch.context() as context:
            context.setattr(Watch, "__torch_function__", None)
            X.dim()  # a mode that was left behind would see this call


# --- what handlers see --------------------------------------------------------------------------------------------


def trained(steps=6, **options):
    torch.manual_seed(0)
    model = dense()
    opt = VSGD(model.parameters(), **options)
    run = Run(model, opt, Case(dense, signal.SIGALRM))
    for _ in range(steps):
        run.step()
    return run


def with_calls(run, *events):
    """The closure of a run, which calls functions at its first, second, … evaluation."""
    closure, left = run.closure(slice(None)), list(events)

    def calling():
        loss = closure()
        if left:
            left.pop(0)()
        return loss

    return calling


def raise_interrupt(number, frame):
    raise Interrupt


def alarm():
    signal.raise_signal(signal.SIGALRM)


def test_a_handler_that_raises_interrupts_the_closure_at_once():
    run, reached = trained(), []

    def interrupted():
        alarm()
        reached.append("the end of the closure")

    with handled([signal.SIGALRM], raise_interrupt), pytest.raises(Interrupt):
        run.opt.step(with_calls(run, interrupted))
    assert not reached


def test_a_handler_that_returns_does_not_disturb_the_step():
    run, twin, calls = trained(), trained(), []
    torch.manual_seed(2)
    twin.step()
    torch.manual_seed(2)
    with handled([signal.SIGALRM], lambda *arguments: calls.append(len(calls))):
        run.opt.step(with_calls(run, lambda: [alarm(), calls.append("closure"), alarm()]))
    assert calls == [0, "closure", 2]
    assert is_equal(run.state(), twin.state())


def test_signals_during_the_clean_up_of_a_closure_wait_until_the_step_has_ended():
    run, calls = trained(), []
    before = run.state()

    def handler(number, frame):
        calls.append(number)
        raise Interrupt(number)

    def interrupted():
        try:
            alarm()
        finally:
            signal.raise_signal(signal.SIGTERM)
            calls.append("cleaned up")

    with handled([signal.SIGALRM, signal.SIGTERM], handler), pytest.raises(Interrupt) as caught:
        run.opt.step(with_calls(run, interrupted))
    assert calls == [signal.SIGALRM, "cleaned up", signal.SIGTERM]
    assert caught.value.args == (signal.SIGTERM,)
    assert caught.value.__context__.args == (signal.SIGALRM,)
    assert is_equal(run.state(), before)


def test_a_closure_may_handle_the_interrupt_and_the_next_one():
    run, handled_inside = trained(), []

    def interrupted():
        for _ in range(2):
            try:
                alarm()
            except Interrupt:
                handled_inside.append(1)

    steps = run.opt.state_dict()["param_groups"][0]["steps"]
    with handled([signal.SIGALRM], raise_interrupt):
        run.opt.step(with_calls(run, interrupted))
    assert handled_inside == [1, 1]
    assert run.opt.state_dict()["param_groups"][0]["steps"] == steps + 1


def test_all_kinds_of_deferred_signals_are_delivered():
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPROF, signal.SIGVTALRM, signal.SIGUSR1]
    run, calls = trained(), []

    class Parameters(list):
        def __iter__(self):  # the optimizer's own code reads the groups
            if not calls:
                for number in numbers:
                    signal.raise_signal(number)
                calls.append("the optimizer goes on")
            return super().__iter__()

    def handler(number, frame):
        calls.append(number)
        raise Interrupt

    run.opt.param_groups[0]["params"] = Parameters(run.opt.param_groups[0]["params"])
    steps = run.opt.param_groups[0]["steps"]
    with handled(numbers, handler), pytest.raises(Interrupt):
        run.step()
    assert calls == ["the optimizer goes on", *numbers]
    assert run.opt.param_groups[0]["steps"] == steps + 1


def test_a_handler_that_a_closure_installs_stays():
    run, calls = trained(), []

    def mine(number, frame):
        calls.append(number)

    with handled([signal.SIGALRM, signal.SIGTERM], raise_interrupt), handled([signal.SIGUSR1], signal.SIG_DFL):
        changes = {signal.SIGALRM: mine, signal.SIGUSR1: mine, signal.SIGTERM: signal.SIG_IGN}
        run.opt.step(with_calls(run, lambda: [signal.signal(*change) for change in changes.items()]))
        assert {number: signal.getsignal(number) for number in changes} == changes
        alarm()
        assert calls == [signal.SIGALRM]


def test_a_handler_that_a_closure_installs_for_a_while():
    run, calls = trained(), []

    def for_a_while():
        with handled([signal.SIGALRM], lambda *_: calls.append(1)):
            alarm()

    with handled([signal.SIGALRM], raise_interrupt):
        run.opt.step(with_calls(run, for_a_while))
        assert signal.getsignal(signal.SIGALRM) is raise_interrupt
    assert calls == [1]


def test_off_the_main_thread_no_handler_is_replaced():
    run, found = trained(), []

    def step():
        run.opt.step(with_calls(run, lambda: found.append(signal.getsignal(signal.SIGALRM))))

    with handled([signal.SIGALRM], raise_interrupt):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert found == [raise_interrupt]


def test_a_step_within_the_closure_of_another_optimizer_delivers_what_came_within_it():
    outer, inner = trained(), trained()
    late = count_lines(trained().step) * 9 // 10  # after the last evaluation of the closure
    torch.manual_seed(3)
    before, steps, reached = outer.state(), inner.opt.param_groups[0]["steps"], []

    def nested():
        calls, ended = run_interrupted(inner.step, {late}.__contains__)
        reached.append((calls, len(ended), inner.opt.param_groups[0]["steps"] - steps))
        raise Interrupt

    with pytest.raises(Interrupt):
        outer.opt.step(with_calls(outer, nested))
    assert reached == [(1, 1, 1)]
    assert is_equal(outer.state(), before)


# --- an optimizer within its own step -----------------------------------------------------------------------------


def test_a_step_within_a_step_of_the_same_optimizer_is_refused_and_nothing_changes():
    run = trained()
    before = run.state()
    with pytest.raises(RuntimeError, match=r"step\(\) was called during step\(\) of the same optimizer"):
        run.opt.step(with_calls(run, lambda: run.opt.step(run.closure(slice(None)))))
    assert is_equal(run.state(), before)
    run.step()
    assert not is_equal(run.state(), before)


def test_iterates_within_iterates_change_nothing_further():
    run = trained()
    before = run.state()
    with run.opt.iterates():
        iterates = copy.deepcopy(run.model.state_dict())
        with run.opt.iterates():
            assert is_equal(dict(run.model.state_dict()), dict(iterates))
        assert is_equal(dict(run.model.state_dict()), dict(iterates))
        assert not is_equal(dict(iterates), dict(before["model"]))
    assert is_equal(run.state(), before)


# --- iterates() ---------------------------------------------------------------------------------------------------


def test_iterates_put_the_averaged_weights_back():
    run = trained()
    before = run.state()

    def block():
        with run.opt.iterates():
            pass

    lines = count_lines(block)
    for chosen in [
        *({line}.__contains__ for line in range(lines)),
        *({line, line + 1}.__contains__ for line in range(lines)),
        *(lambda line, every=every: line % every == every - 1 for every in range(9, 30)),
    ]:
        run_interrupted(block, chosen)
        assert is_equal(run.state(), before)


def test_the_block_of_iterates_is_interrupted_at_once():
    run, reached = trained(), []
    before = run.state()

    def block():
        with run.opt.iterates():
            alarm()
            reached.append("the end of the block")

    with handled([signal.SIGALRM], raise_interrupt), pytest.raises(Interrupt):
        block()
    assert not reached
    assert is_equal(run.state(), before)


# --- signals that come when they come -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "batch norm", "per sample", "embedding"])
def test_real_signals_at_any_time(case):
    """In a process without JAX, whose callbacks of the garbage collector would swallow the exception."""
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, folder / "storm.py", case]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=TIMEOUT
    )
    print(f"{case}: {done.stdout}")
    assert done.returncode == 0, done.stderr[-3000:]
