"""Processes with gloo on loopback follow one process that has their global batch and their samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_well

SCRIPT = Path(__file__).with_name("training.py")


QUICK = ("eigenbasis", "per sample embedding", "replicas", "replicas embedding", "infinite")
ALL = (*QUICK, "dense", "paper", "embedding", "per sample", "zero")


def results(folder, world, steps, dtypes, *kinds, seconds=240):
    run_well(SCRIPT, world, folder, steps, dtypes, *kinds, seconds=seconds)
    return torch.load(folder / f"results-{world}.pt")


def check_same(one, several, tolerance):
    for kind, dtype in one:
        losses, parameters = one[kind, dtype]
        other_losses, other_parameters = several[kind, dtype]
        if dtype == torch.float64:
            assert losses == pytest.approx(other_losses, abs=tolerance, nan_ok=True), kind
            for parameter, other in zip(parameters, other_parameters, strict=True):
                torch.testing.assert_close(parameter, other, rtol=0, atol=tolerance, msg=kind)
        else:  # rounding turns a basis here and there, so losses agree on average
            means = [torch.tensor(each).nanmean() for each in (losses, other_losses)]
            torch.testing.assert_close(*means, rtol=1e-3, atol=0, msg=kind)


def test_two_processes_follow_one(tmp_path):
    check_same(*(results(tmp_path, world, 8, "float64", *QUICK) for world in (1, 2)), tolerance=1e-9)


@pytest.mark.slow
def test_two_and_four_processes_follow_one_for_200_steps(tmp_path):
    one, two, four = (results(tmp_path, world, 200, "float64,float32", *ALL, seconds=900) for world in (1, 2, 4))
    check_same(one, two, tolerance=1e-8)
    check_same(one, four, tolerance=1e-8)
