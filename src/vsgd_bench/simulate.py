"""Simulate repeated runs of an algorithm on a test problem.

All algorithms see the same samples. Noise is drawn in advance, one stream per run, from one seed. Run r therefore does
not depend on the number of runs or threads. Results are the parameters at a few checkpoints; losses are computed from
them in closed form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsgd.core import Moments, Values, curvature, signed_curvature
from vsgd.jit import compiled
from vsgd_bench.baselines import FINITE_DIFFERENCES, NO_CURVATURE, SAMPLE_CURVATURE, SIGNED_DIFFERENCES, Algorithm
from vsgd_bench.problems import Elementary, Problem
from vsgd_bench.problems import curvature as problem_curvature
from vsgd_bench.problems import gradient as problem_gradient

START = 1.0
"""Initial θ, at a distance of 1 from the optimum."""

DIVERGED = 1e100
"""A run whose parameter exceeds this has diverged: its parameter is infinite from then on."""

BOOTSTRAP = 10
"""Number of samples before the first update, for algorithms with a bootstrap."""


class Noise(NamedTuple):
    """Standard normal samples, runs × minibatches × n (× dimensions), and a mask of those with non-zero gradient."""

    normal: NDArray[np.float64]
    present: NDArray[np.bool_]
    lead: int
    """Number of minibatches before the first update."""

    @property
    def updates(self) -> int:
        return int(self.normal.shape[1]) - self.lead


class Track(NamedTuple):
    """Parameters and rates, runs × checkpoints (× dimensions)."""

    theta: NDArray[np.float64]
    rate: NDArray[np.float64]


def draw_noise(seed: int, runs: range, updates: int, n: int, dim: int | None = None, presence: float = 1.0) -> Noise:
    """Return the samples of some runs. Each is non-zero with probability `presence`."""
    lead = -(-BOOTSTRAP // n)
    shape = (lead + updates, n) if dim is None else (lead + updates, n, dim)
    streams = [np.random.default_rng((seed, n, run)) for run in runs]
    normal = np.stack([stream.standard_normal(shape) for stream in streams])
    if presence < 1:
        present = np.stack([stream.random(shape) < presence for stream in streams])
    else:
        present = np.ones(normal.shape, dtype=bool)
    return Noise(normal=normal, present=present, lead=lead)


def powers_of_two(updates: int) -> list[int]:
    """Return 0, 1, 2, 4, … and the number of updates."""
    return sorted({0, updates, *(2**k for k in range(updates.bit_length()))})


def simulate(
    problem: Problem,
    algorithm: Algorithm,
    noise: Noise,
    checkpoints: list[int],
    centers: NDArray[np.floating] | None = None,
) -> Track:
    """Return the parameters and rates of all runs at the checkpoints.

    One-dimensional problems run in a compiled loop, others in NumPy, vectorized over runs.

    Args:
        problem: the problem to minimize.
        algorithm: the optimizer.
        noise: from `draw_noise`.
        checkpoints: numbers of updates after which the parameter is stored; 0 is the start.
        centers: the optimum at each update, if it moves; 0 by default.
    """
    if not isinstance(problem, Elementary):
        return simulate_vectorized(problem, algorithm, noise, checkpoints, centers)
    runs = len(noise.normal)
    track = Track(*(np.full((runs, len(checkpoints)), np.inf) for _ in Track._fields))
    compiled(fused_runs)(
        compiled(algorithm.init),
        compiled(algorithm.update),
        compiled(algorithm.probe),
        compiled(algorithm.evaluation_point),
        algorithm.params,
        algorithm.curvature,
        first_minibatch(algorithm, noise),
        problem.code,
        problem.scale,
        problem.sigma,
        noise.normal,
        noise.present,
        noise.lead,
        _padded(centers, noise),
        np.asarray(checkpoints),
        track.theta,
        track.rate,
    )
    return track


def first_minibatch(algorithm: Algorithm, noise: Noise) -> int:
    """Return the index of the first minibatch that an algorithm receives, which may be part of its bootstrap."""
    return noise.lead - min(noise.lead, -int(-algorithm.bootstrap // noise.normal.shape[2]))


def _padded(centers: NDArray[np.floating] | None, noise: Noise) -> NDArray[np.floating]:
    """Return the optimum at every minibatch, including those before the first update."""
    if centers is None:
        return np.zeros(noise.lead + noise.updates)
    return np.concatenate([np.full(noise.lead, centers[0]), centers])


def simulate_vectorized(
    problem: Problem,
    algorithm: Algorithm,
    noise: Noise,
    checkpoints: list[int],
    centers: NDArray[np.floating] | None = None,
) -> Track:
    """Simulate all runs at once in NumPy, for problems of any dimension."""
    shape = noise.normal.shape[:1] + noise.normal.shape[3:]
    thetas, rates = (np.full((*shape, len(checkpoints)), np.inf) for _ in Track._fields)
    theta, rate = np.full(shape, START), np.zeros(shape)
    state = algorithm.init(theta, algorithm.params)
    centers = _padded(centers, noise)
    start = first_minibatch(algorithm, noise)
    dense = noise.present.all()
    with np.errstate(all="ignore"):
        for i in range(start, noise.lead + noise.updates):
            t = i - noise.lead
            if t in checkpoints:
                thetas[..., checkpoints.index(t)] = algorithm.evaluation_point(theta, state)
                rates[..., checkpoints.index(t)] = rate
            sample = centers[i] + problem.sigma * noise.normal[:, i]
            present = None if dense else noise.present[:, i]
            batch, count = _batch_moments(problem, algorithm, theta, state, sample, present, t)
            theta, state, rate = algorithm.update(theta, state, batch, count, t, algorithm.params)
            theta = np.where(abs(theta) < DIVERGED, theta, np.inf)
    if noise.updates in checkpoints:
        thetas[..., -1], rates[..., -1] = algorithm.evaluation_point(theta, state), rate
    return Track(theta=thetas, rate=rates)


def _batch_moments(
    problem: Problem, algorithm: Algorithm, theta: Any, state: Any, sample: Any, present: Any, t: int
) -> tuple[Moments, Any]:
    count = np.full(theta.shape, sample.shape[1]) if present is None else present.sum(axis=1)

    def mean(values: Values) -> Values:
        if present is None:
            return values.mean(axis=1)
        return (values * present).sum(axis=1) / np.maximum(count, 1)

    offset = theta[:, None] - sample
    grads = problem.gradient(offset)
    grad = mean(grads)
    if algorithm.curvature in (FINITE_DIFFERENCES, SIGNED_DIFFERENCES):
        delta = algorithm.probe(theta, state, grad, count, t, algorithm.params)[:, None]
        measure = curvature if algorithm.curvature == FINITE_DIFFERENCES else signed_curvature
        curvs = measure(grads, problem.gradient(offset + delta), delta)
    elif algorithm.curvature == SAMPLE_CURVATURE:
        curvs = problem.curvature(offset)
    else:
        curvs = 0 * grads
    return Moments(grad=grad, grad_sq=mean(grads**2), curv=mean(curvs), curv_sq=mean(curvs**2)), count


def fused_runs(
    # the algorithm
    init: Any,
    update: Any,
    probe: Any,
    evaluation_point: Any,
    params: Any,
    curvature_kind: int,
    start: int,
    # the problem and its samples
    shape: int,
    scale: float,
    sigma: float,
    normal: NDArray[np.float64],
    present: NDArray[np.bool_],
    lead: int,
    centers: NDArray[np.float64],
    # results
    checkpoints: Any,
    thetas: NDArray[np.float64],
    rates: NDArray[np.float64],
) -> None:
    """Simulate the runs one after the other, with scalars. This function is compiled; it stores checkpoints only."""
    runs, batches, n = normal.shape
    grads = np.empty(n)
    for run in range(runs):
        theta = START
        rate = 0.0
        state = init(theta, params)
        mark = 0
        for i in range(start, batches):
            t = i - lead
            if mark < len(checkpoints) and t == checkpoints[mark]:
                thetas[run, mark], rates[run, mark] = evaluation_point(theta, state), rate
                mark += 1
            count, grad, grad_sq, curv, curv_sq = 0.0, 0.0, 0.0, 0.0, 0.0
            distance = theta - centers[i]
            for j in range(n):
                if present[run, i, j]:
                    g = problem_gradient(shape, scale, distance - sigma * normal[run, i, j])
                    grads[j] = g
                    count += 1
                    grad += g
                    grad_sq += g * g
            divisor = max(count, 1.0)
            grad, grad_sq = grad / divisor, grad_sq / divisor
            if curvature_kind != NO_CURVATURE:
                delta = probe(theta, state, grad, count, t, params)
                for j in range(n):
                    if present[run, i, j]:
                        offset = distance - sigma * normal[run, i, j]
                        if curvature_kind == FINITE_DIFFERENCES:
                            h = curvature(grads[j], problem_gradient(shape, scale, offset + delta), delta)
                        elif curvature_kind == SIGNED_DIFFERENCES:
                            h = signed_curvature(grads[j], problem_gradient(shape, scale, offset + delta), delta)
                        else:
                            h = problem_curvature(shape, scale, offset)
                        curv += h
                        curv_sq += h * h
                curv, curv_sq = curv / divisor, curv_sq / divisor
            batch = Moments(grad=grad, grad_sq=grad_sq, curv=curv, curv_sq=curv_sq)
            theta, state, rate = update(theta, state, batch, count, t, params)
            if not abs(theta) < DIVERGED:
                break
        else:
            if mark < len(checkpoints):
                thetas[run, mark], rates[run, mark] = evaluation_point(theta, state), rate
