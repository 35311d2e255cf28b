"""Both engines run the same algorithm, on any number of threads, at the speed that packed arithmetic allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vsgd import NETWORKS, PAPER, jit
from vsgd.algorithms.networks import momentum_weight
from vsgd.algorithms.strategy import Rates, Totals, strategy_of
from vsgd.torch import engine_numba, loops
from vsgd.torch.block import Rule, curvature_penalty, is_starting
from vsgd.torch.coordinates import BatchMoments, Coordinates, Inputs, spread
from vsgd.torch.engine_numba import NumbaEngine
from vsgd.torch.engine_torch import TorchEngine

LENGTHS = (5, 1, 300)
BLOCKS = {"paper": (PAPER, False), "coupled": (NETWORKS, False), "decoupled": (NETWORKS, True)}
blocks = pytest.mark.parametrize(("config", "decoupled"), BLOCKS.values(), ids=BLOCKS)
KINDS = ["one sample", "one sample, probed", "several samples", "several samples, probed, another direction"]


def block_of(config, decoupled, lengths=LENGTHS, dtype=torch.float64, curv_dtype=None) -> Coordinates:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)

    def random():
        return torch.randn(total, generator=generator, dtype=torch.float64).to(dtype)

    grad, curv = random(), random()
    return Coordinates(
        theta=random(),
        average=random() if strategy_of(config).averages_iterates(config) else None,
        grad=grad,
        grad_sq=grad**2 + random() ** 2,
        curv=(curv if decoupled else curv.abs()).to(curv_dtype or dtype),
        curv_sq=(curv**2 + random() ** 2).to(curv_dtype or dtype),
        memory=2 + random().abs(),
        seen=torch.tensor([20.0, 0.0, 2.0] if len(lengths) == 3 else [20.0] * len(lengths), dtype=torch.float64),
        totals=torch.rand(len(lengths), len(Totals._fields), generator=generator, dtype=torch.float64),
        lengths=lengths,
        decoupled=decoupled,
    )


def batch_of(kind: str, block: Coordinates) -> BatchMoments:
    generator = torch.Generator().manual_seed(1)
    grad, other, direction = (torch.randn(len(block.theta), generator=generator).to(block.theta) for _ in range(3))
    counts = torch.tensor([1.0, 1.0, 0.0] if len(block.lengths) == 3 else [1.0] * len(block.lengths)).double()
    if kind.startswith("one"):
        return BatchMoments(grad, grad, counts, other if "probed" in kind else None)
    diff = grad - other
    moments = (diff if block.decoupled else diff.abs(), diff**2, direction) if "probed" in kind else ()
    return BatchMoments(grad, grad, 4 * counts, None, grad**2 + 0.5, *moments)


def offset_of(kind: str, block: Coordinates):
    if "probed" not in kind:
        return None
    delta = torch.full_like(block.theta, 0.01)
    delta[::7] = 0  # vanished in the precision of the parameter
    return delta


def rule_of(config, engine=NumbaEngine):
    return Rule(engine(), strategy_of(config), config)


def learn(block, kind, engine=NumbaEngine, config=NETWORKS, rates=None, moves=False, **inputs):
    """Let a block learn as `vsgd.torch.block.learn_and_move` does."""
    batch, delta = batch_of(kind, block), offset_of(kind, block)
    starts = is_starting(block, batch, config)
    given = Inputs(batch, delta, rates or Rates(1.0, 1.0), **{"weight": 0.0, "starts": starts, **inputs})
    found = engine().learn(block, given, config, moves)
    block.seen.add_(batch.counts)
    return found


def learned(engine, config, decoupled, kind, **options):
    """What is left of a block after learning, the steps, the outliers and the decay."""
    block = block_of(config, decoupled, **options)
    samples = 1.0 + torch.arange(len(block.lengths), dtype=torch.float64)
    found = learn(block, kind, engine, config, Rates(0.5, 3.0), samples=samples)
    # both engines start the averages of the second segment, and with them write its curvature
    numbers = [torch.as_tensor(each).clone() for each in (found.outliers, found.decay)]
    return [part for part in block[:-2] if part is not None], found.steps, numbers


@blocks
@pytest.mark.parametrize("kind", KINDS)
def test_whole_tensors_equal_the_loops(config, decoupled, kind):
    loop_blocks, loop_steps, loop_numbers = learned(NumbaEngine, config, decoupled, kind)
    with torch.compiler.set_stance("force_eager"):
        whole_blocks, steps, numbers = learned(TorchEngine, config, decoupled, kind)
    torch.testing.assert_close(whole_blocks, loop_blocks, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(steps, loop_steps, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(numbers, loop_numbers, rtol=1e-9, atol=1e-12)
    assert float(numbers[1][0]) > 0


def test_whole_tensors_are_compiled_by_torch():
    kind = "one sample, probed"
    compiled, steps, _ = learned(TorchEngine, NETWORKS, True, kind)
    expected, loop_steps, _ = learned(NumbaEngine, NETWORKS, True, kind)
    torch.testing.assert_close(compiled, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(steps, loop_steps, rtol=1e-9, atol=1e-12)


def test_segments_without_samples_are_left_alone():
    before, block = block_of(NETWORKS, True), block_of(NETWORKS, True)
    steps = learn(block, "one sample, probed").steps
    for mine, theirs in zip(block[:7], before[:7], strict=True):
        assert torch.equal(mine[6:], theirs[6:])
    assert torch.equal(block.totals[2], before.totals[2])
    assert not steps[6:].any()
    assert block.seen.tolist() == [21, 1, 2]


def test_steps_are_no_longer_than_their_limit():
    block = block_of(NETWORKS, True)
    block.totals[:, Totals._fields.index("probe_size")] = 1e-4
    _, steps, _ = learned(NumbaEngine, NETWORKS, True, "one sample")
    small = learn(block, "one sample").steps
    assert small.abs().max() == pytest.approx(NETWORKS.step_limit * 1e-4)
    assert steps.abs().max() > small.abs().max()


@pytest.mark.parametrize("engine", [NumbaEngine, TorchEngine])
def test_moving(engine):
    block = block_of(NETWORKS, True)
    theta, average, totals = block.theta.clone(), block.average.clone(), block.totals.clone()
    steps, grad = torch.randn(306, dtype=torch.float64), torch.randn(306, dtype=torch.float64)
    decay, weight = torch.tensor([[0.0, 0.5, 1.0], [0.1, 0.2, 0.0]]).double()
    momentum = momentum_weight(block.total_columns().momentum, weight, 1.0)
    assert momentum[:2].all()
    inputs = Inputs(BatchMoments(grad, grad, torch.ones(3)), None, Rates(1.0, 1.0), weight)
    products = engine().move(block, inputs, steps, decay, NETWORKS)
    along = torch.stack([part.sum() for part in (grad * (theta - average)).split(LENGTHS)])
    torch.testing.assert_close(torch.as_tensor(products), along)
    expected = (theta - steps + spread(momentum, block) * (theta - average)) / (1 + spread(decay, block))
    torch.testing.assert_close(block.theta, expected)
    torch.testing.assert_close(block.average, average + spread(weight, block) * (expected - average))
    agreement = Totals(*totals.T).agreement
    new = agreement + (along - agreement) / 40
    torch.testing.assert_close(block.total_columns().agreement, torch.where(weight > 0, new, agreement))


@pytest.mark.parametrize("kind", KINDS)
def test_learning_and_moving_in_one_loop_equals_one_after_the_other(kind):
    lengths, rule, rates = (3 * engine_numba.PIECE // 2, 300), rule_of(NETWORKS), Rates(0.5, 3.0)
    weight = np.array([0.3, 0.2])
    together, apart = (block_of(NETWORKS, True, lengths=lengths) for _ in range(2))
    batch, delta = batch_of(kind, apart), offset_of(kind, apart)
    at_once = learn(together, kind, rates=rates, moves=True, weight=weight)
    assert at_once.steps is None
    one = learn(apart, kind, rates=rates, weight=weight)
    penalty = curvature_penalty(apart, loops.identity) if delta is not None else 0.0
    inputs = Inputs(batch, delta, rates, weight)
    products = rule.engine.move(apart, inputs, one.steps, one.decay, rule.config)
    torch.testing.assert_close(together[:-2], apart[:-2])
    np.testing.assert_allclose(at_once.products, products, rtol=1e-6)
    np.testing.assert_allclose(at_once.penalty.sum(), penalty, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind, monkeypatch):
    monkeypatch.setattr(engine_numba, "PIECE", 16)
    monkeypatch.setattr(engine_numba, "MIN_PIECES_PER_THREAD", 2)
    engine_numba.cached_pieces.cache_clear()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(learned(NumbaEngine, NETWORKS, True, kind, lengths=(100, 3, 57), dtype=torch.float32))
    engine_numba.cached_pieces.cache_clear()
    torch.testing.assert_close(*results, rtol=0, atol=0)


def probed(engine, block, batch, seeds, config=NETWORKS):
    return engine().probe(block, batch, seeds, config)


@blocks
@pytest.mark.parametrize("seeds", [[1, 2, 3], None], ids=["random", "by gradient"])
def test_both_engines_probe_alike(config, decoupled, seeds):
    block = block_of(config, decoupled)
    batch = batch_of("one sample", block)
    torch.testing.assert_close(*(probed(engine, block, batch, seeds, config) for engine in (NumbaEngine, TorchEngine)))


@pytest.mark.parametrize("engine", [NumbaEngine, TorchEngine])
def test_probes_have_one_size_and_random_signs(engine):
    block = block_of(NETWORKS, True, lengths=(1000, 3000))
    batch = batch_of("one sample", block)
    delta = probed(engine, block, batch, [1, 2])
    scales = block.total_columns().scale
    for part, scale in zip(delta.split(block.lengths), scales, strict=True):
        torch.testing.assert_close(part.abs(), (NETWORKS.probe_scale * scale).expand(len(part)))
        assert abs(float(part.sign().mean())) < 0.1
    other = probed(engine, block, batch, [3, 2])
    assert not torch.equal(delta[:1000], other[:1000])
    assert torch.equal(delta[1000:], other[1000:])


@pytest.mark.parametrize("engine", [NumbaEngine, TorchEngine])
def test_rows_of_a_table_are_probed_against_their_gradients(engine):
    block = block_of(NETWORKS, False)
    batch = batch_of("one sample", block)
    delta = probed(engine, block, batch, None)
    assert torch.equal(delta.sign(), -batch.grad.sign())


def test_bfloat16_is_read_and_rounded_as_torch_does():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    bits = values.bfloat16().view(torch.int16).numpy().view("uint16")
    wide, narrow = jit.compiled(loops.widen), jit.compiled(loops.narrow)
    assert [float(wide(b)) for b in bits] == values.bfloat16().float().tolist()
    assert [int(narrow(v)) for v in values.numpy()] == bits.tolist()


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_loops_divide_many_numbers_at_once(kind, decoupled, monkeypatch):
    """A small change of the algorithm can make the compiler give up, and ten times the speed goes with it."""
    monkeypatch.setattr(loops, "cached_jit", jit.compiled)  # whose code can be looked at
    loops.learn_loop.cache_clear()
    learned(NumbaEngine, NETWORKS, decoupled, kind, dtype=torch.float32, curv_dtype=torch.bfloat16)
    flags = False, "probed" in kind, True, False
    loop = loops.learn_loop(strategy_of(NETWORKS), decoupled, (False, True), flags)
    loops.learn_loop.cache_clear()
    (code,) = loop.inspect_asm().values()
    if "divss" not in code:
        pytest.skip("not an x86 processor")
    assert "divps" in code
    assert "divpd" not in code
    assert "cvtps2pd" not in code  # only the few numbers per segment have double precision
