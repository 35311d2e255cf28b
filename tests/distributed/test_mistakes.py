"""A mistake in one process ends all of them, soon, and each says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_all, run_well

SCRIPT = Path(__file__).with_name("mistakes.py")

TOLD = {
    "other weights": "process 1 does not have the same parameters as process 0",
    "other shapes": "process 1 does not have the same shapes of parameters as process 0",
    "not averaged": "Wrap the model in DistributedDataParallel",
    "averaged twice": "each process must leave its own gradient",
    "more micro-batches": "different numbers of micro-batches (1, 2)",
    "raises": "process 1 of 2 raised ValueError: the data are gone",
    "raises averaged": "process 1 of 2 raised ValueError: the data are gone",
    "raises later": "process 1 of 2 raised ValueError: the data are gone",
    "draws noise": "the closure does not compute the same loss twice",
    "empty batch": "infinite, NaN or too large to be squared in 10 steps in a row",
    "empty rows": "process 1 of 2 raised SampleError: the minibatch is empty",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    run_well(SCRIPT, 2, folder, *TOLD)
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("mistake", TOLD)
def test_every_process_tells_the_mistake(mistake, told):
    for texts in told:
        assert TOLD[mistake] in texts[mistake]


@pytest.mark.slow
def test_processes_that_wait_for_the_gradient_of_one_that_raised_end_with_it(tmp_path):
    ends = run_all(SCRIPT, 3, tmp_path, "raises in backward", seconds=180)
    for _, error in ends:
        assert "process 2 of 3 raised ValueError: the data are gone" in error
