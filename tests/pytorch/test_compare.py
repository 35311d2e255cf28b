"""`vsgd compare`: single runs, and tables of them in processes."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from standins import ABSENT, ADAM, BY_NAME, CRASH, DEATH, GRID, NORMALIZED, SMALL, STREAM, UNINSTALLED

from vsgd.errors import UserError
from vsgd_bench.compare.compute import compute
from vsgd_bench.compare.methods import RATES, Budget, Method, Setting
from vsgd_bench.compare.processes import run_all
from vsgd_bench.compare.runs import KEYS, Job, Runs
from vsgd_bench.compare.table import assemble, why_absent
from vsgd_bench.compare.train import EVALUATION_POINTS, Learner, Run, minibatches, train
from vsgd_bench.compare.workloads import WORKLOADS
from vsgd_bench.results import RunFile

DEFAULT = Setting()
INSTALLED = [method for method in BY_NAME.values() if why_absent(method) is None]


def setting_of(method):
    return Setting(0.1, 0.01 if method.decays else None) if method.rates else method.default


@pytest.mark.parametrize("method", INSTALLED, ids=lambda method: method.name)
def test_every_optimizer_starts_from_the_same_weights_and_learns(method):
    run = train(SMALL, method, setting_of(method), seed=0)
    assert run.outcome == "finished"
    assert len(run.held_out) == len(run.seconds) == len(run.training) == EVALUATION_POINTS + 1
    assert run.held_out[0] == pytest.approx(train(SMALL, ADAM, DEFAULT, seed=0).held_out[0])
    assert run.held_out[-1] < run.held_out[0]
    assert run.updates[-1] == 240 // 16
    if method.ours or method.full_batch_only:
        assert run.evaluations[-1] >= run.updates[-1]
    else:
        assert run.evaluations == run.updates
    assert run.final == run.held_out[-1]
    assert run.best == min(run.held_out)
    assert math.isfinite(run.final_training)


@pytest.mark.parametrize("method", INSTALLED, ids=lambda method: method.name)
def test_judging_changes_nothing(method):
    learner = Learner(NORMALIZED, method, setting_of(method), seed=0)
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
    run = train(SMALL, ADAM, DEFAULT, seed=0)
    learner = Learner(SMALL, ADAM, DEFAULT, seed=0)
    for rows in learner.batches:
        learner.update(rows)
    assert learner.training_loss() == run.final_training
    assert learner.judge(learner.task.split.x, learner.task.split.y) == run.final_training


def test_a_stream_is_judged_on_what_comes_next():
    run = train(STREAM, ADAM, DEFAULT, seed=0)
    assert run.final == pytest.approx(sum(run.held_out) / len(run.held_out))
    assert run.best == run.final
    assert len(run.updates) == 50
    assert torch.equal(torch.cat(minibatches(240, STREAM, 0)), torch.arange(240))


def test_divergence_ends_a_run():
    (rotated,) = (workload for workload in WORKLOADS if workload.name == "rotated")
    run = train(rotated, GRID, Setting(100.0), seed=0)
    assert run.outcome == "diverged"
    assert run.final == run.best == run.final_training == run.held_out[-1] == math.inf
    assert len(run.updates) < EVALUATION_POINTS + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table from two worker processes, one of which dies."""
    out = tmp_path_factory.mktemp("compare")
    compute([SMALL, ABSENT], [GRID, ADAM, CRASH, DEATH, UNINSTALLED], seeds=2, processes=2, runs=Runs(out, "suite"))
    return out


def outcomes(out):
    """Return the stored runs by method, setting and seed."""
    records = RunFile(out / "suite.jsonl.gz", KEYS)
    return {(r["method"], r["rate"], r["seed"]): (r["outcome"], r["seconds"]) for r in records}


def test_what_can_be_run_is_stored_and_what_fails_takes_nothing_with_it(folder):
    stored = outcomes(folder)
    finished = {key for key, (outcome, _) in stored.items() if outcome == "finished"}
    assert {("adam-default", None, seed) for seed in (0, 1)} <= finished
    assert {("sgd", rate, 0) for rate in GRID.rates} <= finished
    assert {("sgd", GRID.default.rate, seed) for seed in (0, 1)} <= finished
    assert sum(outcome == "failed" for outcome, _ in stored.values()) == 4
    runs = Runs(folder, "suite")
    assert runs.load(Job(SMALL, CRASH, DEFAULT, 0)).message == "ValueError: no such luck"
    assert runs.load(Job(SMALL, DEATH, DEFAULT, 1)).message == "its process died"


def test_a_later_run_computes_only_what_is_missing(folder, capsys):
    written = (folder / "suite.jsonl.gz").stat().st_mtime_ns
    compute([SMALL], [GRID, ADAM], seeds=2, processes=2, runs=Runs(folder, "suite"))
    assert (folder / "suite.jsonl.gz").stat().st_mtime_ns == written
    before = outcomes(folder)
    compute([SMALL], [CRASH, ADAM], seeds=1, processes=1, runs=Runs(folder, "suite"))
    assert (folder / "suite.jsonl.gz").stat().st_mtime_ns != written, "failed runs are tried again"
    assert outcomes(folder) == before, "the others are not"
    assert "small, crash, seed 0 failed: ValueError: no such luck" in capsys.readouterr().out


def test_absent_packages_and_data_give_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("VSGD_DATA", raising=False)
    compute([ABSENT], [UNINSTALLED], seeds=1, processes=1, runs=Runs(tmp_path, "suite"))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "absent is left out: set VSGD_DATA to a folder that holds nowhere/to-be.found",
        "uninstalled is left out: pip install no-such-package",
    ]
    monkeypatch.setenv("VSGD_DATA", str(tmp_path))
    assert why_absent(ABSENT) == f"put nowhere/to-be.found into {tmp_path}, the folder that VSGD_DATA names"


def test_a_grid_grows_until_its_best_rate_is_inside(folder):
    runs = Runs(folder, "suite")
    table = assemble([SMALL], [GRID, ADAM, CRASH], 2, runs)
    tried = sorted(rate for method, rate, seed in outcomes(folder) if method == "sgd" and seed == 0)[1:]
    best = table.cells["small", "sgd"].setting.rate
    assert tried[0] < best < tried[-1]
    assert min(tried, key=lambda rate: runs.load(Job(SMALL, GRID, Setting(rate), 0)).final) == best
    assert set(table.cells["small", "sgd"].runs) == {0, 1}
    assert table.cells["small", "sgd/single"].setting.rate == best, "there is one workload"
    assert table.cells["small", "sgd/default"].setting == GRID.default
    wider = GRID._replace(rates=RATES[4:13])
    assert ("small", "sgd") not in assemble([SMALL], [wider], 2, runs).cells, "half a grid has no best"


def test_an_optimizer_is_given_the_length_of_its_run(monkeypatch):
    budgets = []

    def make(model, setting, budget):
        budgets.append(budget)
        return ADAM.make(model, setting, budget)

    train(SMALL._replace(epochs=2), Method("m", "M", make, ""), DEFAULT, seed=0)
    assert set(budgets) == {Budget(updates=30, rows=240, epochs=2)}


def test_only_noise_free_workloads_are_run_by_methods_that_need_them(tmp_path):
    method = ADAM._replace(full_batch_only=True)
    runs = Runs(tmp_path, "suite")
    compute([SMALL, SMALL._replace(name="whole", batch=240, full_batch=True)], [method], 1, 1, runs)
    assert {record["workload"] for record in runs} == {"whole"}


def test_a_full_disk_ends_nothing(tmp_path, monkeypatch, capsys):
    def full(path, content):
        raise OSError(28, "No space left on device")

    runs = Runs(tmp_path, "suite")
    with monkeypatch.context() as patch:
        patch.setattr("vsgd_bench.results.write_whole", full)
        compute([SMALL], [ADAM], seeds=2, processes=1, runs=runs)
    assert capsys.readouterr().err.count("No space left on device") == 2
    compute([SMALL], [ADAM._replace(name="other")], seeds=1, processes=1, runs=runs)
    assert len(list(Runs(tmp_path, "suite"))) == 3, "what could not be saved is saved with the next run"


def test_a_run_of_another_source_is_shown_but_trained_again(tmp_path, monkeypatch):
    job, other = Job(SMALL, BY_NAME["vsgd"], DEFAULT, 0), Job(SMALL, ADAM, DEFAULT, 0)
    runs = Runs(tmp_path, "suite")
    run = Run(**dict.fromkeys(Run._fields, 0.5))._replace(seconds=[0.5])
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
    job = Job(SMALL, ADAM, DEFAULT, 0)
    runs = Runs(tmp_path, "suite")
    runs.save(job, Run(**dict.fromkeys(Run._fields, 0.5)))
    assert runs.load(job._replace(workload=SMALL._replace(epochs=2))) is None
    assert runs.load(job._replace(workload=SMALL._replace(batch=8))) is None


def test_runs_of_a_shared_suite_are_used_unless_there_is_a_newer_one(tmp_path, monkeypatch):
    job = Job(SMALL, BY_NAME["vsgd"], DEFAULT, 0)
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
