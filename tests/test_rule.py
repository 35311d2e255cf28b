"""The rule in every array library equals the paper as scalar loops."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from vsgd import PAPER, VSGD_2012, Moments, Options, init, probe, rate, rule, step
from vsgd.blocks import shared
from vsgd.kernels import compiled

UPDATES = 1000
LIMITED = PAPER._replace(slow_start=10.0, memory_limit=10.0)
SHAPES = ("quad", "abs", "rectlin", "gauss")


def on_floats():
    return float, float, step, probe.shift, init


def on_numpy():
    return lambda x: np.array([x]), lambda x: float(x[0]), step, probe.shift, init


def on_numba():
    return float, float, compiled(step), compiled(probe.shift), compiled(init)


def on_torch():
    torch = pytest.importorskip("torch")
    return lambda x: torch.tensor([x], dtype=torch.float64), lambda x: float(x[0]), step, probe.shift, init


def on_jax():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    return (
        lambda x: jax.numpy.array([x], dtype=float),
        lambda x: float(x[0]),
        jax.jit(step, static_argnums=4),
        jax.jit(probe.shift, static_argnums=3),
        init,
    )


LIBRARIES = [on_floats, on_numpy, on_numba, on_torch, on_jax]


def minibatches(n: int, presence: float, seed: int = 1) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    xi = rng.standard_normal((UPDATES, n))
    xi[50::97] *= 20  # outliers now and then
    there = rng.random((UPDATES, n)) < presence
    return [row[mask].tolist() for row, mask in zip(xi, there, strict=True)]


@pytest.mark.parametrize("presence", [1.0, 0.3], ids=["dense", "sparse"])
@pytest.mark.parametrize("n", [1, 10])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_equals_the_reference_over_a_thousand_updates(library, shape, n, presence):
    lift, lower, do_step, do_shift, do_init = library()
    batches = minibatches(n, presence)
    expected = reference.run(shape, 1.0, batches)
    theta = lift(1.0)
    state = do_init(theta, PAPER)
    track = []
    for samples in batches:
        here = lower(theta)
        grads = np.array([reference.sample_gradient(shape, 1.0, here - xi) for xi in samples] or [0.0])
        count = lift(float(len(samples)))
        delta = lower(do_shift(state, lift(grads.mean()), count, PAPER))
        there = np.array([reference.sample_gradient(shape, 1.0, here + delta - xi) for xi in samples] or [0.0])
        curvs = np.abs((grads - there) / delta)
        batch = Moments(*(lift(float(x.mean())) for x in (grads, grads**2, curvs, curvs**2)))
        theta, state, info = do_step(theta, state, batch, count, PAPER)
        track.append(
            [lower(theta), lower(state.memory), lower(state.mean.grad_sq), lower(info.rate) * (len(samples) > 0)]
        )
    wanted = [[c.theta, c.tau, c.v, c.eta * (len(b) > 0)] for c, b in zip(expected, batches, strict=True)]
    np.testing.assert_allclose(track, wanted, rtol=1e-9, atol=1e-12)
    assert expected[-1].outliers > 0, "the stream must exercise the outlier test"


def test_the_rate_without_noise_is_one_over_the_curvature():
    mean = Moments(grad=3.0, grad_sq=9.0, curv=4.0, curv_sq=16.0)
    assert rate(mean, 1, Options(epsilon=1e-12)) == pytest.approx(1 / 4)
    assert rate(mean, 1, VSGD_2012._replace(epsilon=1e-12)) == pytest.approx(1 / 4)


@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_the_rate_knows_the_minibatch(count):
    """Eq. 3: noise counts 1/n of itself."""
    distance, sigma_sq = 0.7, 5.0
    mean = Moments(grad=distance, grad_sq=distance**2 + sigma_sq, curv=1.0, curv_sq=1.0)
    expected = distance**2 / (distance**2 + sigma_sq / count)
    assert rate(mean, count, Options(epsilon=1e-14)) == pytest.approx(expected)


def test_a_coordinate_without_samples_is_left_alone():
    theta = np.array([1.0, 2.0])
    state = init(theta)
    batch = Moments(*np.array([[0.5, 0.0], [0.3, 0.0], [1.0, 0.0], [1.0, 0.0]]))
    for _ in range(20):
        theta, state, info = step(theta, state, batch, np.array([1, 0]))
    assert theta[0] != 1
    assert theta[1] == 2
    assert state.seen.tolist() == [20, 0]
    assert state.memory[1] == PAPER.memory
    assert [m[1] for m in state.mean] == [0, 0, 0, 0]
    assert info.rate[1] == 0


def test_nothing_moves_before_ten_samples():
    theta, state = 1.0, init(1.0)
    for _ in range(9):
        theta, state, _ = step(theta, state, Moments(1.0, 1.0, 1.0, 1.0), 1)
    assert theta == 1
    assert state.mean == Moments(1.0, 1.0, 1.0, 1.0)
    for _ in range(2):
        theta, state, _ = step(theta, state, Moments(1.0, 1.0, 1.0, 1.0), 1)
    assert theta < 1


def test_a_slow_start_distrusts_the_first_averages():
    state = init(1.0)
    options = Options(slow_start=10.0)
    for _ in range(10):
        _, state, _ = step(1.0, state, Moments(1.0, 2.0, 3.0, 9.0), 1, options)
    assert state.mean == Moments(1.0, 20.0, 3.0, 90.0)


def test_a_limited_memory_grows_with_the_root_of_time():
    rng = np.random.default_rng(0)
    longest = {}
    for limit in (0.0, 10.0):
        state = init(1.0)
        for g in rng.standard_normal(10_000).tolist():
            _, state, _ = step(1.0, state, Moments(g, g * g, 1.0, 1.0), 1, Options(memory_limit=limit))
        longest[limit] = state.memory
    assert 50 < longest[10.0] <= 102
    assert longest[0.0] > 1000


def test_constant_curvature_is_never_an_outlier():
    """Rounding leaves a variance of zero, or a little below it; that must not count as evidence."""
    rng = np.random.default_rng(0)
    h = (2.0 * (1 + 1e-12 * rng.standard_normal(1000))).tolist()
    state = rule.State(mean=Moments(0.0, 1.0, 2.0, 4.0), memory=5.0, seen=100.0)
    outliers = 0
    for value in h:
        _, state, info = step(0.0, state, Moments(0.0, 1.0, value, value * value), 1)
        outliers += bool(info.outlier)
    assert outliers == 0


def test_float32_stays_float32_in_compiled_code():
    numba = pytest.importorskip("numba")
    f = np.float32
    options = Options(*(value if isinstance(value, bool) else f(value) for value in PAPER))
    state = rule.State(mean=Moments(f(0), f(0), f(0), f(0)), memory=f(2), seen=f(0))
    arguments = f(1), state, Moments(f(1), f(1), f(1), f(1)), f(1), options
    kernel = compiled(step)
    kernel(*arguments)
    # Loops that other tests compile call it with other arguments; what was left out is part of a signature, too.
    types = tuple(map(numba.typeof, arguments))
    found = [o.signature.return_type for s, o in kernel.overloads.items() if s[: len(types)] == types]
    assert found
    for result in found:
        assert "float64" not in str(result)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_keep_their_dtype(dtype):
    torch = pytest.importorskip("torch")
    for ones, wanted in [(np.ones(3, dtype), np.dtype(dtype)), (torch.ones(3, dtype=getattr(torch, dtype)),) * 2]:
        wanted = getattr(wanted, "dtype", wanted)
        theta, state, info = step(ones, init(ones), Moments(ones, ones, ones, ones), 10)
        assert theta.dtype == state.memory.dtype == state.mean.curv_sq.dtype == info.rate.dtype == wanted


class TestBlocks:
    mean = Moments(
        grad=np.array([1.0, 0.0, 2.0, 3.0]),
        grad_sq=np.array([2.0, 5.0, 4.0, 9.0]),
        curv=np.array([1.0, 4.0, 2.0, 0.5]),
        curv_sq=np.array([1.0, 16.0, 4.0, 0.25]),
    )
    options = VSGD_2012._replace(epsilon=1e-14)

    def test_a_block_has_one_rate(self):
        """vSGD-b: Σḡ² / (max h̄ · Σv̄) over the block."""
        rates = rate(shared([0, 0, 1, 1])(self.mean), 1, self.options)
        np.testing.assert_allclose(rates, [1 / (4 * 7)] * 2 + [1 / 2] * 2)

    def test_one_label_makes_it_global(self):
        rates = rate(shared([7, 7, 7, 7])(self.mean), 1, self.options)
        np.testing.assert_allclose(rates, 14 / (4 * 20))

    def test_a_label_each_is_element_wise(self):
        rates = rate(shared(range(4))(self.mean), 1, self.options)
        np.testing.assert_allclose(rates, rate(self.mean, 1, self.options))

    def test_many_runs_at_once(self):
        twice = Moments(*(np.stack([m, m]) for m in self.mean))
        np.testing.assert_allclose(shared([0, 0, 1, 1])(twice).curv, [[4, 4, 2, 2]] * 2)

    def test_in_a_step(self):
        theta = np.zeros(4)
        state = rule.State(mean=self.mean, memory=np.full(4, 5.0), seen=np.full(4, 50.0))
        _, new, info = step(theta, state, self.mean, 1, VSGD_2012, shared([0, 0, 1, 1]))
        assert info.rate[0] == info.rate[1] != info.rate[2] == info.rate[3]
        assert new.memory[0] == new.memory[1] != new.memory[2] == new.memory[3]


def samples(largest: float, width: int):
    number = st.floats(-largest, largest, width=width, allow_subnormal=True)
    return st.lists(st.tuples(number, number), min_size=1, max_size=5)


def moments_of(pairs, dtype) -> Moments:
    g, h = np.abs(np.array(pairs, dtype)).T * np.sign(np.array(pairs, dtype)).T
    h = abs(h)
    return Moments(*(np.array([x.mean(dtype=dtype)]) for x in (g, g * g, h, h * h)))


@pytest.mark.parametrize(("dtype", "largest", "width"), [("float64", 1e150, 64), ("float32", 2.0**59, 32)])
@pytest.mark.parametrize("options", [PAPER, VSGD_2012, LIMITED], ids=["paper", "vsgd", "limited"])
def test_finite_whatever_the_moments(dtype, largest, width, options):
    """Zeros, subnormals and numbers whose squares just fit: finite results, rate ≥ 0, memory ≥ 1."""

    @settings(max_examples=300, deadline=None)
    @given(st.lists(samples(largest, width), min_size=1, max_size=12), st.integers(0, 3), st.integers(1, 1000))
    def check(batches, missing, count):
        theta = np.ones(1, dtype)
        state = init(theta, options)
        for i, pairs in enumerate(batches * 2):
            batch = moments_of(pairs, dtype)
            theta, state, info = step(theta, state, batch, count * (i % 4 != missing), options)
            for array in (theta, info.rate, state.memory, *state.mean):
                assert array.dtype == dtype
                assert np.isfinite(array).all()
            assert (info.rate >= 0).all()
            assert (state.memory >= 1).all()

    with np.errstate(under="ignore"):
        check()
