"""The large suite of `vsgd compare`, on stand-ins for its data."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

import standins  # noqa: E402
from standins import ADAM, FINE_TUNED, SMALL  # noqa: E402

from vsgd.errors import UserError  # noqa: E402
from vsgd_bench.compare import data, table  # noqa: E402
from vsgd_bench.compare.checkpoints import load_weights, save_weights  # noqa: E402
from vsgd_bench.compare.compute import compute  # noqa: E402
from vsgd_bench.compare.large import LARGE_WORKLOADS, PADDING, add_noise, augment  # noqa: E402
from vsgd_bench.compare.large_networks import GPT, add_adapters  # noqa: E402
from vsgd_bench.compare.methods import Setting  # noqa: E402
from vsgd_bench.compare.muon import split_parameters  # noqa: E402
from vsgd_bench.compare.networks import mlp  # noqa: E402
from vsgd_bench.compare.pretraining import with_checkpoint  # noqa: E402
from vsgd_bench.compare.runs import KEYS, Job, Runs, provenance  # noqa: E402
from vsgd_bench.compare.suites import LARGE  # noqa: E402
from vsgd_bench.compare.train import Learner, minibatch, train  # noqa: E402
from vsgd_bench.results import RunFile  # noqa: E402

BY_NAME = {workload.name: workload for workload in LARGE_WORKLOADS}


def clear_caches():
    for function in vars(data).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.fixture
def stand_in_data(tmp_path, monkeypatch):
    standins.write_data(tmp_path)
    monkeypatch.setenv("VSGD_DATA", str(tmp_path))
    clear_caches()
    yield
    clear_caches()


@pytest.mark.parametrize("workload", LARGE_WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_learns_from_two_minibatches(workload, stand_in_data):
    learner = Learner(workload, ADAM, Setting(), seed=0)
    split, model = learner.task.split, learner.task.model
    assert table.why_absent(workload) is None
    before = {name: value.clone() for name, value in model.named_parameters()}
    rows = torch.arange(4)
    losses = [float(learner.update(rows)) for _ in range(2)]
    assert all(math.isfinite(loss) for loss in (*losses, learner.judge(split.x_test[:4], split.y_test[:4])))
    changed = {name for name, value in model.named_parameters() if (value != before[name]).any()}
    assert changed
    assert changed <= {name for name, value in model.named_parameters() if value.requires_grad}
    parts = split_parameters(model)
    assert len({*parts.hidden, *parts.other}) == len(parts.hidden) + len(parts.other)
    assert {*parts.hidden, *parts.other} == {p for p in model.parameters() if p.requires_grad}
    assert parts.hidden


def test_a_gpt_has_a_million_weights_and_its_adapters_a_tenth():
    gpt = GPT(84, 64)
    assert 1e6 < sum(p.numel() for p in gpt.parameters()) < 3e6
    codes = torch.randint(84, (2, 64))
    before = gpt(codes)
    adapted = add_adapters(gpt)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trained)
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) < 1e5
    assert torch.allclose(adapted(codes), before, atol=1e-6), "adapters start as nothing"


def test_augmented_images_are_moved_and_mirrored():
    images = torch.zeros(64, 1, 28, 28)
    images[:, :, 10, 10] = 1
    moved, labels = augment(images, torch.arange(64), torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    assert torch.equal(labels, torch.arange(64))
    places = moved.nonzero()
    assert len(places) == 64
    assert set(places[:, 2].tolist()) == set(range(10 - PADDING, 10 + PADDING + 1))
    here, mirrored = range(10 - PADDING, 10 + PADDING + 1), range(17 - PADDING, 17 + PADDING + 1)
    assert set(places[:, 3].tolist()) == {*here, *mirrored}


def test_noise_can_be_taken_out_again():
    images = torch.rand(16, 1, 28, 28)
    (noisy, level), noise = (both := add_noise(images, images, torch.Generator().manual_seed(0)))[0].unbind(1), both[1]
    restored = (noisy - level * noise.squeeze(1)) / (1 - level.square()).sqrt()
    assert torch.allclose((restored + 1) / 2, images.squeeze(1), atol=1e-3)


def test_every_optimizer_sees_the_same_noise(stand_in_data):
    first, second = (Learner(BY_NAME["denoiser"], ADAM, Setting(), seed=0) for _ in range(2))
    first.judge(first.task.split.x_test[:4], first.task.split.y_test[:4])
    drawn = [minibatch(learner.task, torch.arange(4), learner.rng)[1] for learner in (first, second, second)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


def test_the_methods_of_the_suite():
    assert [(m.name, len(m.rates), len(m.decays)) for m in LARGE.methods] == [
        ("vsgd", 0, 0),
        ("adamw-cosine", 5, 4),
        ("soap-cosine", 5, 4),
        ("muon-cosine", 5, 4),
        ("schedulefree-adamw-warmup", 0, 0),
        ("prodigy-cosine", 0, 0),
        ("cocob", 0, 0),
    ]


def test_a_checkpoint_is_trained_once_and_started_from(tmp_path, capsys):
    prepared = with_checkpoint(tmp_path, FINE_TUNED)
    assert capsys.readouterr().out == "training pretraining, from which fine-tuned starts\n"
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert set(written) == {"pretraining.npz", "pretraining.json"}
    assert with_checkpoint(tmp_path, FINE_TUNED) == prepared
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert (
        train(prepared, ADAM, Setting(), seed=1).held_out[0] < train(SMALL, ADAM, Setting(), seed=1).held_out[0] - 0.2
    )
    assert with_checkpoint(tmp_path, SMALL) == SMALL


def test_another_checkpoint_makes_other_runs(tmp_path):
    longer = FINE_TUNED._replace(pretraining=FINE_TUNED.pretraining._replace(epochs=6))
    records = [provenance(Job(workload, ADAM, Setting(), 0)) for workload in (SMALL, FINE_TUNED, longer)]
    assert "checkpoint" not in records[0]
    assert records[1]["checkpoint"] != records[2]["checkpoint"]
    moved = FINE_TUNED._replace(checkpoint=tmp_path)
    assert provenance(Job(moved, ADAM, Setting(), 0)) == records[1], "where it is stored does not matter"


def test_weights_of_another_model_are_refused(tmp_path):
    save_weights(tmp_path / "weights", mlp(4, 3), {})
    with pytest.raises(UserError, match="is that of another model"):
        load_weights(tmp_path / "weights", mlp(4, 3, 2))
    with pytest.raises(UserError, match="there is no checkpoint"):
        load_weights(tmp_path / "nowhere", mlp(4, 3))


def test_suite_continues_after_an_interruption(tmp_path, monkeypatch):
    def save_and_stop(runs, job, run):
        save(runs, job, run)
        if job.seed == 1:
            raise KeyboardInterrupt

    save = Runs.save
    monkeypatch.setattr(Runs, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        compute([FINE_TUNED], [ADAM], seeds=3, processes=1, runs=Runs(tmp_path, "suite"))
    monkeypatch.undo()
    before = {record["seed"]: record for record in RunFile(tmp_path / "suite.jsonl.gz", KEYS)}
    assert set(before) == {0, 1}
    checkpoint = tmp_path / "suite" / "checkpoints" / "pretraining.npz"
    written = checkpoint.stat().st_mtime_ns
    compute([FINE_TUNED], [ADAM], seeds=3, processes=1, runs=Runs(tmp_path, "suite"))
    after = {record["seed"]: record for record in RunFile(tmp_path / "suite.jsonl.gz", KEYS)}
    assert all(after[seed]["seconds"] == before[seed]["seconds"] for seed in before)
    assert checkpoint.stat().st_mtime_ns == written
    assert after[2]["outcome"] == "finished"
