"""Memory of parameters is compared exactly, and the first step takes linear time in the number of tensors."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from vsgd import NETWORKS, eigenbasis
from vsgd.torch import VSGD


def test_interleaved_views_learn_as_tensors_with_memory_of_their_own():
    buffer = torch.zeros(6, 4)
    views = [nn.Parameter(buffer[:, ::2]), nn.Parameter(buffer[:, 1::2])]
    copies = [nn.Parameter(view.detach().clone()) for view in views]
    for parts in (views, copies):
        opt = VSGD(parts)
        for _ in range(10):
            opt.minimize(lambda parts=parts: sum((part - k - 1).square().sum() for k, part in enumerate(parts)))
    assert all(bool((copy > 0).all()) for copy in copies)
    assert all(map(torch.equal, views, copies))


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 3), (1, 1), True),
        ((4,), (0,), True),
        ((2, 3), (2, 1), True),
        ((2, 3), (3, 2), False),  # offsets 0, 2, 4, 3, 5, 7
        ((3, 2), (2, 3), False),
        ((3, 3), (2, 3), False),  # offsets 0, 3, 6, 2, 5, 8, 4, 7, 10
        ((4, 2), (2, 6), True),  # 6 is reached twice
        ((1, 3), (0, 1), False),
        ((3, 4), (1, 3), False),
    ],
)
def test_a_parameter_that_overlaps_itself_is_refused(shape, strides, overlaps):
    part = nn.Parameter(torch.zeros(20).as_strided(shape, strides))
    if overlaps:
        with pytest.raises(ValueError, match="overlaps itself"):
            VSGD([part])
    else:
        VSGD([part])


def test_views_that_share_one_element_are_refused_by_name():
    buffer = torch.zeros(10)
    first, second = nn.Parameter(buffer[::3]), nn.Parameter(buffer[1::4])  # both have element 9
    with pytest.raises(ValueError, match=r"\(a\) and parameter 1 of group 0 \(b\) share memory"):
        VSGD([("a", first), ("b", second)])
    opt = VSGD([first])
    with pytest.raises(ValueError, match="share memory"):
        opt.add_param_group({"params": [second]})
    assert len(opt.param_groups) == 1


def test_a_parameter_that_is_listed_twice_is_named():
    parameters = list(nn.Linear(3, 2).parameters())
    with pytest.raises(ValueError, match="appears twice in the list of parameters, at positions 0 and 2"):
        VSGD([*parameters, *parameters])


def calls_of_first_step(tensors: int, grouped: bool) -> int:
    """Return the number of Python and C functions that the constructor and the first step call."""
    parameters = [nn.Parameter(torch.full((2, 3) if k % 2 else (4,), 1.0)) for k in range(tensors)]
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        opt = VSGD([{"params": [p]} for p in parameters] if grouped else parameters)
        opt.minimize(lambda: torch.stack([p.square().sum() for p in parameters]).sum())
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "a group each"])
def test_the_first_step_makes_calls_in_proportion_to_the_number_of_tensors(grouped):
    calls_of_first_step(8, grouped)  # compiles
    few, many = (calls_of_first_step(tensors, grouped) for tensors in (40, 80))
    assert many < 2.3 * few


@pytest.mark.parametrize("shape", [(8, 4096), (4096, 8), (10, 3140), (8000, 4), (64, 576), (192, 192)], ids=str)
def test_state_takes_at_most_40_bytes_a_parameter(shape):
    theta = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(4, shape[1])
    opt = VSGD([theta])
    opt.minimize(lambda: (x @ theta.T).square().mean())
    diagnosis = opt.info()
    assert diagnosis.parameters == theta.numel()
    assert diagnosis.state_bytes == sum(t.nbytes for t in opt.state[theta].values())
    assert theta.numel() * eigenbasis.MEMORY_SHARE > eigenbasis.MEMORY_ALLOWANCE
    assert diagnosis.state_bytes <= 40 * theta.numel()
    assert f"state {diagnosis.state_bytes:,} bytes" in str(diagnosis)


def test_the_bases_of_a_small_network_take_at_most_half_a_megabyte():
    theta = nn.Parameter(torch.randn(1000, 4, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(4, 4)
    opt = VSGD([theta])
    opt.minimize(lambda: (x @ theta.T).square().mean())
    assert 40 * theta.numel() < opt.info().state_bytes <= 20 * theta.numel() + 4 * eigenbasis.MEMORY_ALLOWANCE + 1000


def test_printed_constants_are_those_that_differ_from_the_defaults():
    theta = nn.Parameter(torch.zeros(2))
    assert "algorithm: Networks()" in repr(VSGD([theta]))
    changed = NETWORKS._replace(probe_interval=5.0)
    assert repr(changed) == "Networks(probe_interval=5.0)"
    assert eval(repr(changed), {"Networks": type(NETWORKS)}) == changed
