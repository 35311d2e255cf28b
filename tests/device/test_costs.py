"""Launches and synchronizations of a step, without those of the closure."""

import statistics
from functools import partial

import pytest
import torch
from device_cases import CASES, Case, Training, WordBag

WARM_UP = 12
"""Number of steps before counting. The first steps check the closure and create state."""


def uncounted(events, calls, compute):
    """Run a closure without counting its launches."""
    with events.paused():
        calls.append(compute)
        loss = compute()
        loss.backward()
        return loss


def counted(sim, run, steps):
    """Return the events of each of the next steps, and whether the step had a probe."""
    found = []
    for _ in range(steps):
        losses, calls = run.closures(), []
        run.steps += 1

        with sim.Events() as events:
            run.opt.step([partial(uncounted, events, calls, compute) for compute in losses])
        found.append((events, len(calls) > len(losses)))
    return found


@pytest.mark.parametrize("name", ["transformer", "sparse table", "micro-batches", "weight decay"])
def test_plain_step_synchronizes_once_and_probe_step_twice(name, sim):
    """Each sparse gradient has one more synchronization, for its number of rows."""
    run = Training(CASES[name], "sim", torch.float32)
    run.run(WARM_UP)
    sparse = sum(getattr(module, "sparse", False) for module in run.model.modules())
    steps = counted(sim, run, 22)
    assert {probed for _, probed in steps} == {True, False}
    for events, probed in steps:
        assert events.total("sync") <= (1 + sparse) * (1 + probed), events.table("sync")


def test_transformer_launches_no_more_kernels_than_soap(sim):
    """SOAP launches 350 in a usual step of a transformer with 30 tensors."""
    run = Training(CASES["transformer"], "sim", torch.float32)
    assert len(list(run.model.parameters())) == 30
    run.run(WARM_UP)
    steps = [events for events, _ in counted(sim, run, 20)]
    usual = sorted(steps, key=lambda events: events.total("launch"))[len(steps) // 2]
    assert statistics.median(events.total("launch") for events in steps) <= 350, usual.table("launch")


def test_launches_do_not_depend_on_the_number_of_touched_rows(sim):
    def launches(rows):
        def inputs(dtype):
            return torch.arange(rows).view(1, -1).expand(2, -1) + torch.zeros(2, 1, dtype=torch.int64)

        run = Training(Case(lambda: WordBag(1000), inputs), "sim", torch.float32)
        run.run(WARM_UP)
        return [events.total("launch") for events, _ in counted(sim, run, 3)]

    assert launches(10) == launches(200)
