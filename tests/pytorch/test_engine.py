"""Both engines run the same algorithm, on any number of threads, at the speed that packed arithmetic allows."""

from __future__ import annotations

import pytest
import torch

from vsgd import NETWORKS, PAPER, jit
from vsgd.torch import engine, loops
from vsgd.torch.engine import BatchStatistics, Block, Factors

LENGTHS = (5, 1, 300)
ALGORITHMS = {"paper": PAPER, "networks": NETWORKS, "no average": NETWORKS._replace(average_iterates=False)}
algorithms = pytest.mark.parametrize("config", ALGORITHMS.values(), ids=ALGORITHMS)
KINDS = ["one sample", "one sample, probed", "several samples", "several samples, probed, another direction"]


def block_of(config, lengths=LENGTHS, dtype=torch.float64, curv_dtype=None) -> Block:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)

    def random():
        return torch.randn(total, generator=generator, dtype=torch.float64).to(dtype)

    grad = random()
    return Block(
        theta=random(),
        average=random() if engine.averages_iterates(config) else None,
        grad=grad,
        grad_sq=grad**2 + random() ** 2,
        curv=random().abs().to(curv_dtype or dtype),
        curv_sq=(1 + random() ** 2).to(curv_dtype or dtype),
        memory=2 + random().abs(),
        seen=torch.tensor([20.0, 0.0, 2.0] if len(lengths) == 3 else [20.0] * len(lengths), dtype=torch.float64),
        totals=torch.rand(len(lengths), 5, generator=generator, dtype=torch.float64),
        lengths=lengths,
    )


def batch_of(kind: str, block: Block) -> BatchStatistics:
    generator = torch.Generator().manual_seed(1)
    grad, other, direction = (torch.randn(len(block.theta), generator=generator).to(block.theta) for _ in range(3))
    counts = torch.tensor([1.0, 1.0, 0.0] if len(block.lengths) == 3 else [1.0] * len(block.lengths)).double()
    if kind.startswith("one"):
        return BatchStatistics(grad, counts, other if "probed" in kind else None)
    diff = grad - other
    moments = (diff.abs(), diff**2, direction) if "probed" in kind else ()
    return BatchStatistics(grad, 4 * counts, None, grad**2 + 0.5, *moments)


def updated(run, config, kind, **options):
    block = block_of(config, **options)
    batch = batch_of(kind, block)
    delta = torch.full_like(block.theta, 0.01) if "probed" in kind else None
    if delta is not None:
        delta[::7] = 0  # vanished in the precision of the parameter
    tensor = engine.tensor_curvature(block, config)
    sums = run(block, batch, delta, tensor, Factors(0.5, 0.1), config)
    return [part for part in block[:-1] if part is not None], sums[: 4 if delta is not None else 2]


@algorithms
@pytest.mark.parametrize("kind", KINDS)
def test_whole_tensors_equal_the_loops(config, kind, monkeypatch):
    monkeypatch.setattr(engine, "compiled_tensors", lambda: engine.update_whole)
    loop_blocks, loop_sums = updated(engine.update_loops, config, kind)
    blocks, sums = updated(engine.update_tensors, config, kind)
    torch.testing.assert_close(blocks, loop_blocks, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(sums, loop_sums, strict=True):
        torch.testing.assert_close(mine[:2], theirs[:2], rtol=1e-9, atol=1e-12)


def test_whole_tensors_are_compiled_by_torch():
    kind = "one sample, probed"
    blocks, _ = updated(engine.update_tensors, NETWORKS, kind)
    expected, _ = updated(engine.update_loops, NETWORKS, kind)
    torch.testing.assert_close(blocks, expected, rtol=1e-9, atol=1e-12)


def test_segments_without_samples_are_left_alone():
    before = block_of(NETWORKS)
    block = block_of(NETWORKS)
    engine.update(
        block, batch_of("one sample, probed", block), torch.full_like(block.theta, 0.01), Factors(1, 0), NETWORKS
    )
    for mine, theirs in zip(block[:7], before[:7], strict=True):
        assert torch.equal(mine[6:], theirs[6:])
    assert block.seen.tolist() == [21, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind, monkeypatch):
    monkeypatch.setattr(loops, "PIECE", 16)
    monkeypatch.setattr(loops, "MIN_PIECES_PER_THREAD", 2)
    loops.pieces_of.cache_clear()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(updated(engine.update_loops, NETWORKS, kind, lengths=(100, 3, 57), dtype=torch.float32))
    loops.pieces_of.cache_clear()
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_probes_have_one_size_and_random_signs():
    block = block_of(NETWORKS, lengths=(1000, 3000))
    batch = batch_of("one sample", block)
    seeds = torch.tensor([1, 2])
    delta = engine.probe(block, batch, seeds, NETWORKS)
    for part, theta in zip(delta.split(block.lengths), block.theta.split(block.lengths), strict=True):
        size = NETWORKS.probe_scale * theta.square().mean().sqrt()
        torch.testing.assert_close(part.abs(), size.expand(len(part)))
        assert abs(float(part.sign().mean())) < 0.1
    other = engine.probe(block, batch, torch.tensor([3, 2]), NETWORKS)
    assert not torch.equal(delta[:1000], other[:1000])
    assert torch.equal(delta[1000:], other[1000:])


def test_rows_of_a_table_are_probed_against_their_gradients():
    block = block_of(NETWORKS)
    batch = batch_of("one sample", block)
    delta = engine.probe(block, batch, None, NETWORKS)
    assert torch.equal(delta.sign(), -batch.grad.sign())


def test_bfloat16_is_read_and_rounded_as_torch_does():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    bits = values.bfloat16().view(torch.int16).numpy().view("uint16")
    wide, narrow = jit.compiled(loops.widen), jit.compiled(loops.narrow)
    assert [float(wide(b)) for b in bits] == values.bfloat16().float().tolist()
    assert [int(narrow(v)) for v in values.numpy()] == bits.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_loops_divide_many_numbers_at_once(kind, monkeypatch):
    """A small change of the algorithm can make the compiler give up, and ten times the speed goes with it."""
    monkeypatch.setattr(loops, "kept", jit.compiled)  # whose code can be looked at
    loops.update_loop.cache_clear()
    updated(engine.update_loops, NETWORKS, kind, dtype=torch.float32, curv_dtype=torch.bfloat16)
    loop = loops.update_loop(True, False, True, "several" in kind, "probed" in kind, True, True, True)
    loops.update_loop.cache_clear()
    (code,) = loop.inspect_asm().values()
    if "divss" not in code:
        pytest.skip("not an x86 processor")
    assert "divps" in code
    assert "divpd" not in code
    assert "divsd" not in code
