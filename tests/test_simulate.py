"""The simulator equals the reference, its NumPy version, and known properties of the problems."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import reference

from vsgd.algorithms.paper import share_within
from vsgd_bench import baselines
from vsgd_bench.baselines import (
    adagrad,
    adam,
    natural_gradient,
    oracle,
    sgd,
    sgd_qn,
    sharing,
    vsgd,
    vsgd_fd,
    vsgd_networks,
)
from vsgd_bench.problems import Elementary, rotated_quadratic
from vsgd_bench.simulate import draw_noise, powers_of_two, simulate, simulate_vectorized

SHAPES = ("quad", "abs", "rectlin", "gauss")
ALGORITHMS = [
    sgd(0.1),
    sgd(1.0, 1.0),
    adagrad(0.1),
    natural_gradient(0.1),
    sgd_qn(),
    adam(0.1),
    vsgd(),
    vsgd_fd(),
    vsgd_networks(),
]


@pytest.mark.parametrize("presence", [1.0, 0.3], ids=["dense", "sparse"])
@pytest.mark.parametrize("n", [1, 10])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("engine", [simulate, simulate_vectorized], ids=["numba", "numpy"])
@pytest.mark.parametrize("algorithm", [vsgd(), vsgd_fd()], ids=lambda a: a.name)
def test_equals_the_reference(algorithm, engine, shape, n, presence):
    problem = Elementary(shape, 1.0, 1.0)
    noise = draw_noise(3, range(2), 1000, n, presence=presence)
    every = list(range(1001))
    track = engine(problem, algorithm, noise, every)
    for run in range(2):
        batches = [z[there].tolist() for z, there in zip(noise.normal[run], noise.present[run], strict=True)]
        snapshots = reference.run(shape, 1.0, batches, finite_differences=algorithm.name == "vSGD-fd")
        expected = [snapshot.theta for snapshot in snapshots[noise.lead - 1 :]]
        # vSGD is chaotic on abs: steps of 1e5 amplify rounding; only the finite-difference rule is compared there
        length = 1001 if algorithm.name == "vSGD-fd" or shape in ("quad", "gauss") else 15
        np.testing.assert_allclose(track.theta[run, :length], expected[:length], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_fused_equals_vectorized(algorithm):
    checkpoints = powers_of_two(256)
    for n in (1, 4):
        noise = draw_noise(0, range(5), 256, n, presence=0.7)
        for shape in ("quad", "gauss"):
            problem = Elementary(shape, 1.0, 0.5)
            fused = simulate(problem, algorithm, noise, checkpoints)
            arrays = simulate_vectorized(problem, algorithm, noise, checkpoints)
            np.testing.assert_allclose(fused.theta, arrays.theta, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(fused.rate, arrays.rate, rtol=1e-9, atol=1e-12)


def test_run_does_not_depend_on_number_of_runs_and_threads():
    problem, checkpoints = Elementary("gauss", 1.0, 1.0), powers_of_two(64)
    many = simulate(problem, vsgd_fd(), draw_noise(0, range(20), 64, 10), checkpoints).theta
    few = simulate(problem, vsgd_fd(), draw_noise(0, range(7, 9), 64, 10), checkpoints).theta
    np.testing.assert_array_equal(many[7:9], few)
    with ThreadPoolExecutor(4) as pool:
        noise = draw_noise(0, range(20), 64, 10)
        tasks = [pool.submit(simulate, problem, vsgd_fd(), noise, checkpoints) for _ in range(8)]
        for task in tasks:
            np.testing.assert_array_equal(task.result().theta, many)
    other = draw_noise(1, range(7, 9), 64, 10)
    assert not np.array_equal(simulate(problem, vsgd_fd(), other, checkpoints).theta, few)


def test_divergence_is_infinite_not_a_crash():
    problem = Elementary("quad", 10.0, 1.0)
    noise = draw_noise(0, range(3), 512, 1)
    for engine in (simulate, simulate_vectorized):
        track = engine(problem, sgd(10.0), noise, powers_of_two(512))
        assert np.isinf(track.theta[:, -1]).all()
        assert np.isfinite(track.theta[:, 0]).all()
        assert np.isinf(problem.excess_loss(track.theta[:, -1])).all()


def test_nothing_beats_the_oracle_on_quad():
    """Eq. 1 is optimal, so no other rate is better in the mean over many runs."""
    problem, updates = Elementary("quad", 1.0, 1.0), 256
    noise = draw_noise(0, range(2000), updates, 1)

    def final(algorithm):
        return problem.excess_loss(simulate(problem, algorithm, noise, [updates]).theta[:, -1]).mean()

    best = final(oracle(curvature=2.0, noise=1.0))
    for algorithm in (sgd(0.1), sgd(1.0, 1.0), adagrad(1.0), adam(0.01), sgd_qn(), vsgd(), vsgd_fd()):
        assert final(algorithm) > best


def test_baselines_do_what_their_papers_say():
    batch = baselines.Moments(grad=2.0, grad_sq=5.0, curv=4.0, curv_sq=16.0)
    theta, total, _ = adagrad(0.5).update(1.0, 0.0, batch, 1, 0, adagrad(0.5).params)
    assert theta == pytest.approx(1 - 0.5)
    assert total == 4
    theta, fisher, _ = natural_gradient(0.5).update(1.0, 0.0, batch, 1, 0, natural_gradient(0.5).params)
    assert (theta, fisher) == (pytest.approx(1 - 0.5 * 2 / 5), 5)
    theta, _, rate = sgd(0.3, 1.0).update(1.0, 0.0, batch, 1, 2, sgd(0.3, 1.0).params)
    assert (theta, rate) == (pytest.approx(0.8), pytest.approx(0.1))
    algorithm = adam(0.01)
    theta, _, _ = algorithm.update(1.0, algorithm.init(1.0, algorithm.params), batch, 1, 0, algorithm.params)
    assert theta == pytest.approx(1 - 0.01)
    algorithm = sgd_qn(0.5)
    theta, curvature, _ = algorithm.update(1.0, algorithm.init(1.0, algorithm.params), batch, 1, 0, algorithm.params)
    assert (theta, curvature) == (pytest.approx(0.0), pytest.approx(4.0))


def test_after_a_jump_the_rates_rise_again():
    """quad, A = 1, σ² = 1: the optimum jumps by 5 after 1,024 updates."""
    problem, updates = Elementary("quad", 1.0, 1.0), 2048
    noise = draw_noise(0, range(100), updates, 1)
    centers = 5.0 * (np.arange(updates) >= 1024)
    every = list(range(updates + 1))

    def losses_and_rates(algorithm):
        track = simulate(problem, algorithm, noise, every, centers)
        offset = track.theta - np.append(centers, 5.0)
        return np.median(problem.excess_loss(offset), axis=0), np.median(track.rate, axis=0)

    loss, rate = losses_and_rates(vsgd_fd())
    limit = 0.01 * problem.excess_loss(5.0)
    assert loss[1024:1124].min() < limit
    assert rate[1024:1124].max() > 10 * rate[1024]
    loss, _ = losses_and_rates(sgd(1.0, 1.0))
    assert loss[1024:].min() > limit


class TestRotated:
    problem = rotated_quadratic(dim=8, condition=20.0, noise=1.0)

    def final(self, algorithm, updates=512):
        noise = draw_noise(0, range(10), updates, 10, dim=8)
        return np.median(self.problem.excess_loss(simulate(self.problem, algorithm, noise, [updates]).theta[..., -1]))

    @pytest.mark.parametrize(
        "algorithm",
        [
            vsgd_fd(),
            vsgd(),
            sharing(vsgd(), share_within([0] * 4 + [1] * 4), "vSGD-b"),
            sharing(vsgd(), share_within([0] * 8), "vSGD-g"),
        ],
        ids=lambda a: a.name,
    )
    def test_learns_though_coordinates_interfere(self, algorithm):
        initial = self.problem.excess_loss(np.ones(8))
        assert self.final(algorithm) < 0.05 * initial


def test_the_default_for_networks_stays_in_the_bowl_that_the_paper_leaves():
    problem = Elementary("gauss", 10.0, 0.1)
    noise = draw_noise(0, range(100), 1024, 1)
    left = {}
    for algorithm in (vsgd_fd(), vsgd_networks()):
        start, end = problem.excess_loss(simulate(problem, algorithm, noise, [0, 1024]).theta).T
        left[algorithm.name] = np.median(end) / np.median(start)
    assert left["vSGD-fd"] > 1
    assert left["vSGD, networks"] < 0.01


def test_the_default_for_networks_does_not_know_the_scale_of_the_loss():
    noise = draw_noise(0, range(10), 256, 1)
    small, large = (
        simulate(Elementary("quad", scale, 1.0), vsgd_networks(), noise, [256]).theta for scale in (1e-3, 1e3)
    )
    np.testing.assert_allclose(small, large, rtol=1e-6)
