"""The update in compiled loops, on one thread or several, and on whole tensors: the same numbers."""

from __future__ import annotations

import functools
import itertools
import platform

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vsgd import NETWORKS, PAPER  # noqa: E402
from vsgd.kernels import compiled_with  # noqa: E402
from vsgd.torch import dispatch  # noqa: E402
from vsgd.torch.dispatch import mean_curvature, shift_tensors, shift_whole, update_tensors, update_whole  # noqa: E402
from vsgd.torch.loops import Job, update_each  # noqa: E402
from vsgd.torch.update import (  # noqa: E402
    READERS,
    Averages,
    Gradient,
    GradientPair,
    Probe,
    Scale,
    Slots,
    Weighted,
    each_tensor,
)

BOTH = pytest.mark.parametrize("options", [PAPER, NETWORKS], ids=["paper", "networks"])
SCALE = Scale(lr=0.5, weight_decay=0.01)


def problem(rows: int, columns: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows)

    def random():
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)

    seen = torch.full((rows,), 20.0, dtype=dtype)
    seen[::3] = 4.0  # some rows are still being started
    slots = Slots(random(), random() ** 2 + 1, random().abs(), random() ** 2 + 1, random().abs() + 1, seen)
    counts = torch.arange(rows, dtype=dtype) % 3  # and some have no sample at all
    averages = Averages(random(), random() ** 2 + 1, random().abs(), random() ** 2 + 1)
    sources = [Gradient(random()), GradientPair(random(), random()), averages, Weighted(*averages, random())]
    return random(), slots, counts, sources


def copied(job: Job) -> Job:
    """The same job on memory of its own."""
    return each_tensor(torch.clone, job)


def job_of(shape, kind, dtype=torch.float64) -> Job:
    theta, slots, counts, sources = problem(*shape, dtype)
    (source,) = (each for each in sources if type(each) is kind)
    counts = counts + 1 if shape[0] == 1 else counts
    return Job(theta, None if kind is Gradient else theta - 0.1, theta + 1, counts, slots, source)


def neighbours_of(job: Job, options):
    return dispatch.neighbours_of(mean_curvature(job.slots), job.slots.grad, job.theta, options)


def update(job: Job, options):
    (outliers,) = update_tensors([job], [neighbours_of(job, options)], SCALE, options)
    return outliers


KINDS = [Gradient, GradientPair, Averages, Weighted]
EAGER = [(options, kind, shape, False) for options in (PAPER, NETWORKS) for kind in KINDS for shape in [(1, 7), (6, 5)]]
COMPILED = [(NETWORKS, Gradient, (1, 7), True), (NETWORKS, GradientPair, (6, 5), True)]


@pytest.mark.parametrize(("options", "kind", "shape", "by_torch"), EAGER + COMPILED)
def test_whole_tensors_equal_the_loops(options, kind, shape, by_torch):
    looped = job_of(shape, kind)
    whole = copied(looped)
    function = update_whole
    if by_torch:
        torch._dynamo.reset()
        function = torch.compile(update_whole, dynamic=True, fullgraph=True, backend="aot_eager")
    tensors = Scale(*(torch.tensor(value, dtype=torch.float64) for value in SCALE))
    got = function(READERS[kind], whole, neighbours_of(whole, options), tensors, options)
    whole.slots.seen.add_(whole.count)
    assert got == update(looped, options)
    torch.testing.assert_close(whole, looped, rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize("downhill", [False, True])
def test_shift_of_whole_tensors_equals_the_loop(options, downhill):
    looped = job_of((6, 5), GradientPair)
    whole = copied(looped)
    probe = Probe(options.tensor_probe * looped.theta.square().mean().sqrt(), int(downhill), 12345)
    before = looped.theta.clone()
    shift_tensors([looped], [downhill], [12345], options)
    assert torch.equal(looped.saved, before)
    shift_whole(whole, probe, torch.arange(30), options)
    torch.testing.assert_close(whole, looped)


def test_shifts_are_of_one_size_with_signs_at_random():
    theta = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0))
    slots = Slots(*(torch.zeros_like(theta) for _ in range(5)), torch.zeros(1))
    signs = []
    for seed in (1, 2):
        job = Job(theta.clone(), torch.empty_like(theta), None, torch.ones(1), slots, Gradient(theta))
        shift_tensors([job], [False], [seed], NETWORKS)
        delta = job.theta - job.saved
        torch.testing.assert_close(delta.abs(), torch.full_like(theta, 0.03) * theta.square().mean().sqrt())
        signs.append(delta.sign())
    first, second = signs
    for products in (first, second, first * second, first[:, 1:] * first[:, :-1], first[:, 64:] * first[:, :-64]):
        assert abs(float(products.mean())) < 0.04, "four standard errors"


def test_rows_of_a_table_are_shifted_the_way_their_steps_go():
    job = job_of((6, 5), GradientPair)
    shift_tensors([job], [True], [1], NETWORKS)
    assert torch.equal((job.theta - job.saved).sign(), -job.source.grad.sign())


@BOTH
@pytest.mark.parametrize("shapes", [[(1, 1001)], [(37, 5)], [(1, 3), (7, 5), (1, 100), (1, 1), (2, 40)]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_change_nothing(options, shapes, dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "PIECE", 10)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        jobs = [job_of(shape, GradientPair, dtype) for shape in shapes]
        shift_tensors(jobs, [shape[0] > 1 for shape in shapes], range(len(jobs)), options)
        outliers = update_tensors(jobs, [neighbours_of(job, options) for job in jobs], SCALE, options)
        results.append((jobs, outliers))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_tensors_that_go_together_change_as_if_alone():
    shapes = [(1, 7), (6, 5), (1, 1), (0, 5)]
    cases = list(itertools.product(shapes, [Gradient, GradientPair, Averages], [torch.float32, torch.float64]))
    together, alone = ({torch.empty(0): job_of(*case) for case in cases} for _ in range(2))
    kinds = dispatch.alike(together)
    assert sorted(map(len, kinds)) == [len(shapes)] * 6
    for jobs in (list(kind.values()) for kind in kinds):
        update_tensors(jobs, [neighbours_of(job, PAPER) for job in jobs], SCALE, PAPER)
    for job in alone.values():
        update(job, PAPER)
    torch.testing.assert_close(list(together.values()), list(alone.values()), rtol=0, atol=0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for the names of x86 instructions")
@pytest.mark.parametrize(
    ("options", "kind"),
    [(PAPER, GradientPair), (NETWORKS, Gradient), (NETWORKS, GradientPair), (NETWORKS, Averages)],
    ids=["paper-pair", "networks-gradient", "networks-pair", "networks-averages"],
)
def test_the_loop_divides_many_numbers_at_once(kind, options, monkeypatch):
    """A small change of the arithmetic can make the compiler fall back to one number at a time, ten times slower."""
    # machine code from disk has no text
    monkeypatch.setattr(dispatch, "kept", compiled_with.__wrapped__)
    monkeypatch.setattr(dispatch, "_loop", functools.cache(dispatch._loop.__wrapped__))
    job = job_of((1, 7), kind, torch.float32)
    update(job, options)
    kernel = dispatch._loop(update_each, options, np.float32, READERS[kind], shifted=job.saved is not None)
    (code,) = kernel.inspect_asm().values()
    assert "divps" in code


def test_steps_do_not_compile_anew():
    """Counts, samples seen and the multiplier change from step to step; none of them is part of the compiled code."""
    torch._dynamo.reset()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    function = torch.compile(update_whole, dynamic=True, backend=backend)
    job = job_of((4, 5), GradientPair)
    for step in range(5):
        scale = Scale(torch.tensor(1.0 / (step + 1)), torch.tensor(0.1 * step))
        later = job._replace(count=job.count + step)
        function(READERS[GradientPair], later, neighbours_of(later, PAPER), scale, PAPER)
        job.slots.seen.add_(job.count)
    assert len(compilations) == 1
