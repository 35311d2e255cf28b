"""Harder workloads, and the default without some of its parts, do not diverge without tuning."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from standins import BY_NAME, SMALL

from vsgd.cli import main
from vsgd_bench.compare.methods import Setting
from vsgd_bench.compare.ours import ABLATIONS, OURS
from vsgd_bench.compare.runs import Job, wanted
from vsgd_bench.compare.stress import CHANGES, STRESSED, stress_workloads
from vsgd_bench.compare.train import train

HARDER = {workload.name: workload for workload in stress_workloads()}
BUNDLED = [name for name, workload in HARDER.items() if not workload.files]
QUICK = [name for name in BUNDLED if name.startswith("digits-mlp") and name != "digits-mlp+minibatch-1"]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BUNDLED]
)
def test_default_learns_on_harder_workloads(name):
    harder = HARDER[name]
    run = train(harder._replace(epochs=harder.epochs if harder.batch > 32 else 1), BY_NAME[OURS], Setting(), seed=0)
    assert run.outcome == "finished"
    assert run.held_out[-1] < 0.95 * run.held_out[0]


def test_changes_are_what_they_say():
    tasks = {change: HARDER[f"digits-mlp+{change}"].build(0, False) for change in CHANGES}
    plain = HARDER["digits-mlp+minibatch-8"].build(0, False)
    assert tasks["inputs-x100"].split.x.max() == 100 * plain.split.x.max()
    assert not tasks["last-layer-x0"].model[-1].weight.any()
    assert all(p.dtype == torch.bfloat16 for p in tasks["bfloat16"].model.parameters())
    task = tasks["loss-x1000"]
    output = task.model(task.split.x)
    assert task.loss(output, task.split.y) == 1000 * plain.loss(output, task.split.y)


def test_harder_workloads_have_different_provenance():
    stored = [wanted(Job(workload, BY_NAME[OURS], Setting(), 0)) for workload in HARDER.values()]
    assert len({(record["provenance"]["task"], record["batch"]) for record in stored}) == len(stored)
    assert {name.partition("+")[0] for name in HARDER} == set(STRESSED)


@pytest.mark.slow  # each is compiled separately
@pytest.mark.parametrize("method", ABLATIONS, ids=lambda method: method.name)
def test_every_part_can_be_taken_away(method):
    assert train(SMALL, method, Setting(), seed=0).outcome != "failed"


@pytest.mark.parametrize(
    ("flag", "workload", "suite"),
    [
        ("--ablations", "rotated", "ablations"),
        pytest.param("--stress", "digits-mlp+minibatch-512", "stress", marks=pytest.mark.slow),
    ],
)
def test_the_command_writes_its_page(flag, workload, suite, tmp_path):
    arguments = ["compare", flag, "--workloads", workload, "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]
    assert main([*arguments, "--optimizers", "vsgd"]) == 0
    text = (tmp_path / suite / "results.md").read_text()
    assert f"vsgd compare {flag} --seeds 1" in text
    assert "Not run" in text
