"""After a mistake in one process, all processes soon raise an error with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_all, run_well

SCRIPT = Path(__file__).with_name("mistakes.py")

GONE = "process 1 of 2 raised ValueError: the data are gone"
DIFFERS = "process 1 differs from process 0 in "

TOLD = {
    "other weights": DIFFERS + "the values of parameter 0: checksum",
    "other shapes": DIFFERS + "the number of parameters of group 0: 1 instead of 2",
    "other lr": DIFFERS + "lr of group 0: 0.5 instead of 1.0",
    "other weight decay": DIFFERS + "weight_decay of group 0: 0.25 instead of 0.0",
    "other algorithm": DIFFERS + "algorithm of group 0: Paper instead of Networks",
    "other constant": DIFFERS + "bootstrap of algorithm of group 0: 4.0 instead of",
    "other precision of state": DIFFERS + "compact: True instead of False",
    "other direction": DIFFERS + "maximize of group 0: True instead of False",
    "other samples": DIFFERS + "as_samples: True instead of False",
    "clears state": DIFFERS + "the presence of state of parameter 0: False instead of True",
    "loads alone": DIFFERS + "whether weights or state were set since the last step: True instead of False",
    "sets weights": DIFFERS + "whether weights or state were set since the last step: True instead of False",
    "schedules lr": DIFFERS + "lr of group 0: 0.75 instead of 1.0",
    "schedules weight decay": DIFFERS + "weight_decay of group 0: 0.125 instead of 0.0",
    "adds a group": DIFFERS + "the number of groups: 2 instead of 1",
    "no closure": "process 1 of 2 raised TypeError: VSGD may need a second gradient",
    "not averaged": "Wrap the model in DistributedDataParallel",
    "averaged twice": "each process must leave its own gradient",
    "more micro-batches": DIFFERS + "the number of micro-batches: 2 instead of 1",
    "raises": GONE,
    "raises averaged": GONE,
    "raises later": GONE,
    "raises before running statistics": GONE,
    "raises before micro-batches of running statistics": GONE,
    "raises in the forward pass of statistics": GONE,
    "raises in a probe of running statistics": GONE,
    "raises after running statistics": GONE,
    "draws noise": "the closure does not compute the same loss twice",
    "empty batch": "infinite, NaN or too large to be squared in 10 steps in a row",
    "empty rows": "process 1 of 2 raised SampleError: the minibatch is empty",
    "loss that is NaN": "loss nan, skipped 1",
    "gradient that is NaN": "skipped 1",
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


def test_a_skipped_step_returns_the_same_loss_in_every_process(told):
    for mistake in ("loss that is NaN", "gradient that is NaN"):
        assert told[0][mistake] == told[1][mistake]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["raises in backward", "raises before synchronized statistics"])
def test_processes_that_wait_for_one_that_raised_end_with_its_traceback(mistake, tmp_path):
    ends = run_all(SCRIPT, 3, tmp_path, mistake)
    for code, error in ends:
        assert code == 1
        assert "process 2 of 3 raised ValueError: the data are gone" in error
        assert "in fail" in error
