"""FSDP2: processes with shards agree with one process that has all parameters, also after loading a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_well

SCRIPT = Path(__file__).with_name("sharded.py")
KINDS = ("networks", "paper", "infinite", "zero")


def results(folder, world, task, *kinds):
    run_well(SCRIPT, world, folder, task, *kinds)
    return torch.load(folder / f"{task}-{world}.pt")


def check_same(one, several):
    for kind, (losses, parameters) in one.items():
        other_losses, other_parameters = several[kind]
        assert losses[-len(other_losses) :] == pytest.approx(other_losses, abs=1e-9, nan_ok=True), kind
        for parameter, other in zip(parameters, other_parameters, strict=True):
            torch.testing.assert_close(parameter, other, rtol=0, atol=1e-9, msg=kind)


def test_two_processes_follow_one(tmp_path):
    check_same(*(results(tmp_path, world, "whole", "networks") for world in (1, 2)))


@pytest.mark.slow
def test_two_and_four_processes_follow_one(tmp_path):
    one, two, four = (results(tmp_path, world, "whole", *KINDS) for world in (1, 2, 4))
    check_same(one, two)
    check_same(one, four)


@pytest.mark.slow
def test_saved_by_four_and_resumed_by_two(tmp_path):
    whole = results(tmp_path, 2, "whole", *KINDS)
    results(tmp_path, 4, "first half", *KINDS)
    check_same(whole, results(tmp_path, 2, "second half", *KINDS))
