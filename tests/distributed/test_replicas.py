"""Several processes with gloo on loopback agree with one process that has the same global batch and samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_well

SCRIPT = Path(__file__).with_name("training.py")


QUICK = ("eigenbasis", "per sample embedding", "replicas", "replicas embedding", "wrapped replicas", "infinite")
ALL = (*QUICK, "wrapped replicas embedding", "dense", "paper", "embedding", "per sample", "zero")
ROUNDED = ("replicas in bfloat16", "replicas embedding in bfloat16")


def results(folder, world, steps, dtypes, *kinds):
    run_well(SCRIPT, world, folder, steps, dtypes, *kinds)
    return torch.load(folder / f"results-{world}.pt")


def check_same(one, several, tolerance):
    for kind, dtype in one:
        losses, parameters = one[kind, dtype]
        other_losses, other_parameters = several[kind, dtype]
        if dtype == torch.float64:
            assert losses == pytest.approx(other_losses, abs=tolerance, nan_ok=True), kind
            for parameter, other in zip(parameters, other_parameters, strict=True):
                torch.testing.assert_close(parameter, other, rtol=0, atol=tolerance, msg=kind)
        else:  # rounding changes some bases; the same rows in another order change the mean by up to 0.33 %
            means = [torch.tensor(each).nanmean() for each in (losses, other_losses)]
            torch.testing.assert_close(*means, rtol=1e-2, atol=0, msg=kind)


def check_rounded(found):
    """Moments that are sent in bfloat16 change losses only slightly."""
    for kind, dtype in found:
        if kind in ROUNDED:
            (losses, _), (rounded, _) = found[kind.removesuffix(" in bfloat16"), dtype], found[kind, dtype]
            assert losses != rounded, kind
            assert sum(losses) == pytest.approx(sum(rounded), rel=5e-3), kind


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Compare one process with two."""
    folder = tmp_path_factory.mktemp("replicas")
    kinds = {1: QUICK, 2: (*QUICK, *ROUNDED)}
    return [results(folder, world, 8, "float64", *kinds[world]) for world in (1, 2)]


def test_two_processes_follow_one(quick):
    check_same(*quick, tolerance=1e-9)


def test_replicas_are_the_same_to_the_bit_under_distributed_data_parallel(quick):
    (losses, parameters), (others, same) = (quick[1][k, torch.float64] for k in ("replicas", "wrapped replicas"))
    assert losses == others
    assert all(map(torch.equal, parameters, same))


def test_two_replicas_may_send_bfloat16(quick):
    check_rounded(quick[1])


def test_running_statistics_are_those_of_the_data_in_all_processes(tmp_path):
    run_well(SCRIPT.with_name("normalization.py"), 2, tmp_path)


@pytest.mark.slow
def test_two_and_four_processes_follow_one_for_200_steps(tmp_path):
    kinds = {1: ALL, 2: ALL, 4: (*ALL, *ROUNDED)}
    one, two, four = (results(tmp_path, n, 200, "float64,float32", *kinds[n]) for n in kinds)
    check_same(one, two, tolerance=1e-8)
    check_same(one, four, tolerance=1e-8)
    check_rounded(four)
