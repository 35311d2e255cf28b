"""Claims of the figures, tested on their numbers."""

from __future__ import annotations

import numpy as np
import pytest

from vsgd_bench.figures import FIGURES, Request, comparison, drift
from vsgd_bench.figures.squares import square
from vsgd_bench.gain import averaged, counted, fixed, relative_gain, simulated_relative_gain
from vsgd_bench.problems import ELEMENTARY
from vsgd_bench.sparse.rates import by_frequency
from vsgd_bench.sparse.rates import draw as draw_rates


def test_figure_1_diminishing_returns():
    assert relative_gain(100, 1.0, 0.01, counted(0.01)) == pytest.approx(0.02, abs=0.0005)
    assert relative_gain(100, 1.0, 10.0, counted(10.0)) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("presence", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("noise", [0.01, 1.0, 10.0])
def test_figure_1_simulation_agrees_with_the_closed_form(presence, noise):
    rng = np.random.default_rng(0)
    for n in (1, 10, 100):
        estimate = simulated_relative_gain(n, presence, noise, 200_000 // n, rng)
        exact = relative_gain(n, presence, noise, counted(noise))
        assert abs(estimate.value - exact) < 3 * estimate.error


def test_figure_2_counting_beats_the_average_at_the_dent():
    p, noise = 0.1, 0.01
    count = relative_gain(10, p, noise, counted(noise))
    average = relative_gain(10, p, noise, averaged(noise, 10, p))
    assert count > 0.99
    assert average < 0.2
    assert (
        relative_gain(3, p, noise, averaged(noise, 3, p))
        > average
        < relative_gain(30, p, noise, averaged(noise, 30, p))
    )


@pytest.mark.parametrize("noise", [0.01, 10.0])
def test_figure_2_counting_is_above_every_fixed_rate(noise):
    for n in (1, 2, 5, 10, 30, 100, 300):
        envelope = max(relative_gain(n, 0.1, noise, fixed(eta, n)) for eta in np.logspace(-2, 2, 40))
        assert relative_gain(n, 0.1, noise, counted(noise)) > envelope


@pytest.fixture(scope="module")
def comparison_medians():
    """The results of the complete Figure 6, which take seconds."""
    request = Request()
    return comparison.final_medians({key: task() for key, task in comparison.FIGURE.parts(request).items()})


@pytest.mark.parametrize("n", [1, 10])
class TestFigure6:
    shapes = np.array([problem.shape for problem in ELEMENTARY])

    def test_quad_is_within_3_of_the_best_sgd_in_hindsight(self, comparison_medians, n):
        ours = comparison_medians[f"vSGD-fd n={n}"]
        best = np.min(
            [m for key, m in comparison_medians.items() if key.startswith("SGD") and key.endswith(f" n={n}")], 0
        )
        assert (ours < 3 * best)[self.shapes == "quad"].all()

    def test_all_but_the_known_failure_end_below_the_start(self, comparison_medians, n):
        below = comparison_medians[f"vSGD-fd n={n}"] < 1
        known = np.array([p == ("gauss", 10.0, 0.1) and n == 1 for p in ELEMENTARY])
        assert below[~known].all()

    def test_the_predecessor_is_unstable_on_abs(self, comparison_medians, n):
        on_abs = self.shapes == "abs"
        assert (comparison_medians[f"vSGD n={n}"] > 1)[on_abs].sum() >= 3
        assert (comparison_medians[f"vSGD-fd n={n}"] < 1)[on_abs].all()


def test_squares_sort_runs_and_keep_the_worst_on_top():
    ratio = np.array([[1.0, 0.1], [10.0, 0.01], [0.0, np.inf]])
    np.testing.assert_allclose(square(ratio, 3), [[1, 4], [0, -1], [-4, -2]])


def test_drift_recovery_is_counted_from_the_jump():
    request = Request(updates=4)
    assert drift.recovery(np.array([0.0, 0, 0, 0, 25, 9, 0.2, 0.1, 0.1]), request) == 2
    assert drift.recovery(np.full(9, 25.0), request) is None


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws_for_every_request(name):
    request = Request(runs=3, updates=11, seed=5)
    figure = FIGURES[name]
    results = {part: task() for part, task in figure.parts(request).items()}
    assert figure.draw(results, request).axes
    assert figure.numbers(results, request)


def test_rates_by_frequency():
    posts = np.repeat([1, 2, 3, 4, 5, 1000], [50, 20, 20, 20, 20, 3])
    at, quantiles = by_frequency(posts, 1.0 / posts)
    np.testing.assert_array_equal(at, [1, 2, 4], "three words are too few for a group")
    np.testing.assert_allclose(quantiles[2], [1, 1 / 2, 1 / 4])
    (axis,) = draw_rates(posts, 1.0 / posts, 2000).axes
    assert axis.get_xscale() == axis.get_yscale() == "log"
    assert "2,000" in axis.get_xlabel()
