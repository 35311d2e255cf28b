"""The examples of the use-case pages train on a few batches with vSGD and AdamW."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = {
    "lora": ("lora", "make", ()),
    "pinn": ("pinn", "make", ()),
    "friedman": ("tabular", "friedman", ()),
    "breast cancer": ("tabular", "breast_cancer", ()),
    "jumps": ("streams", "make", ("jumps",)),
    "slow": ("streams", "make", ("slow",)),
    "fixed": ("streams", "make", ("fixed",)),
}


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("name", TASKS)
def test_both_optimizers_lower_the_loss(name):
    module, function, arguments = TASKS[name]
    train = importlib.import_module("against_adamw").train
    make = getattr(importlib.import_module(module), function)

    def final(batches, rate):
        task = make(*arguments, 0)
        return train(task._replace(batches=task.batches[:batches]), rate, decay=False).final

    start = final(1, 1e-9)
    for rate in (None, 1e-2):
        assert math.isfinite(start)
        assert final(60, rate) < start


def test_every_optimizer_sees_the_same_batches_and_weights():
    make = importlib.import_module("lora").make
    first, second = make(1), make(1)
    assert all((a == b).all() for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert all((a[0] == b[0]).all() for a, b in zip(first.batches, second.batches, strict=True))


def test_the_table_names_the_best_rate_and_the_wins(capsys):
    compare = importlib.import_module("against_adamw").compare
    make = importlib.import_module("streams").make

    def short(seed):
        task = make("fixed", seed)
        return task._replace(batches=task.batches[:20])

    compare("A stream", short, 2, rates=(1e-6, 1e-2), decay=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")] == [
        "",
        "vSGD",
        "AdamW 1e-06",
        "AdamW 0.01",
    ]
    assert lines[-1].startswith("vSGD ends below AdamW 0.01 on ")
