"""Coordinates of a tensor: exact, orthogonal, cheap enough, and worth it on problems that are not separable."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from closures import closure_of
from torch import nn

from vsgd import NETWORKS, eigenbasis
from vsgd.torch import VSGD, basis
from vsgd.torch.per_sample import Recorder
from vsgd.torch.state import matrix_shape, new_state

SHAPES = {"matrix": (6, 8), "filters": (4, 3, 2, 2), "tall": (12, 2)}


def stacked(found):
    """The basis of one matrix as that of a stack, in the same memory."""
    return eigenbasis.Basis(*(None if part is None else part[None] for part in found))


def turned_basis(parameter, sizes, seed=0):
    """A basis after a few gradients."""
    generator = torch.Generator().manual_seed(seed)
    found = basis.basis_of(new_state(parameter, NETWORKS, False, False, sizes))
    for step in range(5):
        grad = torch.randn(matrix_shape(parameter.shape), generator=generator, dtype=parameter.dtype)
        basis.update_covariances(stacked(found), grad[None], step)
        basis.refresh(found, step)
    return found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["full", "leading"])
def test_there_and_back(shape, kind):
    parameter = torch.randn(shape, dtype=torch.float64)
    rows, columns = matrix_shape(parameter.shape)
    sizes = [width if kind == "full" or width < 5 else 2 for width in (rows, columns)]
    found = turned_basis(parameter, sizes)
    matrix = parameter.reshape(rows, columns)
    rotated = eigenbasis.into(matrix, found)
    assert not torch.allclose(rotated, matrix)
    torch.testing.assert_close(rotated.norm(), matrix.norm())
    torch.testing.assert_close(eigenbasis.back(rotated, found), matrix)


def test_it_finds_the_eigenvectors_and_leaves_null_directions_alone():
    torch.manual_seed(0)
    directions = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    spectrum = torch.tensor([100, 50, 20, 10, 5, 0, 0, 0], dtype=torch.float64)
    parameter = torch.zeros(8, 2, dtype=torch.float64)
    found = basis.basis_of(new_state(parameter, NETWORKS, False, False, (8, 1)))
    found.left_cov.copy_(directions * spectrum @ directions.T)
    for _ in range(100):
        before = found.left.clone()
        basis.refresh(found, 100)
    diagonal = found.left.T @ found.left_cov @ found.left
    torch.testing.assert_close(diagonal, diagonal.diagonal().diag(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.left, before)


@pytest.mark.parametrize("sizes", [(12, 1), (4, 1)], ids=["full", "leading"])
def test_rounding_hardly_rotates_directions_without_gradients_in_the_first_steps(sizes):
    parameter, differences = torch.zeros(12, 2, dtype=torch.float64), []
    for seed in range(5):
        torch.manual_seed(seed)
        exact, rounded = (basis.basis_of(new_state(parameter, NETWORKS, False, False, sizes)) for _ in range(2))
        for step in range(5):
            grad = torch.randn(1, 12, 1, dtype=torch.float64).expand(1, 12, 2)  # of rank 1
            for found, each in ((exact, grad), (rounded, grad * (1 + 1e-15 * torch.randn_like(grad)))):
                basis.update_covariances(stacked(found), each, step)
                basis.refresh(found, step)
        (one,), (other,) = as_matrices(exact), as_matrices(rounded)
        differences.append((one - other).abs().max())
    assert torch.stack(differences).median() < 1e-10


@pytest.mark.parametrize("sizes", [(40, 30), (16, 8)], ids=["full", "leading"])
def test_it_stays_orthogonal_in_single_precision(sizes):
    parameter = torch.zeros(40, 30)
    found = basis.basis_of(new_state(parameter, NETWORKS, False, False, sizes))
    for step in range(400):
        scale = 10.0 ** (-3 + step % 7)
        grad = scale * torch.randn(40, 30) @ torch.diag(torch.logspace(-6, 0, 30))
        basis.update_covariances(stacked(found), grad[None], step)
        basis.refresh(found, step)
    for q in as_matrices(found):
        torch.testing.assert_close(q.mT @ q, torch.eye(len(q)), atol=1e-5, rtol=0)


def as_matrices(found):
    """Q of both sides."""
    for q in (found.left, found.right):
        if q is None:
            continue
        if eigenbasis.is_full(q):
            yield q
        else:
            v, n = eigenbasis.halves(q)
            yield torch.eye(len(q), dtype=q.dtype) - n @ v.mT


def test_leading_directions_are_the_first_eigenvectors():
    torch.manual_seed(0)
    directions = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64))[0]
    found = basis.basis_of(new_state(torch.zeros(9, 4, dtype=torch.float64), NETWORKS, False, False, (3, 4)))
    for step in range(300):
        grad = directions * torch.logspace(0, -2, 9, dtype=torch.float64) @ torch.randn(9, 4, dtype=torch.float64)
        basis.update_covariances(stacked(found), grad[None] / 1e9, step)
        basis.refresh(found, step)
    overlap = (eigenbasis.leading(found.left, torch) * directions[:, :3]).sum(0).abs()
    assert (overlap > 0.9).all()
    q, _ = as_matrices(found)
    torch.testing.assert_close(q[:, :3], eigenbasis.leading(found.left, torch))


def test_wide_bases_are_reduced_before_a_side_is_given_up():
    gates, small = torch.zeros(384, 96), torch.zeros(84, 32)
    plan = basis.plan([gates, small], 1e8)
    assert plan == {gates: (16, 96), small: (16, 32)}  # 84 is reduced to save memory, see `MEMORY_SHARE`


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_operations_of_recurrent_layers_are_counted(kind, bidirectional):
    model, x = kind(8, 16, num_layers=2, bidirectional=bidirectional), torch.randn(20, 4, 8)
    with basis.flop_counter() as counter:
        model(x)[0].sum().backward()
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert counter.get_total_flops() == pytest.approx(6 * 20 * 4 * weights, rel=0.15)  # x needs no gradient


def test_rotation_costs_no_more_than_it_may():
    wide, small, vector = torch.zeros(784, 400), torch.zeros(10, 400), torch.zeros(400)
    for flops in (0.0, 1e8, 1e10, 1e13):
        plan = basis.plan([wide, small, vector], flops)
        assert vector not in plan
        total = sum(eigenbasis.cost(matrix_shape(p.shape), sizes) for p, sizes in plan.items())
        assert total <= max(eigenbasis.SHARE_OF_GRADIENT * flops, eigenbasis.ALLOWANCE)
    assert plan[wide] == (784, 400)


@pytest.mark.parametrize("make", [nn.Linear, lambda a, b: nn.Conv2d(a, b, 3)], ids=["linear", "convolution"])
@pytest.mark.parametrize("partial", [False, True], ids=["factors", "gradients"])
@pytest.mark.parametrize("is_reduced", [False, True], ids=["full", "leading"])
def test_sums_over_samples_in_a_basis_equal_those_of_rotated_gradients(make, partial, is_reduced):
    torch.manual_seed(0)
    layer = make(4, 6).double()
    x = (
        torch.randn(5, 4, 6, 6, dtype=torch.float64)
        if layer.weight.dim() == 4
        else torch.randn(5, 4, dtype=torch.float64)
    )
    found = turned_basis(layer.weight.detach(), (2 if is_reduced else 6, layer.weight[0].numel()))

    def loss_of(rows):
        out = layer(rows)
        if partial:  # the weight is used a second time, so that its samples' gradients have to be written out
            out = out + layer(rows.flip(-1))
        return out.flatten(1).square().sum(1).mean()

    recorder = Recorder(layer)
    with recorder.record() as recording:
        loss_of(x).backward()
    sums = recorder.sums(recording, bases={layer.weight: found})[layer.weight]
    grads = [torch.autograd.grad(loss_of(x[j : j + 1]), layer.weight)[0].reshape(6, -1) for j in range(5)]
    expected = sum(eigenbasis.into(grad, found) ** 2 for grad in grads)
    torch.testing.assert_close(sums.grad_sq.reshape(6, -1), expected)


def quadratic(hessian, start, noise=0.0, steps=200, shape=None, algorithm=NETWORKS):
    """½ θᵀHθ that is left after some steps, as a share of that at the start."""
    theta = nn.Parameter(start.clone().reshape(shape or start.shape))
    opt = VSGD([theta], algorithm=algorithm)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        target = noise * torch.randn(len(start), generator=generator)

        def loss(target=target):
            off = theta.flatten() - target
            return off @ hessian @ off / 2

        opt.step(closure_of(opt, loss))
    theta = theta.detach().flatten()
    return float(theta @ hessian @ theta / (start @ hessian @ start))


def test_an_ill_conditioned_quadratic_along_the_axes():
    assert quadratic(torch.logspace(-4, 0, 20).diag(), torch.ones(20)) < 1e-8


def test_a_quadratic_that_is_not_separable_is_easier_in_an_eigenbasis():
    torch.manual_seed(0)
    sides = [torch.linalg.qr(torch.randn(6, 6))[0] for _ in range(2)]
    factors = [q * torch.logspace(-1.5, 0, 6) @ q.T for q in sides]
    hessian, start = torch.kron(*factors), torch.randn(36)
    with_basis, without = (
        quadratic(hessian, start, 0.1, 300, (6, 6), NETWORKS._replace(eigenbasis=flag)) for flag in (True, False)
    )
    assert with_basis < 0.5 * without


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def trained(scale=1.0, steps=40):
    model = network()
    opt = VSGD(model.parameters())
    for step in range(steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        opt.step(closure_of(opt, lambda x=x: scale * F.cross_entropy(model(x), x[:, :3].argmax(1))))
    return model, opt


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_scale_of_the_loss_changes_nothing_but_rounding(scale):
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(99))
    losses = [float(F.cross_entropy(trained(s)[0](x), x[:, :3].argmax(1)).detach()) for s in (1.0, scale)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_what_was_rotated_is_told():
    _, opt = trained()
    told = [tensor.basis for tensor in opt.info().tensors]
    reduced = "3 x 7 directions: 3 x 16 would take too much time, memory or data"
    assert told == ["eigenbasis 16 x 6", "vector, as it is", reduced, "vector, as it is"]
    assert told[0] in str(opt.info())


def test_the_reason_for_leading_directions_is_told():
    model = nn.Linear(2048, 8)
    opt = VSGD(model.parameters())
    opt.step(closure_of(opt, lambda: model(torch.ones(4, 2048)).square().mean()))
    told = opt.info().tensors[0].basis
    assert told == "8 x 16 directions: 8 x 2048 would take too much time, memory or data"
    assert told in str(opt.info())


def test_a_basis_of_another_shape_is_refused():
    _, opt = trained(steps=5)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["left_basis"] = torch.zeros(5, 5)
    with pytest.raises(ValueError, match="left_basis"):
        opt.load_state_dict(saved)


def test_without_operations_to_count():
    theta = nn.Parameter(torch.ones(4, 5))
    opt = VSGD([theta])
    for _ in range(100):
        opt.step(closure_of(opt, lambda: (theta - 3).abs().sum()))
    torch.testing.assert_close(theta.detach(), torch.full((4, 5), 3.0), atol=0.1, rtol=0)


@pytest.mark.parametrize("seed", range(20))
def test_bases_stay_within_their_share_of_memory(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [tuple(torch.randint(2, 3000, (2,), generator=generator).tolist()) for _ in range(5)]
    for shape, sizes in zip(shapes, eigenbasis.plan_sizes(shapes, 1e16), strict=True):
        assert eigenbasis.basis_numbers(shape, sizes) <= eigenbasis.MEMORY_SHARE * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((256, 256), (256, 256)),
        ((128, 256), (128, 256)),
        ((784, 256), (16, 256)),
        ((768, 3072), (768, 16)),
        ((64, 576), (64, 16)),
        ((20480, 8), (13, 8)),
        ((10, 3136), (10, 16)),
        ((8, 20483), (8, 13)),
        ((3000, 1), (1, 1)),
    ],
)
def test_only_the_long_side_of_a_skinny_matrix_is_reduced_to_save_memory(shape, sizes):
    assert eigenbasis.plan_sizes([shape], 1e16) == [sizes]


@pytest.mark.parametrize(
    ("width", "dtype", "is_rounded"),
    [(128, torch.float32, True), (8, torch.float32, False), (128, torch.float64, False)],
)
def test_large_products_in_float32_are_rounded_to_bfloat16(width, dtype, is_rounded, monkeypatch):
    monkeypatch.setattr(basis, "multiplies_bfloat16", lambda kind: True)
    torch.manual_seed(0)
    a, b = torch.randn(2, 128, width, dtype=dtype), torch.randn(2, width, 128, dtype=dtype)
    out = torch.empty(2, 128, 128, dtype=dtype)
    with torch.autocast("cpu", torch.float16):
        basis.multiply([basis.product(a, b, out)])
    exact = a.double() @ b.double()
    error = float((out - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert error < 0.005
    assert (error > 0.0005) == is_rounded


def test_products_stay_in_float32_where_bfloat16_is_slow(monkeypatch):
    monkeypatch.setattr(basis, "multiplies_bfloat16", lambda kind: False)
    a, b, out = torch.randn(2, 128, 128), torch.randn(2, 128, 128), torch.empty(2, 128, 128)
    basis.multiply([basis.product(a, b, out)])
    torch.testing.assert_close(out, a @ b)


def test_large_layers_keep_few_buffers_between_steps():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    opt, x = VSGD(model.parameters()), torch.randn(256, 512)
    for _ in range(2):
        opt.minimize(lambda: model(x).square().mean())
    per_parameter = opt.info().buffer_bytes / sum(p.numel() for p in model.parameters())
    # averaged weights and rotated gradients, and three buffers that all four layers share
    assert per_parameter <= 4 * (2 + 3 / 4)


@pytest.mark.parametrize("shapes", [[(16, 64)], [(64, 64), (20, 64)], [(64, 16), (64, 64)], [(50, 200)]])
def test_small_networks_have_full_bases(shapes):
    assert eigenbasis.plan_sizes(shapes, 0.0) == shapes


@pytest.mark.parametrize(("shape", "sizes"), [((10, 64), (10, 16)), ((64, 3), (12, 3)), ((2, 250), (2, 8))])
def test_bases_are_at_most_four_times_as_wide_as_the_short_side(shape, sizes):
    assert eigenbasis.plan_sizes([shape], 0.0) == [sizes]


@pytest.mark.parametrize("seed", range(20))
def test_bases_of_small_networks_stay_within_the_allowance(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [tuple(torch.randint(2, 300, (2,), generator=generator).tolist()) for _ in range(1 + seed % 3)]
    numbers = sum(map(eigenbasis.basis_numbers, shapes, eigenbasis.plan_sizes(shapes, 1e16)))
    coordinates = sum(rows * columns for rows, columns in shapes)
    assert numbers <= max(eigenbasis.MEMORY_SHARE * coordinates, eigenbasis.MEMORY_ALLOWANCE)


def test_vectors_do_not_change_the_bases_of_matrices():
    matrices = [(64, 576), (10, 64)]
    with_vectors = eigenbasis.plan_sizes([*matrices, (64, 1), (1, 100_000)], 1e16)
    assert with_vectors == [*eigenbasis.plan_sizes(matrices, 1e16), (1, 1), (1, 1)]
