"""Sums over samples equal the written-out gradients for whole models."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from expansion import assert_sums_match, by_loop, by_vmap, shift, sums_of
from torch import nn

from vsgd.torch.per_sample import Recorder, reduce

WORDS, WIDTH, BATCH, LENGTH = 11, 8, 5, 4


class Tied(nn.Module):
    """The table that reads words also predicts them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)
        self.out.weight = self.table.weight

    def forward(self, words):
        return self.out(torch.tanh(self.table(words)))


class TiedByFunction(Tied):
    """The same tie without a module around it."""

    def forward(self, words):
        return F.linear(torch.tanh(self.table(words)), self.table.weight)


class TiedByProduct(Tied):
    """A tie that only a replay of the whole model can follow."""

    def forward(self, words):
        return torch.tanh(self.table(words)) @ self.table.weight.t()


class Twice(nn.Module):
    """Modules that are called more than once, one of them for different numbers of positions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        once = torch.relu(self.linear(self.norm(x)))
        return self.linear(self.norm(once)).mean(1) + self.linear(x[:, 0])


class Tokens(nn.Module):
    """Parameters of its own around layers that have handlers: a class token, positions and a gain."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(LENGTH + 1, WIDTH))
        self.gain = nn.Parameter(torch.randn(()))
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.gain * torch.tanh(self.body(x))


class Nested(nn.Module):
    """A module with its own parameter that uses a parameter of a module that does so too."""

    def __init__(self):
        super().__init__()
        self.inner = Tokens()

    def forward(self, x):
        return self.inner(x) + (x @ torch.diag(self.inner.positions[0])).sum(1, keepdim=True)


class Queries(nn.Module):
    """As many learned queries as there are samples: their axis must not be taken for the samples'."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(BATCH, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x @ (self.linear(self.queries) + self.linear(self.queries.sin())).t()


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell = kind(WIDTH, 6, **options)
        self.out = nn.Linear(6, 3)
        self.axis = 0 if options.get("batch_first") else 1

    def forward(self, x):
        states, last = self.cell(x)
        last = last[0] if isinstance(last, tuple) else last
        return self.out(states.movedim(self.axis, 0)[:, -1] + last[-1])


class Attention(nn.Module):
    """Attention with chosen arguments, called with equal and with different query, key and value."""

    def __init__(self, key_width=WIDTH, **options):
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, kdim=key_width, vdim=key_width, batch_first=True, **options)
        self.widen = nn.Linear(WIDTH, key_width)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        keys = self.widen(x)
        if keys.shape != x.shape:
            return self.attend(x, keys, keys, attn_mask=mask)[0]
        own = self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]
        return own + self.attend(x, keys, keys)[0] + self.attend(x, keys, keys.sin())[0]


class Masked(nn.Module):
    """Attention whose mask is a parameter, as relative positions are."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_zero_attn=True)
        self.mask = nn.Parameter(torch.randn(LENGTH, LENGTH))

    def forward(self, x):
        return self.attend(x, x, x, attn_mask=self.mask)[0]


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


SEQUENCE = (BATCH, LENGTH, WIDTH)
MODELS = {
    "cnn": (cnn, (BATCH, 2, 10, 10)),
    "transformer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True), SEQUENCE),
    "norm_first": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True), SEQUENCE),
    "attention": (Attention, SEQUENCE),
    "attention with other keys": (lambda: Attention(key_width=5, bias=False), SEQUENCE),
    "attention with key biases": (lambda: Attention(add_bias_kv=True), SEQUENCE),
    "attention with a learned mask": (Masked, SEQUENCE),
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=True), SEQUENCE),
    "gru": (lambda: Recurrent(nn.GRU, batch_first=True, num_layers=2, bidirectional=False), SEQUENCE),
    "twice": (Twice, SEQUENCE),
    "tokens": (Tokens, SEQUENCE),
    "nested": (Nested, SEQUENCE),
    "queries": (Queries, SEQUENCE),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3)), SEQUENCE),
}


def prepared(make, shape):
    torch.manual_seed(3)
    model = make().double()
    x = torch.randn(shape, dtype=torch.float64) if shape != "words" else torch.randint(WORDS, (BATCH, LENGTH))
    with torch.no_grad():
        y = torch.randn_like(model(x))
    return model, x, y


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_expansion(name, reduction):
    model, x, y = prepared(*MODELS[name])
    assert_sums_match(Recorder(model), model, F.mse_loss, x, y, reduction=reduction)


@pytest.mark.parametrize("options", [{}, {"kdim": WIDTH, "vdim": 5}, {"bias": False}, {"add_bias_kv": True}], ids=repr)
@pytest.mark.parametrize("call", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=repr)
def test_recording_does_not_change_what_attention_returns(options, call):
    attend = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True, **options)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    keys, values = torch.randn(BATCH, LENGTH + 1, WIDTH), torch.randn(BATCH, LENGTH + 1, attend.vdim)
    padding = torch.arange(LENGTH + 1) >= torch.arange(BATCH)[:, None] + 2

    def outputs():
        torch.manual_seed(0)
        own = [] if "vdim" in options else [attend(x, x, x, **call)]
        return [*own, attend(x, keys, values, key_padding_mask=padding, **call)]

    expected = outputs()
    with Recorder(attend).record():
        found = outputs()
        sum(out.sum() for out, _ in found).backward()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", [Tied, TiedByFunction, TiedByProduct])
@pytest.mark.parametrize("tile", [2**20, 60])
def test_tied_weights_add_up_before_they_are_squared(kind, tile, monkeypatch):
    monkeypatch.setattr(reduce, "TILE", tile)
    model, x, y = prepared(kind, "words")
    if kind is not Tied:
        model.out.bias = None
    sums = assert_sums_match(Recorder(model), model, F.mse_loss, x, y)
    assert sums[model.table.weight].count is None


@pytest.mark.parametrize("make", [Tokens, lambda: Recurrent(nn.LSTM, batch_first=True)], ids=["tokens", "lstm"])
def test_replays_in_small_parts_add_up(make, monkeypatch):
    monkeypatch.setattr(reduce, "TILE", 200)
    model, x, y = prepared(make, SEQUENCE)
    assert_sums_match(Recorder(model), model, F.mse_loss, x, y)


def test_recurrent_layer_with_positions_first():
    model, x, _ = prepared(lambda: Recurrent(nn.RNN), (LENGTH, BATCH, WIDTH))
    y = torch.randn(1, BATCH, 3, dtype=torch.float64)
    assert_sums_match(Recorder(model), model, lambda out, y: F.mse_loss(out, y[0]), x, y, axis=1)


def test_mlp_equals_vmap_of_grad():
    model, x, y = prepared(lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 4)), (7, 8))
    assert_sums_match(Recorder(model), model, F.mse_loss, x, y, expand=by_vmap)


def test_frozen_and_unused_parameters_have_no_entry():
    model, x, y = prepared(lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 4)), (7, 8))
    model[0].weight.requires_grad_(False)
    model.register_parameter("spare", nn.Parameter(torch.ones(2)))
    recorder = Recorder(model)
    with recorder.record() as here:
        F.mse_loss(model(x), y).backward()
    assert set(recorder.sums(here)) == {model[0].bias, model[2].weight, model[2].bias}


@pytest.mark.parametrize("layer", ["transformer", "lstm"])
def test_random_layers_see_the_same_random_numbers(layer):
    """The sums of a model with dropout are right if they are those of the very masks that were drawn."""
    if layer == "transformer":
        make = lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.3, batch_first=True)  # noqa: E731
    else:
        make = lambda: Recurrent(nn.LSTM, batch_first=True, num_layers=2, dropout=0.5)  # noqa: E731
    model, x, y = prepared(make, SEQUENCE)
    params = dict(model.named_parameters())

    def expand():
        """Gradients of each sample's part of one loss, under the same random numbers."""
        rows = []
        for j in range(BATCH):
            torch.manual_seed(7)
            value = F.mse_loss(model(x), y, reduction="none")[j].mean()
            rows.append(torch.autograd.grad(value, list(params.values())))
        return {name: torch.stack(column) for name, column in zip(params, zip(*rows, strict=True), strict=True)}

    recorder, recordings, expansions = Recorder(model), [], []
    for _ in range(2):
        with recorder.record() as recording:
            torch.manual_seed(7)
            F.mse_loss(model(x), y).backward()
        model.zero_grad()
        recordings.append(recording)
        expansions.append(expand())
        shift(model)
    sums = recorder.sums(*recordings)
    for name, expected in sums_of(*expansions).items():
        for got, want in zip(sums[params[name]][:3], expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-12)


def test_compiled_model_is_recorded_uncompiled():
    model, x, y = prepared(lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 4)), (7, 8))
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    assert_sums_match(Recorder(compiled), compiled, F.mse_loss, x, y)


def test_loss_scale_is_taken_out_again():
    model, x, y = prepared(lambda: nn.Linear(8, 4), (7, 8))
    recorder, sums = Recorder(model), []
    for scale in (1.0, 1024.0):
        with recorder.record() as here:
            (scale * F.mse_loss(model(x), y)).backward()
        sums.append(recorder.sums(here, loss_scale=scale)[model.weight].grad_sq)
    torch.testing.assert_close(*sums)


def test_checkpointed_layers():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 9), nn.Linear(9, 4)

        def forward(self, x):
            return self.last(checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False))

    model, x, y = prepared(Checkpointed, (7, 8))
    assert_sums_match(Recorder(model), model, F.mse_loss, x, y, expand=by_loop)


@pytest.mark.parametrize("layer", [lambda: nn.PReLU(4), lambda: nn.GRU(4, 4, batch_first=True)], ids=["PReLU", "GRU"])
def test_modules_are_replayed_with_the_autocasting_of_their_call(layer):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), layer()), torch.randn(5, 4, 3)

    def backward(rows):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(rows)
        (out[0] if isinstance(out, tuple) else out).float().square().flatten(1).sum(1).mean().backward()

    recorder = Recorder(model)
    with recorder.record() as here:
        backward(x)
    sums = recorder.sums(here)
    squares = dict.fromkeys(model.parameters(), 0)
    for row in x.split(1):
        model.zero_grad()
        backward(row)
        squares = {p: total + p.grad.square() for p, total in squares.items()}
    for p, total in squares.items():
        assert torch.allclose(sums[p].grad_sq, total, rtol=0.1, atol=0.03 * float(total.max()))


def test_autocast():
    model, x, y = prepared(lambda: nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 4)), (7, 8))
    model, x, y = model.float(), x.float(), y.float()
    recorder, sums = Recorder(model), []
    for enabled in (True, False):
        with recorder.record() as here, torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            F.mse_loss(model(x).float(), y).backward()
        sums.append(recorder.sums(here)[model[0].weight].grad_sq)
    assert sums[0].dtype == torch.float32
    torch.testing.assert_close(*sums, rtol=0.1, atol=0.05 * float(sums[1].max()))


def test_order_of_replayed_parameters_does_not_depend_on_addresses():
    for _ in range(5):
        model = nn.GRU(8, 4, batch_first=True)
        with Recorder(model).record() as here:
            model(torch.ones(7, 3, 8))[0].square().mean().backward()
        assert list(map(id, here.replayed())) == list(map(id, model.parameters()))


def test_numba_waits_until_it_is_needed():
    code = "import sys, vsgd.torch.per_sample; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
