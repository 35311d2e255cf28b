"""The update in compiled loops, on one thread or several, and on whole tensors: the same numbers."""

from __future__ import annotations

import platform

import pytest

torch = pytest.importorskip("torch")

from vsgd import NETWORKS, PAPER  # noqa: E402
from vsgd.torch import dispatch  # noqa: E402
from vsgd.torch.dispatch import neighbours_of, shift_tensor, shift_whole, update_tensor, update_whole  # noqa: E402
from vsgd.torch.update import (  # noqa: E402
    READERS,
    Averages,
    Gradient,
    GradientPair,
    Probe,
    Scale,
    Slots,
    Weighted,
    update_loop,
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
    sources = [Gradient(random()), GradientPair(random(), random()), averages, Weighted(averages, random())]
    return random(), slots, counts, sources


def copied(slots: Slots) -> Slots:
    return Slots(*(tensor.clone() for tensor in slots))


@pytest.mark.parametrize("kind", [Gradient, GradientPair, Averages, Weighted])
@pytest.mark.parametrize("shape", [(1, 7), (6, 5)])
@pytest.mark.parametrize(
    ("options", "by_torch"),
    [(PAPER, False), (NETWORKS, False), (NETWORKS, True)],
    ids=["paper-eager", "networks-eager", "networks-compiled"],
)
def test_whole_tensors_equal_the_loops(options, kind, shape, by_torch):
    theta, slots, counts, sources = problem(*shape)
    counts = counts + 1 if shape[0] == 1 else counts
    (source,) = (each for each in sources if type(each) is kind)
    saved = None if kind is Gradient else theta - 0.1
    looped, looped_slots = theta.clone(), copied(slots)
    outliers = update_tensor(source, looped, saved, looped_slots, counts, SCALE, options)

    function = update_whole
    if by_torch:
        torch._dynamo.reset()
        function = torch.compile(update_whole, dynamic=True, fullgraph=True, backend="aot_eager")
    whole, whole_slots = theta.clone(), copied(slots)
    tensors = Scale(*(torch.tensor(value, dtype=theta.dtype) for value in SCALE))
    neighbours = neighbours_of(theta, slots, options)
    got = function(READERS[kind], source, whole, saved, whole_slots, counts, neighbours, tensors, options)
    whole_slots.seen.add_(counts)
    torch.testing.assert_close((whole, whole_slots), (looped, looped_slots), rtol=1e-12, atol=1e-12)
    assert got == outliers


@BOTH
def test_shift_of_whole_tensors_equals_the_loop(options):
    theta, slots, counts, (gradient, *_) = problem(6, 5)
    looped = theta.clone()
    saved = torch.empty_like(theta)
    shift_tensor(looped, saved, gradient.grad, slots, counts, options, seed=12345)
    assert torch.equal(saved, theta)
    whole, kept = theta.clone(), torch.empty_like(theta)
    probe = Probe(options.tensor_probe * theta.square().mean().sqrt(), 12345)
    shift_whole(whole, kept, gradient.grad, slots, counts, probe, torch.arange(30).view(6, 5), options)
    torch.testing.assert_close((whole, kept), (looped, saved))


def test_shifts_are_of_one_size_with_signs_at_random():
    theta = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0))
    slots = Slots(*(torch.zeros_like(theta) for _ in range(5)), torch.zeros(1))
    signs = []
    for seed in (1, 2):
        shifted, saved = theta.clone(), torch.empty_like(theta)
        shift_tensor(shifted, saved, theta, slots, torch.ones(1), NETWORKS, seed)
        delta = shifted - saved
        torch.testing.assert_close(delta.abs(), torch.full_like(theta, 0.03) * theta.square().mean().sqrt())
        signs.append(delta.sign())
    first, second = signs
    for products in (first, second, first * second, first[:, 1:] * first[:, :-1], first[:, 64:] * first[:, :-64]):
        assert abs(float(products.mean())) < 0.04, "four standard errors"


@BOTH
@pytest.mark.parametrize("shape", [(1, 1001), (37, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_change_nothing(options, shape, dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "PIECE", 10)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        theta, slots, counts, sources = problem(*shape, dtype)
        saved = torch.empty_like(theta)
        shift_tensor(theta, saved, sources[1].grad, slots, counts, options, seed=7)
        update_tensor(sources[1], theta, saved, slots, counts, SCALE, options)
        results.append((theta, slots))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for the names of x86 instructions")
@pytest.mark.parametrize("kind", [Gradient, GradientPair, Averages, Weighted])
@BOTH
def test_the_loop_divides_many_numbers_at_once(kind, options):
    """A small change of the arithmetic can make the compiler fall back to one number at a time, ten times slower."""
    theta, slots, counts, sources = problem(1, 7, torch.float32)
    (source,) = (each for each in sources if type(each) is kind)
    update_tensor(source, theta, None if kind is Gradient else theta - 0.1, slots, counts, SCALE, options)
    kernel = dispatch._loop(update_loop, options, torch.float32)
    codes = [
        code
        for signature, code in kernel.inspect_asm().items()
        if str(signature[1]).replace("(Averages", "").startswith(f"{kind.__name__}(array(float32")
    ]
    assert codes
    assert all("divps" in code for code in codes)


def test_steps_do_not_compile_anew():
    """Counts, samples seen and the multiplier change from step to step; none of them is part of the compiled code."""
    torch._dynamo.reset()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    function = torch.compile(update_whole, dynamic=True, backend=backend)
    theta, slots, counts, sources = problem(4, 5)
    for step in range(5):
        scale = Scale(torch.tensor(1.0 / (step + 1)), torch.tensor(0.1 * step))
        function(
            READERS[GradientPair],
            sources[1],
            theta,
            theta - 0.1,
            slots,
            counts + step,
            neighbours_of(theta, slots, PAPER),
            scale,
            PAPER,
        )
        slots.seen.add_(counts)
    assert len(compilations) == 1
