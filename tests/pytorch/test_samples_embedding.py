"""Tables: only rows that were looked up, each with its own count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expansion import assert_sums_match, by_loop, shift, sums_of
from torch import nn

from vsgd.torch import VSGD
from vsgd.torch.per_sample import Recorder, RowSums, SampleError

INDEX = torch.tensor([[1, 1, 4], [4, 0, 0], [2, 1, 4], [0, 0, 0]])
TOUCHED_BY = [2, 2, 1, 0, 3, 0]


def weigh(out, y):
    """A loss that is not linear in the rows, so that the gradients change with them."""
    return F.mse_loss(out.sin(), y)


def target(model, x):
    torch.manual_seed(5)
    with torch.no_grad():
        return torch.randn_like(model(x))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -2}, {"max_norm": 1e3}], ids=str)
def test_embedding(options):
    model = nn.Embedding(6, 3, dtype=torch.float64, **options)
    sums = assert_sums_match(Recorder(model), model, weigh, INDEX, target(model, INDEX))
    expected = list(TOUCHED_BY)
    if "padding_idx" in options:
        expected[options["padding_idx"]] = 0
    assert sums[model.weight].count.flatten().tolist() == expected


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}], ids=str)
def test_bag(mode, options):
    model = nn.EmbeddingBag(6, 3, mode=mode, dtype=torch.float64, **options)
    index = INDEX[:3] if options else INDEX
    sums = assert_sums_match(Recorder(model), model, weigh, index, target(model, index))
    assert sums[model.weight].count.shape == (6, 1)


class Ragged(nn.Module):
    """Bags of different sizes, one of them empty, cut out of one list."""

    def __init__(self, last):
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, mode="sum", dtype=torch.float64, include_last_offset=last)
        self.last = last

    def forward(self, index, shares, sizes):
        offsets = F.pad(sizes.cumsum(0), (1, 0))
        return self.bag(index, offsets if self.last else offsets[:-1], per_sample_weights=shares)


@pytest.mark.parametrize("last", [False, True])
def test_ragged_bags_with_weights(last):
    torch.manual_seed(0)
    model, sizes = Ragged(last), torch.tensor([2, 0, 3, 1])
    index, shares = torch.tensor([1, 1, 4, 1, 2, 4]), torch.randn(6, dtype=torch.float64)
    y = torch.randn(4, 3, dtype=torch.float64)
    recorder = Recorder(model)
    with recorder.record() as here:
        weigh(model(index, shares, sizes), y).backward()
    assert here.count == 4
    found = recorder.sums(here)[model.bag.weight]
    expected, starts = torch.zeros(6, 3, dtype=torch.float64), F.pad(sizes.cumsum(0), (1, 0)).tolist()
    for j in range(4):
        own = slice(starts[j], starts[j + 1])
        value = weigh(model(index[own], shares[own], sizes[j : j + 1]), y[j : j + 1])
        expected += torch.autograd.grad(value, model.bag.weight)[0].square()
    torch.testing.assert_close(found.grad_sq, expected)
    assert found.count.flatten().tolist() == [0, 2, 1, 0, 2, 0]


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_tables_return_their_touched_rows(layer):
    model = layer(6, 3, sparse=True, dtype=torch.float64)
    y, recorder = target(model, INDEX), Recorder(model)
    with recorder.record() as here:
        weigh(model(INDEX), y).backward()
    first = by_loop(model.requires_grad_(), weigh, INDEX, y)
    shift(model)
    with recorder.record() as there:
        weigh(model(INDEX), y).backward()
    dense = {name: torch.stack([row.to_dense() for row in grads]) for name, grads in first.items()}
    second = by_loop(model, weigh, INDEX, y)
    expected = sums_of(dense, {name: torch.stack([r.to_dense() for r in grads]) for name, grads in second.items()})
    found = recorder.sums(here, there)[model.weight]
    assert isinstance(found, RowSums)
    assert found.rows.tolist() == [0, 1, 2, 4]
    assert found.sums.count.flatten().tolist() == [TOUCHED_BY[row] for row in found.rows]
    for got, want in zip(found.sums[:3], expected["weight"], strict=True):
        torch.testing.assert_close(got, want[found.rows])


class TwoTables(nn.Module):
    """One table looked up in two places."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 3, dtype=torch.float64)

    def forward(self, index):
        return self.table(index).sin() * self.table(index.flip(1) % 3)


def test_one_table_looked_up_twice():
    model = TwoTables()
    sums = assert_sums_match(Recorder(model), model, weigh, INDEX, target(model, INDEX))
    pairs = {(j, int(row)) for j, rows in enumerate(torch.cat([INDEX, INDEX % 3], 1)) for row in rows}
    expected = [sum((j, row) in pairs for j in range(4)) for row in range(6)]
    assert sums[model.table.weight].count.flatten().tolist() == expected


@pytest.mark.parametrize(
    ("model", "index", "words"),
    [
        (nn.Embedding(6, 3), torch.tensor(2), "axis for the samples"),
        (nn.Embedding(6, 3, scale_grad_by_freq=True), INDEX, "scale_grad_by_freq"),
        (nn.EmbeddingBag(6, 3, mode="max"), INDEX, "mode='max'"),
    ],
    ids=["scalar", "frequency", "max"],
)
def test_lookups_that_mix_samples_are_refused(model, index, words):
    recorder = Recorder(model)
    with pytest.raises(SampleError, match=words), recorder.record():
        model(index).sum().backward()


class Positions(nn.Module):
    """As many positions as samples, added to what each sample has there; `shared` by all, or looked up for each."""

    def __init__(self, shared=True, projected=False, returns_loss=False):
        super().__init__()
        self.place = nn.Embedding(4, 3, dtype=torch.float64)
        self.inner = nn.Linear(3, 3, dtype=torch.float64) if projected else nn.Identity()
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        self.shared, self.returns_loss = shared, returns_loss

    def forward(self, x):
        index = torch.arange(4)
        out = self.head((x + self.inner(self.place(index if self.shared else index.expand(len(x), 4)))).relu())
        return out.square().mean() if self.returns_loss else out


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("returns_loss", [False, True])
def test_positions_that_all_samples_share_are_refused(projected, returns_loss):
    model, x = Positions(True, projected, returns_loss), torch.randn(4, 4, 3, dtype=torch.float64)
    with pytest.raises(SampleError, match=r"'place.weight' was given the positions.*expand"), Recorder(model).record():
        model(x).mean().backward()


class Offsets(nn.Module):
    """A bias for each pair of positions by their distance, as T5 has; or positions that do not begin with 0."""

    def __init__(self, pairs):
        super().__init__()
        self.place = nn.Embedding(9, 4 if pairs else 3, dtype=torch.float64)
        self.pairs = pairs

    def forward(self, x):
        index = torch.arange(len(x[0]))
        if self.pairs:
            return (x @ x.mT + self.place(index[:, None] - index + 4).sum(-1)).softmax(-1) @ x
        return (x + self.place(index + 2)).relu()


@pytest.mark.parametrize("pairs", [False, True])
def test_whatever_samples_share_is_refused(pairs):
    model, x = Offsets(pairs), torch.randn(4, 4, 3, dtype=torch.float64)
    with pytest.raises(SampleError, match=r"'place.weight' was given the positions.*expand"), Recorder(model).record():
        model(x).square().mean().backward()


class Halves(nn.Module):
    """One table that is used as two."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))

    def forward(self, pairs):
        left, right = self.table.chunk(2)
        return F.embedding(pairs[:, 0], left) + 2 * F.embedding(pairs[:, 1], right)


def test_a_table_in_two_parts():
    torch.manual_seed(0)
    model, pairs = Halves(), torch.tensor([[0, 1], [1, 1], [0, 2]])
    y = target(model, pairs)
    sums = assert_sums_match(Recorder(model), model, weigh, pairs, y)
    assert sums[model.table].count.flatten().tolist() == [2, 1, 0, 0, 2, 1]
    recorder = Recorder(model)
    with recorder.record() as here:
        weigh(model(pairs), y).backward()
    grads = [torch.autograd.grad(weigh(model(pairs[j : j + 1]), y[j : j + 1]), model.table)[0] for j in range(3)]
    flat = torch.stack(grads).flatten(1) / 3
    torch.testing.assert_close(recorder.gram(here), flat @ flat.T)


def test_positions_of_each_sample_are_taken():
    model, x = Positions(shared=False), torch.randn(4, 4, 3, dtype=torch.float64)
    assert_sums_match(Recorder(model), model, weigh, x, target(model, x))


class Factors(nn.Module):
    """A row of each table for a sample."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Embedding(6, 3, dtype=torch.float64) for _ in range(2))
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, pairs):
        return self.head(self.left(pairs[:, 0]) * self.right(pairs[:, 1]))


@pytest.mark.parametrize("second", [[0, 1, 2, 3, 4], [3, 0, 0, 5, 1]])
def test_numbers_of_samples_that_happen_to_count_are_taken(second):
    """Refused once, as if they were positions."""
    model, pairs = Factors(), torch.tensor([range(5), second]).T
    sums = assert_sums_match(Recorder(model), model, weigh, pairs, target(model, pairs))
    assert sums[model.left.weight].count.flatten().tolist() == [1, 1, 1, 1, 1, 0]


def test_a_table_alone_may_be_given_all_its_rows():
    model, index = nn.Embedding(6, 3, dtype=torch.float64), torch.arange(6)
    assert_sums_match(Recorder(model), model, weigh, index, target(model, index))


def test_a_table_is_trained_with_all_its_rows():
    model = Factors().float()
    opt, pairs, y = VSGD(model.parameters(), per_sample=model), torch.tensor([range(6)] * 2).T, torch.arange(6) % 2
    losses = [float(opt.minimize(lambda: F.cross_entropy(model(pairs), y))) for _ in range(40)]
    assert losses[-1] < losses[0] / 2
