"""What optax asks of its contributed optimizers, and what a step promises under JAX's own transformations."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import TIMEOUT
from steps import batches, flat, new_params, squared_error, step_of

import vsgd.optax
from vsgd import COLUMNS, NETWORKS, PAPER
from vsgd.algorithms.strategy import Totals
from vsgd.optax import coordinates, groups, samples, transformation
from vsgd.optax.state import Numbers

SIZES = (6, 8, 3)


def trained(tx, steps=12, params=None):
    params = new_params(SIZES) if params is None else params
    state, step = tx.init(params), step_of(tx, squared_error)
    for batch in batches(steps, SIZES):
        params, state = step(params, state, batch)
    return params, state


# --- convergence, on the targets of optax's contrib/_common_test.py -----------------------------------------------

TARGETS = {
    "parabola": (jnp.array([-1.0, 10, 1]), jnp.array([1.0, -1, 1]), lambda p, end: jnp.sum((p - end) ** 2)),
    "rosenbrock": (
        jnp.zeros(2),
        jnp.ones(2),
        lambda p, end: (end[0] - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2,
    ),
    "matrix parabola": (
        jnp.zeros((2, 2)),
        jnp.array([[3.0, -2], [1, 4]]),
        lambda p, end: jnp.sum((p - end) ** 2),
    ),
    "mixed": (
        (jnp.zeros(3), jnp.zeros((2, 2))),
        (jnp.array([1.0, -1, 2]), jnp.array([[1.0, 0], [-1, 1]])),
        lambda p, end: sum(jnp.sum((a - b) ** 2) for a, b in zip(p, end, strict=True)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_converges_within_a_scan(target):
    start, end, objective = TARGETS[target]
    tx = vsgd.optax.vsgd()

    def grad_fn(p):
        return jax.grad(objective)(p, end)

    @jax.jit
    def step(carry, _):
        params, state = carry
        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn, another_argument=1)
        return (optax.apply_updates(params, updates), state), None

    state = optax.tree.map_params(tx, lambda value: value, tx.init(start))
    (params, state), _ = jax.lax.scan(step, (start, state), length=30_000)
    for found in (params, vsgd.optax.eval_params(params, state)):
        np.testing.assert_allclose(flat(found), flat(end), rtol=3e-2, atol=3e-2)


# --- trees, types, memory -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [NETWORKS, PAPER], ids=["networks", "paper"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_keeps_structure_and_types(dtype, algorithm):
    tx = vsgd.optax.vsgd(algorithm)
    params = {
        "matrix": jnp.ones((3, 4), dtype),
        "filters": jnp.ones((2, 2, 3, 4), dtype),
        "number": jnp.ones((), dtype),
        "empty": jnp.ones((0, 3), dtype),
        "none": None,
        "nothing": {},
    }

    def loss(p, _):
        return sum(jnp.sum((leaf - 0.5) ** 2) for leaf in jax.tree.leaves(p))

    state, step = tx.init(params), step_of(tx, loss)
    new_params, new_state = params, state
    for _ in range(15):
        new_params, new_state = step(new_params, new_state, None)
    for before, after in ((params, new_params), (state, new_state)):
        assert jax.tree.structure(before) == jax.tree.structure(after)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert isinstance(b, jax.Array)
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert jnp.isfinite(b).all()
    weights = vsgd.optax.eval_params(new_params, new_state)
    assert jax.tree.map(lambda p: p.dtype, weights) == jax.tree.map(lambda p: p.dtype, params)
    assert int(new_state.skipped) == 0
    assert loss(new_params, None) < loss(params, None)


def test_nothing_to_train_is_no_mistake():
    tx = vsgd.optax.vsgd()
    updates, state = tx.update({}, tx.init({}), {}, grad_fn=lambda p: p)
    assert updates == {}
    assert vsgd.optax.eval_params({}, state) == {}


def test_does_not_compile_twice_and_donates_all():
    tx = vsgd.optax.vsgd()
    traced = []

    def step(params, state, batch):
        traced.append(1)
        return step_of(tx, squared_error)(params, state, batch)

    step = jax.jit(step, donate_argnums=(0, 1))
    params = new_params(SIZES)
    state = tx.init(params)
    for batch in batches(12, SIZES):
        old = params, state
        params, state = step(params, state, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert len(traced) == 1
    np.testing.assert_array_equal(flat(params), flat(trained(tx)[0]))


def test_a_second_gradient_that_is_not_due_is_not_computed():
    calls = []
    tx = vsgd.optax.vsgd(NETWORKS._replace(outlier_sigmas=1e6))  # no gradient is unusually long

    @jax.jit
    def step(params, state, batch):
        def grad_fn(p):
            jax.debug.callback(lambda: calls.append(1))
            return jax.grad(squared_error)(p, batch)

        updates, state = tx.update(jax.grad(squared_error)(params, batch), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    params = new_params(SIZES)
    state, counts = tx.init(params), []
    for batch in batches(31, SIZES):
        params, state = step(params, state, batch)
        jax.effects_barrier()
        counts.append(len(calls))
    due = [k for k, (before, after) in enumerate(zip([0, *counts], counts, strict=False)) if after > before]
    assert due == [0, 1, 2, 12, 22]
    assert len(calls) == 2 * len(due), "at the parameters and at the probe"


@pytest.mark.slow
def test_an_unusually_long_gradient_is_probed():
    tx = vsgd.optax.vsgd()
    params, state = trained(tx, 18)
    step = step_of(tx, squared_error)
    x, y = next(batches(1, SIZES))
    assert state.unprobed == 5, "the last was the thirteenth"
    assert step(params, state, (x, y))[1].unprobed == 6
    assert step(params, state, (x, 100 * y))[1].unprobed == 0
    params, state = trained(tx, 15)
    assert step(params, state, (x, 100 * y))[1].unprobed == 3, "too soon"


@pytest.mark.slow
def test_seeds_choose_the_signs_of_probes():
    ends = [flat(trained(vsgd.optax.vsgd(seed=seed))[0]) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(ends[0], ends[1])
    assert np.abs(ends[0] - ends[2]).max() > 1e-4


def test_parameters_that_are_zero_learn_their_scale_from_the_loss():
    tx = vsgd.optax.vsgd()
    params = jnp.zeros(5)
    _, without = tx.update(params + 1, tx.init(params), params, grad_fn=lambda p: p + 1)
    _, given = tx.update(params + 1, tx.init(params), params, grad_fn=lambda p: p + 1, value=10.0)
    assert Totals(*without.totals[0]).scale == np.float32(NETWORKS.min_rms)
    assert Totals(*given.totals[0]).scale == pytest.approx(
        10 / 5
    )  # the loss, its slope √5, and a root of 5 coordinates


# --- other transformations ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_chain_averages_what_the_parameters_are():
    """A transformation after this one changes the iterates; their average follows those, not what was asked for."""
    tx = optax.chain(vsgd.optax.vsgd(), optax.scale(0.0))
    params, state = trained(tx, 8)
    np.testing.assert_array_equal(flat(params), flat(new_params(SIZES)))
    np.testing.assert_array_equal(flat(vsgd.optax.eval_params(params, state)), flat(params))
    assert int(state[0].step) == 8


@pytest.mark.slow
def test_identity_in_a_chain_changes_nothing():
    plain, (params, state) = trained(vsgd.optax.vsgd()), trained(optax.chain(optax.identity(), vsgd.optax.vsgd()))
    np.testing.assert_array_equal(flat(plain[0]), flat(params))
    np.testing.assert_array_equal(flat(vsgd.optax.eval_params(*plain)), flat(vsgd.optax.eval_params(params, state)))


def masked_step(tx, rows_are_samples):
    samples = vsgd.optax.per_sample(squared_error)

    @jax.jit
    def step(params, state, batch):
        grad_fn = samples(batch) if rows_are_samples else lambda p: jax.grad(squared_error)(p, batch)
        hidden = vsgd.optax.unmasked(grad_fn, params)
        updates, state = tx.update(grad_fn(params), state, params, grad_fn=hidden)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.slow
@pytest.mark.parametrize("rows_are_samples", [False, True], ids=["minibatch", "samples"])
def test_masked_and_partitioned(rows_are_samples):
    first_layer = [(True, True), (False, False)]
    names = [("ours", "ours"), ("frozen", "frozen")]
    frozen = optax.partition({"ours": vsgd.optax.vsgd(), "frozen": optax.set_to_zero()}, names)
    chained = optax.chain(
        optax.masked(vsgd.optax.vsgd(), first_layer),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda taken: not taken, first_layer)),
    )
    results = []
    for tx in (frozen, chained):
        params = start = new_params(SIZES)
        state, step = tx.init(params), masked_step(tx, rows_are_samples)
        for batch in batches(12, SIZES):
            params, state = step(params, state, batch)
        weights = vsgd.optax.eval_params(params, state)
        np.testing.assert_array_equal(flat(weights[1]), flat(start[1]))
        assert np.abs(flat(weights[0]) - flat(start[0])).max() > 1e-3
        assert np.abs(flat(weights[0]) - flat(params[0])).max() > 0
        results.append(flat(weights))
    np.testing.assert_array_equal(*results)


def test_masked_parameters_without_their_values_are_explained():
    tx = optax.masked(vsgd.optax.vsgd(), [(True, True), (False, False)])
    params = new_params(SIZES)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        step_of(tx, squared_error)(params, tx.init(params), next(batches(1, SIZES)))
    assert "vsgd.optax.unmasked" in "".join(caught.value.__notes__)


@pytest.mark.slow
def test_a_batch_of_runs_by_vmap():
    tx = vsgd.optax.vsgd(NETWORKS._replace(eigenbasis=False))
    runs = [new_params(SIZES, seed=seed) for seed in (0, 1)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs)
    state = jax.vmap(tx.init)(params)
    step = jax.vmap(step_of(tx, squared_error), in_axes=(0, 0, None))
    for batch in batches(12, SIZES):
        params, state = step(params, state, batch)
    for k, start in enumerate(runs):
        alone, _ = trained(tx, params=start)
        np.testing.assert_allclose(flat(jax.tree.map(lambda p, k=k: p[k], params)), flat(alone), rtol=1e-3, atol=1e-4)


def test_curvature_does_not_depend_on_what_happened_to_the_gradient():
    """Clipped or accumulated gradients are no gradients of `grad_fn`; only its own two are compared."""
    sizes = (6, 3)
    params = new_params(sizes)
    first, second = batches(2, sizes)
    plain = vsgd.optax.vsgd(NETWORKS._replace(eigenbasis=False))
    clipped, accumulated = optax.chain(optax.clip_by_global_norm(1e-3), plain), optax.MultiSteps(plain, 2)

    def state_after(tx, *steps):
        state, step = tx.init(params), step_of(tx, squared_error)
        for batch in steps:
            new, state = step(params, state, batch)
        np.testing.assert_array_equal(flat(new), flat(params))  # nothing moves in the first steps
        return state

    expected = state_after(plain, second)
    for found in (state_after(clipped, second)[1], state_after(accumulated, first, second).inner_opt_state):
        assert int(found.step) == 1
        np.testing.assert_allclose(flat(found.mean.curv), flat(expected.mean.curv), rtol=1e-2)
        assert np.abs(flat(found.mean.grad) - flat(expected.mean.grad)).max() > 1e-3


@pytest.mark.slow
def test_accumulated_gradients_learn():
    tx = optax.MultiSteps(vsgd.optax.vsgd(), 2)
    params, state = trained(tx, 80)
    batch = next(batches(1, SIZES, rows=500))
    weights = vsgd.optax.eval_params(params, state)
    assert squared_error(weights, batch) < 0.5 * squared_error(new_params(SIZES), batch)
    assert int(state.inner_opt_state.step) == 40


@pytest.mark.slow
def test_clipping_in_a_chain_learns_as_well_with_a_plain_grad_fn():
    batch = next(batches(1, SIZES, rows=500))
    clipped, plain = (
        trained(tx, 80) for tx in (optax.chain(optax.clip_by_global_norm(1.0), vsgd.optax.vsgd()), vsgd.optax.vsgd())
    )
    start = squared_error(new_params(SIZES), batch)
    for params, state in (clipped, plain):
        assert squared_error(vsgd.optax.eval_params(params, state), batch) < 0.5 * start


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"lr": 0.5}, id="lr"),
        pytest.param({"weight_decay": 0.1}, id="weight_decay", marks=pytest.mark.slow),
    ],
)
def test_injected_hyperparameters_equal_constants(changed):
    config = NETWORKS._replace(eigenbasis=False)
    injected = optax.inject_hyperparams(vsgd.optax.vsgd)(config, **changed)
    params, step = new_params(SIZES), step_of(injected, squared_error)
    state = injected.init(params)
    for batch in batches(6, SIZES):
        params, state = step(params, state, batch)
    expected, _ = trained(vsgd.optax.vsgd(config, **changed), 6)
    np.testing.assert_allclose(flat(params), flat(expected), rtol=1e-4, atol=1e-5)
    assert np.abs(flat(params) - flat(trained(vsgd.optax.vsgd(config), 6)[0])).max() > 1e-4
    (name,) = changed
    state.hyperparams[name] = jnp.float32(0)  # a hyperparameter of the state takes effect in the next step
    moved, _ = step(params, state, next(batches(1, SIZES)))
    assert np.array_equal(flat(moved), flat(params)) == (name == "lr")


@pytest.mark.slow
def test_estimated_decay_shrinks_matrices_and_no_vectors():
    sizes = (6, 3)
    config = NETWORKS._replace(eigenbasis=False)
    params = new_params(sizes)
    *data, last = batches(41, sizes)
    plain, decayed = vsgd.optax.vsgd(config), vsgd.optax.vsgd(config, steps_per_epoch=20)
    state, step = plain.init(params), step_of(plain, squared_error)
    for batch in data:
        params, state = step(params, state, batch)
    ends = [step_of(tx, squared_error)(params, state, last)[0] for tx in (plain, decayed)]
    ((plain_weight, plain_bias),), ((weight, bias),) = ends
    np.testing.assert_array_equal(bias, plain_bias)
    ratio = np.asarray(weight / plain_weight)
    assert ratio.max() < 1
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-5)


def test_hyperparameters_that_decide_shapes_cannot_be_injected():
    params = new_params(SIZES)
    tx = optax.inject_hyperparams(vsgd.optax.vsgd)(gradient_flops=1e6)
    with pytest.raises(TypeError, match="static_args='gradient_flops'"):
        step_of(tx, squared_error)(params, jax.jit(tx.init)(params), next(batches(1, SIZES)))
    tx = optax.inject_hyperparams(vsgd.optax.vsgd, static_args="gradient_flops")(gradient_flops=1e6)
    jax.eval_shape(tx.init, params)


# --- groups -------------------------------------------------------------------------------------------------------


def test_groups_join_and_split_without_loss():
    shapes = [(3, 4), (), (0, 3), (33,), (2, 3, 5)]
    tensors = vsgd.optax.coordinates.plan([(shape, np.dtype(np.float32)) for shape in shapes], NETWORKS, None)
    values = [jnp.arange(1.0, 1 + tensor.size).reshape(tensor.shape) for tensor in tensors]
    for group in groups.grouped(tensors):
        members = [values[tensor.place] for tensor in group.tensors]
        joined = group.join(members)
        assert joined.shape == group.shape
        jax.tree.map(np.testing.assert_array_equal, group.split(joined), members)
        sums = np.array([member.sum() for member in members])
        np.testing.assert_allclose(group.sums(joined, -joined), [sums, -sums])
        spread = group.spread(jnp.arange(1.0, 1 + len(members))) * jnp.ones(group.shape)
        for k, part in enumerate(group.split(spread)):
            np.testing.assert_array_equal(part, k + 1)
        if group.is_joined:
            np.testing.assert_array_equal(group.is_padding(), joined == 0)
    assert [len(group.tensors) for group in groups.grouped(tensors)] == [4, 1], "the empty matrix is not decoupled"


def test_matrices_are_decomposed_one_by_one():
    """Batches of decompositions can wait for each other forever, on a CPU with as many threads as batches."""
    leaves = [((6, 8), np.dtype(np.float32)), ((8, 6), np.dtype(np.float32)), ((12, 4), np.dtype(np.float32))]
    tensors = vsgd.optax.coordinates.plan(leaves, NETWORKS, 1e9)
    assert all(tensor.is_rotated for tensor in tensors)
    bases = [vsgd.optax.coordinates.new_basis(tensor) for tensor in tensors]
    program = jax.jit(vsgd.optax.coordinates.rotated_bases).lower(bases, 7).as_text()
    shapes = re.findall(r"@lapack_sgeqrf_ffi\(.*\(tensor<([x\d]+)xf32>\)", program)
    assert {shape.count("x") for shape in shapes} == {1}, shapes


@pytest.mark.slow
def test_large_tensors_learn_as_joined_ones_do(monkeypatch):
    joined = flat(trained(vsgd.optax.vsgd(), 14)[0])
    monkeypatch.setattr(groups, "MAX_JOINED_SIZE", 0)
    alone, state = trained(vsgd.optax.vsgd(), 14)
    assert [part.shape for part in state.mean.grad] == [leaf.shape for leaf in jax.tree.leaves(alone)]
    np.testing.assert_allclose(flat(alone), joined, rtol=1e-3, atol=1e-4)


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [NETWORKS, PAPER], ids=["networks", "paper"])
@pytest.mark.parametrize("where", ["first", "second"])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(where, algorithm):
    tx = vsgd.optax.vsgd(algorithm)
    params, state = trained(tx, 22)  # a step with a second gradient comes next

    @jax.jit
    def step(params, state, batch):
        def grad_fn(p):
            return jax.tree.map(lambda g: g * jnp.nan, jax.grad(squared_error)(p, batch))

        grads = jax.grad(squared_error)(params, batch) if where == "second" else grad_fn(params)
        return tx.update(grads, state, params, grad_fn=grad_fn)

    updates, new = step(params, state, next(batches(1, SIZES)))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
    assert int(new.skipped) == 1
    numbers = Numbers(*state.numbers)._replace(weight=Numbers(*new.numbers).weight)  # the newest iterate has entered
    old = state._replace(counters=new.counters, numbers=jnp.stack(numbers), average=new.average)
    assert (new.step, new.unprobed) == (state.step, state.unprobed)
    jax.tree.map(np.testing.assert_array_equal, new, old)
    weights = [flat(vsgd.optax.eval_params(params, each)) for each in (state, new)]
    np.testing.assert_allclose(*weights, rtol=1e-6)


def test_mistakes_are_told_when_a_step_is_traced():
    tx = vsgd.optax.vsgd()
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    state = tx.init(params)
    with pytest.raises(TypeError, match="grad_fn=lambda p"):
        jax.jit(lambda p, s: tx.update(p, s, p))(params, state)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, state, grad_fn=lambda p: p)
    with pytest.raises(ValueError, match="grads and parameters must have the same structure"):
        tx.update({"w": params["w"]}, state, params, grad_fn=lambda p: p)
    with pytest.raises(ValueError, match=r"grads\['b'\] has shape \(3,\), its parameter has \(2,\)"):
        tx.update({**params, "b": jnp.ones(3)}, state, params, grad_fn=lambda p: p)
    with pytest.raises(ValueError, match="the result of grad_fn and parameters"):
        tx.update(params, state, params, grad_fn=lambda p: [p])
    with pytest.raises(TypeError, match=r"params\['n'\] is int32, not floating-point"):
        tx.init({"n": jnp.arange(3)})
    with pytest.raises(TypeError, match=r"vsgd\.Networks or vsgd\.Paper"):
        vsgd.optax.vsgd(COLUMNS)
    for name in ("weight_decay", "lr"):
        with pytest.raises(ValueError, match=f"{name} is -1"):
            vsgd.optax.vsgd(**{name: -1})
    for value in (0, -1, float("nan"), float("inf"), 0.5, "8", jnp.float32(0)):
        with pytest.raises(ValueError, match=r"steps_per_epoch is .*len\(loader\)"):
            vsgd.optax.vsgd(steps_per_epoch=value)
    with pytest.raises(TypeError, match="no state of vsgd"):
        vsgd.optax.eval_params(params, optax.adam(0.1).init(params))
    with pytest.raises(ValueError, match="the same number of samples"):
        vsgd.optax.per_sample(squared_error)((jnp.ones((3, 2)), jnp.ones(2)))
    with pytest.raises(ValueError, match="chunk is 0"):
        vsgd.optax.per_sample(squared_error, chunk=0)


@pytest.mark.parametrize(
    "module", [coordinates, samples, transformation], ids=["coordinates", "samples", "transformation"]
)
def test_examples_of_docstrings_run(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_names_the_extra_if_optax_is_missing():
    code = "import sys; sys.modules['optax'] = None; import vsgd.optax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    message = "ImportError: vsgd.optax needs optax: run `pip install '.[jax]'` in a clone of vsgd"
    assert result.stderr.strip().endswith(message)


def test_operations_of_a_gradient_are_counted():
    params, batch = new_params((64, 64)), next(batches(1, (64, 64)))
    flops = vsgd.optax.gradient_flops(jax.grad(squared_error), params, batch)
    assert flops == pytest.approx(4 * 32 * 64 * 64, rel=0.2)  # forward, and the gradient of the weights


def test_coordinates_without_a_gradient_stay_where_they_are():
    """The compiler must not multiply the tiny denominators of their rates."""
    tx = vsgd.optax.vsgd()
    params = {"matrix": jnp.ones((6, 8)), "vector": jnp.ones(8)}

    def loss(p, x):
        return jnp.mean((jax.nn.relu(x @ p["matrix"]) * p["vector"] - 1) ** 2)

    state, step = tx.init(params), step_of(tx, loss)
    x = jnp.ones((4, 6)).at[:, 2:].set(0)
    for _ in range(25):
        params, state = step(params, state, x)
    assert loss(params, x) < 0.1
    np.testing.assert_allclose(params["matrix"][2:], 1, atol=1e-4)
