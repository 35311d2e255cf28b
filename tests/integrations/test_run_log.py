"""Logs and progress bars of real training runs."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from closures import closure_of
from torch import nn

from vsgd.integrations.run_file import HEADER, Reader
from vsgd.integrations.run_log import RunLog, progress
from vsgd.torch import VSGD


def train(opt, model, steps, micro_batches=1, broken=()):
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(8, 4)

        def loss(x=x, step=step):
            return model(x).square().mean() * (math.nan if step in broken else 1.0)

        losses.append(float(opt.minimize([loss] * micro_batches if micro_batches > 1 else loss)))
    return losses


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def read(path):
    reader = Reader(path)
    reader.update()
    assert not reader.bad_lines
    return reader.records


def test_log_has_the_values_of_info_at_regular_steps(model, tmp_path):
    opt = VSGD(model.named_parameters())
    path = tmp_path / "runs" / "a.jsonl"
    RunLog(opt, path, every=10)
    losses = train(opt, model, 35)
    records = read(path)
    assert [r.step for r in records] == [10, 20, 30]
    assert [r.loss for r in records] == pytest.approx([sum(losses[i : i + 10]) / 10 for i in (0, 10, 20)], rel=1e-3)
    assert records[2].gradients == pytest.approx(1.1, abs=0.15)
    assert math.isnan(records[2].batch)
    train(opt, model, 5)
    last, info = read(path)[-1], opt.info()
    assert [t.name for t in last.tensors] == [t.name for t in info.tensors]
    assert [t.basis for t in last.tensors] == [t.basis for t in info.tensors]
    assert [t.rate for t in last.tensors] == pytest.approx([t.rate.median for t in info.tensors], rel=1e-3)


def test_watching_changes_nothing(model, tmp_path):
    def weights(watch):
        torch.manual_seed(0)
        other = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        opt = VSGD(other.named_parameters())
        if watch:
            RunLog(opt, tmp_path / "run.jsonl", every=3)
        train(opt, other, 20)
        return nn.utils.parameters_to_vector(other.parameters())

    assert torch.equal(weights(True), weights(False))


def test_steps_that_are_not_finite(model, tmp_path):
    opt = VSGD(model.named_parameters())
    RunLog(opt, tmp_path / "run.jsonl", every=10)
    losses = train(opt, model, 20, broken=(12, 15))
    first, second = read(tmp_path / "run.jsonl")
    assert (first.skipped, second.skipped) == (0, 2)
    finite = [loss for loss in losses[10:] if math.isfinite(loss)]
    assert second.loss == pytest.approx(sum(finite) / 8, rel=1e-3)


def test_micro_batches_say_which_batch_is_worth_using(model, tmp_path):
    opt = VSGD(model.named_parameters())
    RunLog(opt, tmp_path / "run.jsonl", every=20)
    train(opt, model, 20, micro_batches=4)
    (record,) = read(tmp_path / "run.jsonl")
    assert record.batch == pytest.approx(opt.info().batch_worth_using, rel=1e-3)
    assert 1 <= record.gradients < 1.5


def test_a_closure_by_keyword_and_a_missing_one(model, tmp_path):
    opt = VSGD(model.named_parameters())
    RunLog(opt, tmp_path / "run.jsonl", every=5)

    closure = closure_of(opt, lambda: model(torch.ones(2, 4)).square().mean())

    for _ in range(5):
        opt.step(closure=closure)
    assert [r.step for r in read(tmp_path / "run.jsonl")] == [5]
    with pytest.raises(TypeError, match="takes a function that computes the loss"):
        opt.step()


def test_a_log_is_continued_and_other_files_are_left_alone(model, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(HEADER + '\n{"step": 1')  # killed while writing
    opt = VSGD(model.named_parameters())
    RunLog(opt, path, every=10)
    train(opt, model, 10)
    reader = Reader(path)
    reader.update()
    assert ([r.step for r in reader.records], reader.bad_lines) == ([10], 1)
    (tmp_path / "other.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"other\.txt exists and is not the log of a run"):
        RunLog(opt, tmp_path / "other.txt")
    assert (tmp_path / "other.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="every is 0"):
        RunLog(opt, path, every=0)


@pytest.mark.parametrize("broken", [(), (12,)], ids=["no step skipped", "a step skipped"])
def test_resumed_log_has_the_steps_of_an_uninterrupted_one(model, tmp_path, broken):
    through, half = VSGD(model.named_parameters()), copy.deepcopy(model)
    RunLog(through, tmp_path / "through.jsonl", every=10)
    train(through, model, 40, broken=broken)
    opt = VSGD(half.named_parameters())
    RunLog(opt, tmp_path / "resumed.jsonl", every=10)
    train(opt, half, 25, broken=broken)
    resumed = VSGD(half.named_parameters())
    resumed.load_state_dict(opt.state_dict())
    RunLog(resumed, tmp_path / "resumed.jsonl", every=10)
    train(resumed, half, 15)
    steps = [record.step for record in read(tmp_path / "through.jsonl")]
    assert [record.step for record in read(tmp_path / "resumed.jsonl")] == steps
    assert steps == [10, 20 - len(broken), 30 - len(broken), 40 - len(broken)]
    assert [record.steps for record in read(tmp_path / "resumed.jsonl")] == [10, 10, 5, 10]


def test_a_log_that_cannot_be_written_does_not_end_the_training(model, tmp_path):
    folder = tmp_path / "folder"
    opt = VSGD(model.named_parameters())
    RunLog(opt, folder / "run.jsonl", every=5)
    (folder / "run.jsonl").unlink()
    folder.rmdir()
    with pytest.warns(UserWarning, match="ends here: No such file"):
        train(opt, model, 10)
    assert len(train(opt, model, 10)) == 10


def test_progress_shows_the_same_in_one_line(model):
    opt, said = VSGD(model.named_parameters()), io.StringIO()
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(k)) for k in range(40)]
    got = []
    for x in progress(batches, opt, every=10, file=said, desc="epoch 1", mininterval=0, miniters=1):
        got.append(x)
        opt.minimize(lambda x=x: model(x).square().mean())
    assert got == batches
    text = said.getvalue()
    for words in ("epoch 1", "40/40", "loss ", "rate ", "signal/noise ", "gradients/step"):
        assert words in text
    before = text
    train(opt, model, 20)
    assert said.getvalue() == before, "the hooks are gone with the bar"


def test_progress_can_be_left_early(model):
    opt = VSGD(model.named_parameters())
    for x in progress([torch.ones(2, 4)] * 5, opt, file=io.StringIO()):
        opt.minimize(lambda x=x: model(x).square().mean())
        break
    assert not opt._optimizer_step_pre_hooks
