"""The suite of unseen networks: it needs no files, and its tasks are what they say."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from standins import ADAM  # noqa: E402

from vsgd_bench.compare import pages, table  # noqa: E402
from vsgd_bench.compare.suites import UNSEEN  # noqa: E402
from vsgd_bench.compare.train import Learner  # noqa: E402
from vsgd_bench.compare.unseen import UNSEEN_WORKLOADS, adding, encoder, hide, two_views  # noqa: E402


@pytest.mark.parametrize("workload", UNSEEN_WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_learns_without_files(workload, monkeypatch):
    monkeypatch.delenv("VSGD_DATA", raising=False)
    assert table.why_absent(workload) is None
    learner = Learner(workload, ADAM, None, seed=0)
    split, model = learner.task.split, learner.task.model
    before = [value.clone() for value in model.parameters()]
    start = learner.judge(split.x_test, split.y_test)
    for rows in learner.batches[:30]:
        learner.update(rows)
    assert learner.judge(split.x_test, split.y_test) < start
    assert learner.training_loss() < start
    assert all((value != old).any() for value, old in zip(model.parameters(), before, strict=True))


def test_marked_numbers_are_added():
    split = adding(0, sparse=False).split
    numbers, marks = split.x.unbind(2)
    assert (marks.sum(1) == 2).all()
    torch.testing.assert_close((numbers * marks).sum(1), split.y)


def test_both_answers_of_the_encoder_are_frequent():
    assert 0.3 < encoder(0, sparse=False).split.y.float().mean() < 0.8


def test_views_and_noise_come_from_the_generator():
    x = torch.rand(5, 1, 8, 8)
    for transform in (two_views, hide):
        one, other = (transform(x, x, torch.Generator().manual_seed(3))[0] for _ in range(2))
        assert torch.equal(one, other)
    views, _ = two_views(x, x, torch.Generator())
    assert views.shape == (5, 2, 64)
    assert not torch.equal(views[:, 0], views[:, 1])


def test_the_page_says_where_constants_come_from():
    empty = table.Table(UNSEEN.workloads, UNSEEN.methods, 3, {}, {}, {})
    assert any("No constant" in text for text in pages.protocol(empty, pages.UNSEEN))
    assert not any("No constant" in text for text in pages.protocol(empty, pages.LARGE))
