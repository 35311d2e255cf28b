"""The suites of unseen networks and of science need no files, and their tasks match their descriptions."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from standins import ADAM  # noqa: E402

from vsgd_bench.compare import pages, table  # noqa: E402
from vsgd_bench.compare.methods import Setting  # noqa: E402
from vsgd_bench.compare.science import SCIENCE_WORKLOADS, Rod, cart_pole, rod  # noqa: E402
from vsgd_bench.compare.suites import UNSEEN  # noqa: E402
from vsgd_bench.compare.train import Learner  # noqa: E402
from vsgd_bench.compare.unseen import UNSEEN_WORKLOADS, adding, encoder, hide, two_views  # noqa: E402


@pytest.mark.parametrize("workload", UNSEEN_WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_learns_without_files(workload, monkeypatch):
    monkeypatch.delenv("VSGD_DATA", raising=False)
    assert table.why_absent(workload) is None
    learner = Learner(workload, ADAM, Setting(), seed=0)
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


@pytest.mark.parametrize("workload", SCIENCE_WORKLOADS, ids=lambda workload: workload.name)
def test_every_problem_of_science_learns_without_files(workload, monkeypatch):
    monkeypatch.delenv("VSGD_DATA", raising=False)
    learner = Learner(workload, ADAM, Setting(0.01), seed=0)
    split = learner.task.split
    start = learner.judge(split.x_test, split.y_test)
    for rows in learner.batches[:60]:
        learner.update(rows)
    assert learner.judge(split.x_test, split.y_test) < 0.95 * start


@pytest.mark.parametrize("workload", SCIENCE_WORKLOADS, ids=lambda workload: workload.name)
def test_science_depends_on_the_seed_only(workload):
    first, again, other = (workload.build(seed, False).split for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.x, other.x)
    assert all(torch.isfinite(part).all() for part in first)


def test_a_full_batch_is_the_whole_training_set():
    whole = [w for w in SCIENCE_WORKLOADS if w.full_batch]
    assert whole
    assert all(len(w.build(0, False).split.x) == w.batch for w in whole)


def test_the_exact_solutions_have_no_held_out_loss():
    task = rod(3, False)
    steps = torch.randn(31, generator=torch.Generator().manual_seed(3)).cumsum(0)
    truth = Rod()
    with torch.no_grad():
        truth.log_conductivity.copy_(1.5 * (steps - steps.mean()) / steps.std())
        assert task.loss(truth(task.split.x_test), task.split.y_test) < 1e-12
        assert task.loss(truth(task.split.x), task.split.y) == pytest.approx(0.01, rel=0.1)


def test_a_pole_falls_and_a_push_moves_the_cart():
    state = torch.tensor([[0.0, 0.0, 0.1, 0.0]])
    free, pushed = (cart_pole(cart_pole(state, torch.tensor([f])), torch.tensor([f])) for f in (0.0, 10.0))
    assert free[0, 2] > 0.1
    assert pushed[0, 0] > free[0, 0]
