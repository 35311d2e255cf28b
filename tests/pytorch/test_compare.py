"""`vsgd compare`: single runs, and tables of them in processes."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from standins import ABSENT, ADAM, BY_NAME, CRASH, DEATH, GRID, NORMALIZED, SMALL, STREAM, UNINSTALLED

from vsgd_bench.compare.processes import run_all
from vsgd_bench.compare.runs import Job, load, path_of, save
from vsgd_bench.compare.table import assemble, compute, why_absent
from vsgd_bench.compare.train import EVALUATION_POINTS, Learner, Run, minibatches, train
from vsgd_bench.compare.workloads import WORKLOADS

INSTALLED = [method for method in BY_NAME.values() if why_absent(method) is None]


@pytest.mark.parametrize("method", INSTALLED, ids=lambda method: method.name)
def test_every_optimizer_starts_from_the_same_weights_and_learns(method):
    run = train(SMALL, method, 0.1 if len(method.settings) > 1 else None, seed=0)
    assert run.outcome == "finished"
    assert len(run.held_out) == len(run.seconds) == len(run.training) == EVALUATION_POINTS + 1
    assert run.held_out[0] == pytest.approx(train(SMALL, ADAM, None, seed=0).held_out[0])
    assert run.held_out[-1] < run.held_out[0]
    assert run.updates[-1] == 240 // 16
    assert run.evaluations[-1] >= run.updates[-1] if method.ours else run.evaluations == run.updates
    assert run.final == run.held_out[-1]
    assert run.best == min(run.held_out)
    assert math.isfinite(run.final_training)


@pytest.mark.parametrize("method", INSTALLED, ids=lambda method: method.name)
def test_judging_changes_nothing(method):
    learner = Learner(NORMALIZED, method, 0.1 if len(method.settings) > 1 else None, seed=0)
    batches = minibatches(240, NORMALIZED, seed=0)
    for rows in batches[:3]:
        learner.update(rows)
    before = {name: value.clone() for name, value in learner.task.model.state_dict().items()}
    loss = learner.judge(learner.task.split.x_test, learner.task.split.y_test)
    assert math.isfinite(loss)
    assert learner.task.model.training
    after = learner.task.model.state_dict()
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    learner.update(batches[3])


def test_minibatches_depend_on_the_seed_only_and_are_complete():
    first, again, other = (minibatches(100, SMALL._replace(epochs=2), seed) for seed in (0, 0, 1))
    assert [len(rows) for rows in first] == [16] * 12
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_the_training_loss_is_that_of_rows_learned_from_at_the_weights_that_are_judged():
    run = train(SMALL, ADAM, None, seed=0)
    learner = Learner(SMALL, ADAM, None, seed=0)
    for rows in learner.batches:
        learner.update(rows)
    assert learner.training_loss() == run.final_training
    assert learner.judge(learner.task.split.x, learner.task.split.y) == run.final_training


def test_a_stream_is_judged_on_what_comes_next():
    run = train(STREAM, ADAM, None, seed=0)
    assert run.final == pytest.approx(sum(run.held_out) / len(run.held_out))
    assert run.best == run.final
    assert len(run.updates) == 50
    assert torch.equal(torch.cat(minibatches(240, STREAM, 0)), torch.arange(240))


def test_divergence_ends_a_run():
    (rotated,) = (workload for workload in WORKLOADS if workload.name == "rotated")
    run = train(rotated, GRID, 100.0, seed=0)
    assert run.outcome == "diverged"
    assert run.final == run.best == run.final_training == run.held_out[-1] == math.inf
    assert len(run.updates) < EVALUATION_POINTS + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table in two processes, one of which dies on the way."""
    out = tmp_path_factory.mktemp("compare")
    compute([SMALL, ABSENT], [GRID, ADAM, CRASH, DEATH, UNINSTALLED], seeds=2, processes=2, out=out)
    return out


def stored(out):
    return {path.relative_to(out / "runs").as_posix(): path.stat().st_mtime_ns for path in out.rglob("*.json")}


def test_what_can_be_run_is_stored_and_what_fails_takes_nothing_with_it(folder):
    outcomes = {name: json.loads((folder / "runs" / name).read_text())["outcome"] for name in stored(folder)}
    finished = {name for name, outcome in outcomes.items() if outcome == "finished"}
    grid = {"small/sgd/0.001-seed0.json", "small/sgd/0.1-seed0.json", "small/sgd/0.1-seed1.json"}
    assert finished == grid | {f"small/adam-default/default-seed{seed}.json" for seed in (0, 1)}
    assert sum(outcome == "failed" for outcome in outcomes.values()) == 4
    assert load(folder, Job(SMALL, CRASH, None, 0)).message == "ValueError: no such luck"
    assert load(folder, Job(SMALL, DEATH, None, 1)).message == "its process died"


def test_a_later_run_computes_only_what_is_missing(folder, capsys):
    before = stored(folder)
    compute([SMALL], [GRID, ADAM], seeds=2, processes=2, out=folder)
    assert stored(folder) == before
    compute([SMALL], [CRASH], seeds=1, processes=1, out=folder)
    changed = {name for name, written in stored(folder).items() if before[name] != written}
    assert changed == {"small/crash/default-seed0.json"}, "failed runs are tried again"
    assert "small, crash, seed 0 failed: ValueError: no such luck" in capsys.readouterr().out


def test_what_is_absent_is_told_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("VSGD_DATA", raising=False)
    compute([ABSENT], [UNINSTALLED], seeds=1, processes=1, out=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "absent is left out: set VSGD_DATA to a folder that holds nowhere/to-be.found",
        "uninstalled is left out: pip install no-such-package, or 'vsgd[compare]' for all",
    ]
    monkeypatch.setenv("VSGD_DATA", str(tmp_path))
    assert why_absent(ABSENT) == f"put nowhere/to-be.found into {tmp_path}, the folder that VSGD_DATA names"


def test_the_best_of_a_grid_is_chosen_and_its_edge_noticed(folder):
    table = assemble([SMALL], [GRID, ADAM, CRASH], 2, folder)
    assert table.cells["small", "sgd"].setting == 0.1
    assert table.cells["small", "sgd"].at_edge
    assert not table.cells["small", "adam-default"].at_edge
    assert set(table.cells["small", "sgd"].runs) == {0, 1}
    wider = GRID._replace(settings=(0.001, 0.1, 1.0))
    assert ("small", "sgd") not in assemble([SMALL], [wider], 2, folder).cells, "half a grid has no best"


def test_changed_circumstances_make_a_new_run(folder, tmp_path, monkeypatch):
    job = Job(SMALL, BY_NAME["vsgd"], None, 0)
    save(tmp_path, job, load(folder, Job(SMALL, ADAM, None, 0)))
    assert load(tmp_path, job) is not None
    assert load(tmp_path, job._replace(workload=SMALL._replace(epochs=2))) is None
    monkeypatch.setattr("vsgd_bench.compare.runs.fingerprint", lambda: "changed")
    assert load(tmp_path, job) is None
    assert load(folder, Job(SMALL, ADAM, None, 0)) is not None, "others do not depend on our code"


@pytest.mark.parametrize("damage", [lambda text: "{", lambda text: text.replace("0.5", "9.5")], ids=["cut", "changed"])
def test_a_damaged_run_is_told_and_computed_again(tmp_path, capsys, damage):
    job = Job(SMALL, ADAM, None, 0)
    fields = dict.fromkeys(Run._fields, 0.5)
    save(tmp_path, job, Run(**fields))
    assert load(tmp_path, job) == Run(**fields)
    path = path_of(tmp_path, job)
    path.write_text(damage(path.read_text()))
    assert load(tmp_path, job) is None
    assert "default-seed0.json" in capsys.readouterr().err


def test_nothing_to_do_starts_no_process():
    assert list(run_all([], 2)) == []
