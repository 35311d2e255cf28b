"""`vsgd compare`: single runs, and tables of them in processes."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from standins import ABSENT, ADAM, BY_NAME, CRASH, DEATH, GRID, NORMALIZED, SMALL, STREAM, UNINSTALLED

from vsgd.errors import UserError
from vsgd_bench.compare.processes import run_all
from vsgd_bench.compare.runs import KEYS, Job, Runs, setting_name
from vsgd_bench.compare.table import assemble, compute, why_absent
from vsgd_bench.compare.train import EVALUATION_POINTS, Learner, Run, minibatches, train
from vsgd_bench.compare.workloads import WORKLOADS
from vsgd_bench.results import RunFile

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
    compute([SMALL, ABSENT], [GRID, ADAM, CRASH, DEATH, UNINSTALLED], seeds=2, processes=2, runs=Runs(out, "suite"))
    return out


def outcomes(out):
    """What is stored, by method, setting and seed."""
    records = RunFile(out / "suite.jsonl.gz", KEYS)
    return {(r["method"], setting_name(r["setting"]), r["seed"]): (r["outcome"], r["seconds"]) for r in records}


def test_what_can_be_run_is_stored_and_what_fails_takes_nothing_with_it(folder):
    stored = outcomes(folder)
    finished = {key for key, (outcome, _) in stored.items() if outcome == "finished"}
    grid = {("sgd", "0.001", 0), ("sgd", "0.1", 0), ("sgd", "0.1", 1)}
    assert finished == grid | {("adam-default", "default", seed) for seed in (0, 1)}
    assert sum(outcome == "failed" for outcome, _ in stored.values()) == 4
    runs = Runs(folder, "suite")
    assert runs.load(Job(SMALL, CRASH, None, 0)).message == "ValueError: no such luck"
    assert runs.load(Job(SMALL, DEATH, None, 1)).message == "its process died"


def test_a_later_run_computes_only_what_is_missing(folder, capsys):
    written = (folder / "suite.jsonl.gz").stat().st_mtime_ns
    compute([SMALL], [GRID, ADAM], seeds=2, processes=2, runs=Runs(folder, "suite"))
    assert (folder / "suite.jsonl.gz").stat().st_mtime_ns == written
    before = outcomes(folder)
    compute([SMALL], [CRASH, ADAM], seeds=1, processes=1, runs=Runs(folder, "suite"))
    assert (folder / "suite.jsonl.gz").stat().st_mtime_ns != written, "failed runs are tried again"
    assert outcomes(folder) == before, "the others are not"
    assert "small, crash, seed 0 failed: ValueError: no such luck" in capsys.readouterr().out


def test_what_is_absent_is_told_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("VSGD_DATA", raising=False)
    compute([ABSENT], [UNINSTALLED], seeds=1, processes=1, runs=Runs(tmp_path, "suite"))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "absent is left out: set VSGD_DATA to a folder that holds nowhere/to-be.found",
        "uninstalled is left out: pip install no-such-package",
    ]
    monkeypatch.setenv("VSGD_DATA", str(tmp_path))
    assert why_absent(ABSENT) == f"put nowhere/to-be.found into {tmp_path}, the folder that VSGD_DATA names"


def test_the_best_of_a_grid_is_chosen_and_its_edge_noticed(folder):
    runs = Runs(folder, "suite")
    table = assemble([SMALL], [GRID, ADAM, CRASH], 2, runs)
    assert table.cells["small", "sgd"].setting == 0.1
    assert table.cells["small", "sgd"].at_edge
    assert not table.cells["small", "adam-default"].at_edge
    assert set(table.cells["small", "sgd"].runs) == {0, 1}
    wider = GRID._replace(settings=(0.001, 0.1, 1.0))
    assert ("small", "sgd") not in assemble([SMALL], [wider], 2, runs).cells, "half a grid has no best"


def test_a_run_of_another_source_is_shown_but_trained_again(tmp_path, monkeypatch):
    job, other = Job(SMALL, BY_NAME["vsgd"], None, 0), Job(SMALL, ADAM, None, 0)
    runs = Runs(tmp_path, "suite")
    run = Run(**dict.fromkeys(Run._fields, 0.5))
    for each in (job, other):
        runs.save(each, run)
        assert runs.is_current(each)
    monkeypatch.setattr("vsgd_bench.compare.runs.source_digest", lambda: "changed")
    assert runs.load(job) == run
    assert not runs.is_current(job)
    assert runs.is_current(other), "opponents do not depend on the library"
    table = assemble([SMALL], [job.method, ADAM], 1, runs)
    assert {name: cell.outdated for (_, name), cell in table.cells.items()} == {"vsgd": 1, "adam-default": 0}
    compute([SMALL], [job.method, ADAM], seeds=1, processes=1, runs=runs)
    assert runs.is_current(job)
    assert runs.load(job) != run
    assert runs.load(other) == run


def test_a_run_of_another_length_is_not_used(tmp_path):
    job = Job(SMALL, ADAM, None, 0)
    runs = Runs(tmp_path, "suite")
    runs.save(job, Run(**dict.fromkeys(Run._fields, 0.5)))
    assert runs.load(job._replace(workload=SMALL._replace(epochs=2))) is None
    assert runs.load(job._replace(workload=SMALL._replace(batch=8))) is None


def test_runs_of_a_shared_suite_are_used_unless_there_is_a_newer_one(tmp_path, monkeypatch):
    job = Job(SMALL, BY_NAME["vsgd"], None, 0)
    first, second = (Run(**dict.fromkeys(Run._fields, value)) for value in (0.5, 0.25))
    Runs(tmp_path, "shared").save(job, first)
    assert Runs(tmp_path, "suite").load(job) is None
    runs = Runs(tmp_path, "suite", ("shared",))
    assert runs.load(job) == first
    with monkeypatch.context() as patch:
        patch.setattr("vsgd_bench.compare.runs.source_digest", lambda: "earlier")
        runs.save(job, second)
    assert runs.load(job) == first, "it is of the present source"
    runs.save(job, second)
    assert runs.load(job) == second


def test_runs_of_the_earlier_format_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "runs" / "small").mkdir(parents=True)
    with pytest.raises(UserError, match="holds runs in the format of version 0") as told:
        Runs(tmp_path, "suite")
    assert "\n" not in str(told.value)


def test_nothing_to_do_starts_no_process():
    assert list(run_all([], 2)) == []
