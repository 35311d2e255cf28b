"""Effects on the whole process begin with an optimizer and end with the last one."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import warnings

import pytest
import torch
from processes import TIMEOUT
from torch import nn

from vsgd.torch import VSGD, process

CODE = """
import gc, warnings
import torch
from torch.nn.modules import module
import vsgd.torch

def effects():
    ours = [each for each in warnings.filters if each[1] is not None and "global hooks" in each[1].pattern]
    return len(module._global_forward_pre_hooks), len(ours)

imported = effects()
model = torch.nn.Linear(2, 1)
opt = vsgd.torch.VSGD(model.parameters())
opt.minimize(lambda: model(torch.ones(3, 2)).square().mean())
during = effects()
del opt
gc.collect()
print(imported, during, effects(), sep="; ")
"""


def test_nothing_is_installed_by_the_import_or_left_after_the_last_optimizer():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert result.stdout.strip() == "(0, 0); (1, 1); (0, 0)"


def test_a_second_optimizer_works_after_the_first_is_gone():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    x = torch.randn(8, 2)
    for _ in range(2):
        opt = VSGD(model.parameters())
        for _ in range(3):
            opt.minimize(lambda: model(x).square().mean())
        # one update of the running statistics per step, so second evaluations are undone
        assert int(model[1].num_batches_tracked) % 3 == 0
        del opt
        gc.collect()


def test_the_last_optimizer_may_be_collected_during_a_forward_pass():
    gc.collect()
    model = nn.Linear(2, 1)
    opts = [VSGD(model.parameters())]

    def collect_garbage(module, args):
        if opts:  # only once: optimizers of other tests may keep this hook alive
            opts.clear()
            gc.collect()

    process.call_before_forward(collect_garbage)
    process.call_before_forward(lambda module, args: None)
    model(torch.ones(3, 2))


def test_filters_that_the_user_has_reset_are_no_error():
    with warnings.catch_warnings():
        process.remove_filter(("ignore", None, Warning, None, 12345))


@pytest.mark.parametrize("version", [3, 5, "4", None, torch.zeros(2)], ids=str)
def test_states_of_another_format_are_refused(version):
    model = nn.Linear(2, 1)
    opt = VSGD(model.parameters())
    opt.minimize(lambda: model(torch.ones(3, 2)).square().mean())
    saved = {**opt.state_dict(), "format": version}
    wanted = f"format {version!r}, this version of vsgd reads format 4"
    with pytest.raises(ValueError, match=rf"{re.escape(wanted)}.*Nothing was loaded"):
        opt.load_state_dict(saved)


def test_states_of_version_0_2_are_refused_by_name():
    model = nn.Linear(2, 1)
    opt = VSGD(model.parameters())
    saved = opt.state_dict()
    del saved["format"], saved["param_groups"][0]["progress"]
    with pytest.raises(ValueError, match=r"saved by vsgd 0\.2"):
        opt.load_state_dict(saved)
