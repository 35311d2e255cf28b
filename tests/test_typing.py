"""The package exports its types: a program of a user passes mypy in strict mode."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import TIMEOUT

PROGRAM = """
import torch
import vsgd
from vsgd.sklearn import VSGDClassifier, VSGDRegressor
from vsgd.torch import VSGD, Diagnosis, is_probing

model = torch.nn.Linear(4, 2)
opt = VSGD(model.parameters(), weight_decay=1e-3, algorithm=vsgd.NETWORKS._replace(probe_interval=5.0))


def closure() -> torch.Tensor:
    opt.zero_grad()
    loss: torch.Tensor = model(torch.ones(1, 4)).sum()
    loss.backward()
    return loss


opt.step(closure)
opt.minimize(lambda: model(torch.ones(1, 4)).sum())
with opt.iterates():
    probing: bool = is_probing()
info: Diagnosis = opt.info()
theta, state, found = vsgd.step(1.0, vsgd.init(1.0), vsgd.Moments(1.0, 1.0, 1.0, 1.0), 1)
models = [VSGDClassifier(random_state=0), VSGDRegressor()]
"""


def check(tmp_path, program: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--untyped-calls-exclude=torch", "program.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)


@pytest.mark.slow
def test_a_program_is_typed(tmp_path):
    done = check(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_mistake_in_it_is_found(tmp_path):
    done = check(tmp_path, PROGRAM.replace("weight_decay=1e-3", "weight_decay='little'"))
    assert done.returncode == 1
    assert "weight_decay" in done.stdout
