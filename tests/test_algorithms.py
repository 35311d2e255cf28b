"""The algorithms with every array library, and that of the paper compared with scalar loops."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import reference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from libraries import ARRAYS, SCALARS, on_floats, on_numba

from vsgd import COLUMNS, NETWORKS, PAPER, VSGD_2012, Columns, Moments, Networks, Paper, State
from vsgd.algorithms import columns, networks, paper
from vsgd.algorithms.base import require
from vsgd.algorithms.networks import TensorContext
from vsgd.algorithms.paper import init, probe, rate, share_within, update
from vsgd.jit import compiled
from vsgd_bench import one_coordinate

UPDATES = 1000
SHAPES = ("quad", "abs", "rectlin", "gauss")


def minibatches(n: int, presence: float, seed: int = 1) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    xi = rng.standard_normal((UPDATES, n))
    xi[50::97] *= 20  # occasional outliers
    present = rng.random((UPDATES, n)) < presence
    return [row[mask].tolist() for row, mask in zip(xi, present, strict=True)]


class Case(NamedTuple):
    """A problem of one coordinate."""

    shape: str
    n: int
    presence: float


CASES = [Case(*case) for case in itertools.product(SHAPES, (1, 10), (1.0, 0.3))]


def assert_equals_the_reference(library, cases):
    """Minimize every case in a separate coordinate."""
    lift, lower, made = library()
    do_update, do_probe = made(update, 4), made(probe, 3)
    batches = [minibatches(case.n, case.presence) for case in cases]
    expected = [reference.run(case.shape, 1.0, own) for case, own in zip(cases, batches, strict=True)]
    theta = lift([1.0] * len(cases))
    state = made(init, 1)(theta, PAPER)
    track = []
    for samples in zip(*batches, strict=True):

        def gradients(points, samples=samples):
            return [
                np.array([reference.sample_gradient(case.shape, 1.0, point - xi) for xi in own] or [0.0])
                for case, point, own in zip(cases, points, samples, strict=True)
            ]

        here = lower(theta)
        grads, count = gradients(here), lift([float(len(own)) for own in samples])
        deltas = lower(do_probe(state, lift([g.mean() for g in grads]), count, PAPER))
        probed = gradients([point + delta for point, delta in zip(here, deltas, strict=True)])
        curvs = [abs((g - there) / delta) for g, there, delta in zip(grads, probed, deltas, strict=True)]
        batch = Moments(
            *(lift([float((x**power).mean()) for x in values]) for values in (grads, curvs) for power in (1, 2))
        )
        theta, state, info = do_update(theta, state, batch, count, PAPER)
        rates = np.multiply(lower(info.rate), [len(own) > 0 for own in samples])
        track.append([lower(theta), lower(state.memory), lower(state.mean.grad_sq), rates])
    for k, (snapshots, own) in enumerate(zip(expected, batches, strict=True)):
        wanted = [[c.theta, c.tau, c.v, c.eta * (len(b) > 0)] for c, b in zip(snapshots, own, strict=True)]
        np.testing.assert_allclose(np.array(track)[:, :, k], wanted, rtol=1e-9, atol=1e-12, err_msg=f"{cases[k]}")
        assert snapshots[-1].outliers > 0, "the stream must exercise the outlier test"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("library", SCALARS)
def test_the_paper_equals_the_reference_over_a_thousand_updates(library, case):
    assert_equals_the_reference(library, [case])


@pytest.mark.parametrize("library", ARRAYS)
def test_the_paper_equals_the_reference_in_every_coordinate_of_an_array(library):
    assert_equals_the_reference(library, CASES)


NOTHING = TensorContext(curv=0.0, curv_sq=0.0, grad_clip=3.0, step_limit=1.0, horizon=1.0)
"""Return a context without influence on the coordinates."""


@pytest.mark.parametrize("library", [on_numba, *ARRAYS])
@pytest.mark.parametrize(
    ("first", "step", "config"),
    [(one_coordinate.init, one_coordinate.update, NETWORKS), (columns.init, columns.update, COLUMNS)],
    ids=["networks", "columns"],
)
def test_the_others_are_the_same_in_every_library(first, step, config, library):
    """Compare θ and the rates with those of plain floats, for given moments."""
    rng = np.random.default_rng(0)
    grads = rng.standard_normal((UPDATES, 4)) + np.linspace(1, 0, UPDATES)[:, None]
    grads[50::97] *= 20
    curvs = rng.uniform(0.5, 2, (UPDATES, 4))
    counts = rng.integers(0, 5, UPDATES)

    def track(lift, lower, made):
        begin, do_step = made(first, 1), made(step, 4)
        theta = lift([1.0])
        state = begin(theta, config)
        for g, h, n in zip(grads, curvs, counts, strict=True):
            batch = Moments(*(lift([float(x.mean())]) for x in (g, g**2, h, h**2)))
            theta, state, info = do_step(theta, state, batch, lift([float(n)]), config)
            yield [float(*lower(x)) for x in (theta, info.rate, info.outlier)]

    wanted = list(track(*on_floats()))
    np.testing.assert_allclose(list(track(*library())), wanted, rtol=1e-9, atol=1e-12)
    assert 0 < sum(outlier for _, _, outlier in wanted) < UPDATES / 4


def test_the_rate_without_noise_is_one_over_the_curvature():
    mean = Moments(grad=3.0, grad_sq=9.0, curv=4.0, curv_sq=16.0)
    assert rate(mean, 1, Paper(epsilon=1e-12)) == pytest.approx(1 / 4)
    assert rate(mean, 1, VSGD_2012._replace(epsilon=1e-12)) == pytest.approx(1 / 4)
    assert columns.rate(mean, 1) == pytest.approx(1 / 4)
    for decoupled in (True, False):
        assert networks.rate(mean, 5.0, 1, NETWORKS, NOTHING, decoupled) == pytest.approx(1 / 4)


@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_the_rate_knows_the_minibatch(count):
    """Eq. 3: noise is divided by n."""
    distance, sigma_sq = 0.7, 5.0
    mean = Moments(grad=distance, grad_sq=distance**2 + sigma_sq, curv=1.0, curv_sq=1.0)
    expected = distance**2 / (distance**2 + sigma_sq / count)
    assert rate(mean, count, Paper(epsilon=1e-14)) == pytest.approx(expected)
    assert columns.rate(mean, count) == pytest.approx(expected)
    for decoupled in (True, False):
        assert networks.rate(mean, 5.0, count, NETWORKS, NOTHING, decoupled) == pytest.approx(expected)


def test_a_coordinate_without_samples_is_left_alone():
    theta = np.array([1.0, 2.0])
    state = init(theta)
    batch = Moments(*np.array([[0.5, 0.0], [0.3, 0.0], [1.0, 0.0], [1.0, 0.0]]))
    for _ in range(20):
        theta, state, info = update(theta, state, batch, np.array([1, 0]))
    assert theta[0] != 1
    assert theta[1] == 2
    assert state.seen.tolist() == [20, 0]
    assert state.memory[1] == PAPER.memory
    assert [m[1] for m in state.mean] == [0, 0, 0, 0]
    assert info.rate[1] == 0


def test_nothing_moves_before_ten_samples():
    theta, state = 1.0, init(1.0)
    for _ in range(9):
        theta, state, _ = update(theta, state, Moments(1.0, 1.0, 1.0, 1.0), 1)
    assert theta == 1
    assert state.mean == Moments(1.0, 1.0, 1.0, 1.0)
    for _ in range(2):
        theta, state, _ = update(theta, state, Moments(1.0, 1.0, 1.0, 1.0), 1)
    assert theta < 1


def test_constant_curvature_is_never_an_outlier():
    """A variance of zero, or slightly negative by rounding, must not be used as evidence."""
    rng = np.random.default_rng(0)
    h = (2.0 * (1 + 1e-12 * rng.standard_normal(1000))).tolist()
    state = State(mean=Moments(0.0, 1.0, 2.0, 4.0), memory=5.0, seen=100.0)
    outliers = 0
    for value in h:
        _, state, info = update(0.0, state, Moments(0.0, 1.0, value, value * value), 1)
        outliers += bool(info.outlier)
    assert outliers == 0


class TestNetworks:
    def test_the_first_averages_are_inflated(self):
        """Once, at the end of the bootstrap of three."""
        state = one_coordinate.init(1.0)
        for _ in range(3):
            _, state, info = one_coordinate.update(1.0, state, Moments(1.0, 2.0, 3.0, 9.0), 1, NETWORKS)
            assert info.rate == 0
        assert state.inner.mean == Moments(1.0, 20.0, 3.0, 90.0)

    def test_the_memory_grows_with_the_root_of_time(self):
        rng = np.random.default_rng(0)
        capped, free = one_coordinate.init(1.0), init(1.0)
        for g in rng.standard_normal(10_000).tolist():
            batch = Moments(g, g * g, 1.0, 1.0)
            _, capped, _ = one_coordinate.update(1.0, capped, batch, 1, NETWORKS)
            _, free, _ = update(1.0, free, batch, 1)
        assert 50 < capped.inner.memory <= 102
        assert free.memory > 1000

    def test_the_weights_to_evaluate_are_an_average_of_the_iterates(self):
        """Without noise, the window has its minimum length."""
        theta, state = 1.0, one_coordinate.init(1.0)
        for _ in range(3):
            theta, state, _ = one_coordinate.update(
                theta, state, Moments(2 * theta, 4 * theta**2, 2.0, 4.0), 1, NETWORKS
            )
        average = theta
        for _ in range(50):
            theta, state, _ = one_coordinate.update(
                theta, state, Moments(2 * theta, 4 * theta**2, 2.0, 4.0), 1, NETWORKS
            )
            average += (theta - average) / NETWORKS.min_window
            assert one_coordinate.evaluation_point(theta, state) == pytest.approx(average)
        assert abs(theta) < abs(average) < 1

    def test_the_average_reaches_back_over_a_share_of_all_steps(self):
        """The window has a lower limit even if averaging does not help."""
        state = networks.Averaging(window=100.0, advantage=-1.0)
        for _ in range(200):
            state = networks.averaging(state, -1.0, 1000)
        assert state.window == NETWORKS.window_share * 1000
        for _ in range(200):
            state = networks.averaging(state, -1.0, 20)
        assert state.window == NETWORKS.min_window

    @pytest.mark.parametrize(("noise", "horizon"), [(0.0, NETWORKS.max_horizon), (10.0, 1.0)])
    def test_rates_rise_while_noise_costs_less_than_is_gained(self, noise, horizon):
        state = networks.Progress(recent=0.0, earlier=0.0, horizon=2.0, spread=0.0)
        for step in range(1000):
            state = networks.progress(state, 100.0 - step / 100, noise, step)
        assert state.horizon == horizon
        assert 0.5 < state.earlier - state.recent < 2  # of a decrease of the loss by ten

    def test_over_a_horizon_noise_counts_less_and_no_rate_exceeds_one_over_the_curvature(self):
        """A horizon of K is equivalent to minibatches that are K times larger."""
        certain = Moments(grad=1.0, grad_sq=1.0, curv=2.0, curv_sq=4.0)
        noisy = certain._replace(grad_sq=1.0 + 9.0)
        ahead = NOTHING._replace(horizon=3.0)
        assert networks.rate(certain, 5.0, 1, NETWORKS, ahead, True) == pytest.approx(1 / 2)
        assert networks.rate(noisy, 5.0, 1, NETWORKS, NOTHING, True) == pytest.approx(1 / (1 + 9) / 2)
        assert networks.rate(noisy, 5.0, 1, NETWORKS, ahead, True) == pytest.approx(3 / (3 + 9) / 2)

    def test_rates_fall_back_where_the_loss_does_not_fall(self):
        state = networks.Progress(recent=0.0, earlier=0.0, horizon=4.0, spread=0.0)
        for step in range(1000):
            state = networks.progress(state, 1.0, 1e-6, step)
        assert state.horizon == 1

    def test_expected_decrease_of_a_logarithmic_loss_is_that_of_as_many_steps_to_come(self):
        state = networks.Progress(recent=0.0, earlier=0.0, horizon=1.0, spread=0.0)
        for step in range(3000):
            state = networks.progress(state, 10 - np.log(step + 1), 0.0, step)
        assert networks.EXPECTED_DECREASE * (state.earlier - state.recent) == pytest.approx(np.log(2), rel=0.05)

    @pytest.mark.parametrize("step_of_outlier", [2, 50, 1000])
    def test_one_outlier_of_the_loss_has_no_lasting_effect_on_the_horizon(self, step_of_outlier):
        """The loss is noise around a constant, so the final horizon is 1, with and without the outlier."""
        losses = 1 + 0.1 * np.random.default_rng(0).standard_normal(3000)
        losses[step_of_outlier] += 1e6
        state, horizons = networks.Progress(recent=0.0, earlier=0.0, horizon=1.0, spread=0.0), []
        for step, loss in enumerate(losses):
            state = networks.progress(state, loss, 0.02 * networks.EXPECTED_DECREASE, step)
            horizons.append(state.horizon)
        assert max(horizons[step_of_outlier + 500 :]) < 1.1
        assert state.spread < 0.2

    def test_the_unit_of_the_loss_does_not_matter_to_rates(self):
        plain = scaled = networks.Progress(recent=0.0, earlier=0.0, horizon=1.0, spread=0.0)
        for step in range(300):
            loss, noise = 3 / (step + 10), 0.02 * (step % 7 == 0)
            plain = networks.progress(plain, loss, noise, step)
            scaled = networks.progress(scaled, 1e12 * loss, 1e12 * noise, step)
        assert plain.horizon == scaled.horizon > 1

    def test_curvature_is_shrunk_towards_the_mean_of_the_tensor(self):
        """A flat coordinate in a curved tensor takes a step that the tensor's curvature allows."""
        flat = Moments(grad=1.0, grad_sq=1.0, curv=0.0, curv_sq=0.0)
        tensor = networks.context(2.0, 4.0, 1.0, 1.0, 0.1)
        assert networks.rate(flat, 5.0, 1, NETWORKS, tensor, False) == pytest.approx(1 / 2)

    def test_in_decoupled_coordinates_noise_of_the_curvature_averages_out(self):
        """|h̄| plus the standard error of that mean, over n τ samples."""
        noisy = Moments(grad=1.0, grad_sq=1.0, curv=-2.0, curv_sq=4.0 + 9.0)
        assert networks.rate(noisy, 9.0, 1, NETWORKS, NOTHING, True) == pytest.approx(1 / (2 + 1))
        assert networks.rate(noisy, 9.0, 4, NETWORKS, NOTHING, True) == pytest.approx(1 / (2 + 0.5))

    def test_steps_end_where_the_probe_has_not_looked(self):
        tensor = networks.context(0.0, 0.0, 1.0, 1.0, 0.1)
        assert networks.limited_step(1e9, 1.0, 1.0, tensor) == pytest.approx(0.3)
        assert networks.limited_step(1e-3, 1e9, 1.0, tensor) == pytest.approx(3e-3)
        assert networks.limited_step(1e-3, -2.0, 1.0, tensor) == pytest.approx(-2e-3)

    def test_the_length_scale_never_falls(self):
        assert networks.length_scale(2.0, 1.0) == 2
        assert networks.length_scale(2.0, -3.0) == 3
        assert networks.length_scale(0.0, 0.0) == NETWORKS.min_rms

    def test_no_step_is_longer_than_the_probe_where_no_curvature_was_seen(self):
        """The curvature is |ḡ|/|δ| if none was measured."""
        flat = Moments(grad=3.0, grad_sq=9.0, curv=0.0, curv_sq=0.0)
        tensor = networks.context(0.0, 0.0, 3.0, 3.0, 0.03)
        for decoupled in (True, False):
            assert networks.rate(flat, 5.0, 1, NETWORKS, tensor, decoupled) * 3.0 == pytest.approx(0.03)

    def test_a_probe_is_a_fraction_of_the_length_scale(self):
        assert networks.probe_size(2.0) == pytest.approx(0.06)

    def test_signs_are_fair_and_depend_on_index_and_seed(self):
        index = np.arange(20_000)
        bits = networks.random_bit(index, np.int64(7))
        other = networks.random_bit(index, np.int64(8))
        assert set(bits.tolist()) == {0, 1}
        for sample in (bits, bits ^ other, bits[1:] ^ bits[:-1]):
            assert abs(sample.mean() - 0.5) < 4 * 0.5 / len(index) ** 0.5
        np.testing.assert_array_equal(networks.probe(0.5, bits), np.where(bits == 1, 0.5, -0.5))

    def test_a_second_gradient_is_due_at_times_and_where_the_first_is_long(self):
        assert [unprobed for unprobed in range(12) if networks.probe_due(unprobed, False)] == [9, 10, 11]
        assert [unprobed for unprobed in range(12) if networks.probe_due(unprobed, True)] == [4, 5, 6, 7, 8, 9, 10, 11]
        assert not networks.is_long(3.9, 1.0)
        assert networks.is_long(4.1, 1.0)


def test_the_probe_of_a_column_is_the_step_of_a_coordinate():
    """The probe is 1 / max |x| without statistics, and the root of the signal fraction of that with many samples."""
    assert columns.probe(columns.init(0.0), 1, 4.0) == pytest.approx(1 / 4)
    known = State(mean=Moments(1.0, 4.0, 1.0, 1.0), memory=1e12, seen=1e12)
    assert columns.probe(known, 1, 4.0) == pytest.approx(0.25**0.5 / 4)


def test_a_step_beyond_a_kink_is_bounded_by_the_probe():
    """Without measured curvature, damping c limits the step to δ/c."""
    assert columns.damped(0.0, 3.0, 0.1, COLUMNS) == pytest.approx(0.1 * 30)


@pytest.mark.parametrize(
    ("made", "field", "value"),
    [
        (Paper, "epsilon", -1.0),
        (Paper, "memory", 0.5),
        (Columns, "epsilon", 0.0),
        (Columns, "min_memory_cap", 0.0),
        (Networks, "probe_interval", 0),
        (Networks, "bootstrap", float("nan")),
        (Networks, "probe_scale", float("inf")),
    ],
)
def test_impossible_constants_are_refused(made, field, value):
    with pytest.raises(ValueError, match=f"^{made.__name__}: {field} is {value}, it must be at least"):
        made(**{field: value})
    with pytest.raises(ValueError, match=field):
        made()._replace(**{field: value})


def test_a_foreign_algorithm_is_refused_by_name():
    require(COLUMNS, Columns, Paper)
    with pytest.raises(TypeError, match=r"vsgd\.Columns or vsgd\.Paper; this is Networks\(\)"):
        require(NETWORKS, Columns, Paper)
    with pytest.raises(TypeError, match=r"vsgd\.Networks; this is 'adam'"):
        require("adam", Networks)


def in_float32(config):
    """Return the constants as a float32 loop receives them."""
    return type(config)(*(value if isinstance(value, bool) else np.float32(value) for value in config))


def learn_of_networks(theta, state, batch, count, config):
    """Return the results of an update without its step, which engines implement separately."""
    return networks.learn(state, batch, count, config, TensorContext(theta, theta, theta, theta, theta), True)


@pytest.mark.parametrize(
    ("step", "config"), [(update, PAPER), (learn_of_networks, NETWORKS)], ids=["paper", "networks"]
)
def test_float32_stays_float32_in_compiled_code(step, config):
    f = np.float32
    state = State(mean=Moments(f(0), f(0), f(0), f(0)), memory=f(2), seen=f(0))
    kernel = compiled(step)
    before = set(kernel.overloads)
    kernel(f(1), state, Moments(f(1), f(1), f(1), f(1)), f(1), in_float32(config))
    (signature,) = set(kernel.overloads) - before
    assert "float64" not in str(kernel.overloads[signature].signature.return_type)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("step", "config"), [(update, PAPER), (learn_of_networks, NETWORKS)], ids=["paper", "networks"]
)
def test_arrays_keep_their_dtype(step, config, dtype):
    torch = pytest.importorskip("torch")
    for ones, wanted in [(np.ones(3, dtype), np.dtype(dtype)), (torch.ones(3, dtype=getattr(torch, dtype)),) * 2]:
        wanted = getattr(wanted, "dtype", wanted)
        *theta, state, info = step(ones, init(ones, config), Moments(ones, ones, ones, ones), 10, config)
        assert state.memory.dtype == state.mean.curv_sq.dtype == info.rate.dtype == wanted
        assert all(values.dtype == wanted for values in theta)


class TestBlocks:
    mean = Moments(
        grad=np.array([1.0, 0.0, 2.0, 3.0]),
        grad_sq=np.array([2.0, 5.0, 4.0, 9.0]),
        curv=np.array([1.0, 4.0, 2.0, 0.5]),
        curv_sq=np.array([1.0, 16.0, 4.0, 0.25]),
    )
    config = VSGD_2012._replace(epsilon=1e-14)

    def test_a_block_has_one_rate(self):
        """vSGD-b: Σḡ² / (max h̄ · Σv̄) over the block."""
        rates = rate(share_within([0, 0, 1, 1])(self.mean), 1, self.config)
        np.testing.assert_allclose(rates, [1 / (4 * 7)] * 2 + [1 / 2] * 2)

    def test_one_label_makes_it_global(self):
        rates = rate(share_within([7, 7, 7, 7])(self.mean), 1, self.config)
        np.testing.assert_allclose(rates, 14 / (4 * 20))

    def test_a_label_each_is_element_wise(self):
        rates = rate(share_within(range(4))(self.mean), 1, self.config)
        np.testing.assert_allclose(rates, rate(self.mean, 1, self.config))

    def test_many_runs_at_once(self):
        twice = Moments(*(np.stack([m, m]) for m in self.mean))
        np.testing.assert_allclose(share_within([0, 0, 1, 1])(twice).curv, [[4, 4, 2, 2]] * 2)

    def test_in_an_update(self):
        theta = np.zeros(4)
        state = State(mean=self.mean, memory=np.full(4, 5.0), seen=np.full(4, 50.0))
        _, new, info = update(theta, state, self.mean, 1, VSGD_2012, share_within([0, 0, 1, 1]))
        assert info.rate[0] == info.rate[1] != info.rate[2] == info.rate[3]
        assert new.memory[0] == new.memory[1] != new.memory[2] == new.memory[3]


def samples(largest: float, width: int):
    number = st.floats(-largest, largest, width=width, allow_subnormal=True)
    return st.lists(st.tuples(number, number), min_size=1, max_size=5)


def moments_of(pairs, dtype) -> Moments:
    g, h = np.array(pairs, dtype).T
    h = abs(h)
    return Moments(*(np.array([x.mean(dtype=dtype)]) for x in (g, g * g, h, h * h)))


DOUBLE, SINGLE = ("float64", 1e150, 64), ("float32", 2.0**59, 32)
PROBED = ("float32", 2.0**58, 32)
"""Gradients are divided by the size of a probe, 0.03, before they are squared."""


@pytest.mark.parametrize(
    ("first", "step", "config", "kind"),
    [
        (paper.init, paper.update, PAPER, DOUBLE),
        (paper.init, paper.update, PAPER, SINGLE),
        (paper.init, paper.update, VSGD_2012, DOUBLE),
        (paper.init, paper.update, VSGD_2012, SINGLE),
        (one_coordinate.init, one_coordinate.update, NETWORKS, DOUBLE),
        (one_coordinate.init, one_coordinate.update, NETWORKS, PROBED),
        (columns.init, columns.update, COLUMNS, DOUBLE),
    ],
    ids=["paper", "paper32", "vsgd", "vsgd32", "networks", "networks32", "columns"],
)
def test_results_are_finite_for_all_moments(first, step, config, kind):
    """Zeros, subnormals and numbers whose squares just fit: finite results, rate ≥ 0, memory ≥ 1."""
    dtype, largest, width = kind
    config = config if kind is DOUBLE else in_float32(config)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(samples(largest, width), min_size=1, max_size=12), st.integers(0, 3), st.integers(1, 1000))
    @example([[(largest, 2.0**-126)]] * 12, 0, 1)  # almost no curvature
    @example([[(largest, 2.0**-126)], [(-largest, 2.0**-126)]] * 6, 0, 1)
    def check(batches, missing, count):
        theta = np.ones(1, dtype)
        state = first(theta, config)
        for i, pairs in enumerate(batches * 2):
            batch = moments_of(pairs, dtype)
            theta, state, info = step(theta, state, batch, count * (i % 4 != missing), config)
            inner = getattr(state, "inner", state)
            for array in (theta, info.rate, inner.memory, *inner.mean):
                assert array.dtype == dtype
                assert np.isfinite(array).all()
            assert (info.rate >= 0).all()
            assert (inner.memory >= 1).all()

    with np.errstate(under="ignore"):
        check()


class TestDecayStrength:
    def test_shrinkage_equals_the_cost_of_the_noise(self):
        noise, curv, rms, samples = 0.3, 2.0, 0.05, 40.0
        strength = networks.decay_strength(noise, curv, rms, samples)
        assert strength * rms**2 == pytest.approx(noise / (samples * (curv + strength)))

    def test_is_the_evidence_procedure_where_noise_equals_curvature(self):
        curv, rms, samples = 0.7, 0.2, 1000.0
        strength = networks.decay_strength(curv, curv, rms, samples)
        assert strength == pytest.approx(curv / (curv + strength) / (samples * rms**2))

    @pytest.mark.parametrize("scale", [1e-12, 1e12])
    def test_has_the_unit_of_a_curvature(self, scale):
        plain, scaled = (networks.decay_strength(0.3 * s * s, 2.0 * s, 0.1, 50.0) for s in (1.0, scale))
        assert scaled == pytest.approx(scale * plain)

    @pytest.mark.parametrize("library", ARRAYS)
    def test_is_finite_and_zero_where_nothing_is_known(self, library):
        lift, lower, _ = library()
        noise, curv, rms, samples = zip(
            (0.0, 1.0, 1.0, 9.0), (1.0, 0.0, 1.0, 9.0), (1.0, 1.0, 0.0, 9.0), (1.0, 1.0, 1.0, 0.0), strict=True
        )
        strength = lower(networks.decay_strength(*map(lift, (noise, curv, rms, samples))))
        assert strength == pytest.approx([0.0, 1 / 3, 0.0, 0.0])


class TestMomentum:
    def test_grows_while_gradients_point_along_the_drift(self):
        state = networks.Momentum(0.0, 0.0)
        for _ in range(200):
            state = networks.momentum(state, -1.0, -1.0)
        assert state.coefficient == NETWORKS.max_momentum

    @pytest.mark.parametrize(("product", "advantage"), [(1.0, -1.0), (-1.0, 1.0)])
    def test_falls_in_noise(self, product, advantage):
        state = networks.Momentum(0.9, product)
        for _ in range(100):
            state = networks.momentum(state, product, advantage)
        assert state.coefficient == 0

    @pytest.mark.parametrize(
        ("advantage", "recent", "obstructed"),
        [(-1.0, 0.9, False), (1.0, 0.9, True), (-1.0, 1.1, False), (-1.0, 1.5, True), (0.0, 1.0, False)],
    )
    @pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
    def test_obstacles_are_noise_and_a_rising_loss_in_any_unit(self, advantage, recent, obstructed, unit):
        averaging = networks.Averaging(window=5.0, advantage=advantage * unit)
        progress = networks.Progress(recent=recent * unit, earlier=unit, horizon=1.0, spread=unit)
        assert (networks.momentum_obstacle(averaging, progress) > 0) == obstructed
