"""Comparisons of runs by `vsgd compare`, and its pages."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from standins import ABSENT, ADAM, BY_NAME, GRID, SMALL, STREAM, UNINSTALLED

from vsgd.cli import main
from vsgd_bench.compare import pages, tables
from vsgd_bench.compare.judging import (
    COMPARISONS,
    REFERENCE,
    Difference,
    Goal,
    compared,
    difference,
    effect,
    goal_of,
    loss_at,
    profiles,
    target_ratios,
    targets,
    time_to,
)
from vsgd_bench.compare.methods import Setting
from vsgd_bench.compare.pages import html, markdown
from vsgd_bench.compare.runs import KEYS, Job, Runs
from vsgd_bench.compare.table import Cell, Table, assemble
from vsgd_bench.compare.train import Run, failed
from vsgd_bench.results import RunFile, packed

ROOT = Path(__file__).parents[2]
OURS = BY_NAME["vsgd"]
TUNED = GRID._replace(name=REFERENCE, title="SGD, tuned")
DEFAULT = Setting()
BY_KIND = {(comparison.measure, comparison.axis): comparison for comparison in COMPARISONS}


def falling(end, evaluations=100, outcome="finished", best=None, training=1.0):
    """Return a run from 2 to `end` in 100 updates."""
    held_out = [2.0, (2.0 + end) / 2, end]
    spent = [0, evaluations // 2, evaluations]
    losses = (end, end if best is None else best, training)
    return Run([0, 50, 100], spent, [0.0, 1.0, 2.0], held_out, [math.nan, 1.0, 1.0], *losses, outcome)


def table_of(ours, tuned, adam=None, **changes):
    cells = {
        ("small", "vsgd"): Cell(DEFAULT, dict(enumerate(ours))),
        ("small", REFERENCE): Cell(Setting(0.1), dict(enumerate(tuned))),
    }
    if adam:
        cells["small", "adam-default"] = Cell(DEFAULT, dict(enumerate(adam)))
    whole = Table((SMALL, ABSENT), (OURS, TUNED, ADAM, UNINSTALLED), len(ours), cells, {"absent": "put it there"})
    return whole._replace(**changes)


@pytest.mark.parametrize(
    ("ours", "theirs", "sign", "ratio"),
    [
        ([1.0, 2.0, 3.0], [1.1, 2.2, 3.3], "better", 1 / 1.1),  # paired: the spread over seeds does not hide it
        ([1.1, 2.2, 3.3], [1.0, 2.0, 3.0], "worse", 1.1),
        ([1.0, 1.0, 1.0], [1.1, 1.2, 1.3], "not worse", (1 / 1.1 / 1.2 / 1.3) ** (1 / 3)),  # beyond a standard error
        ([1.0] * 5, [1.1, 1.2, 1.3, 1.2, 1.2], "better", (1 / 1.1 / 1.2**3 / 1.3) ** (1 / 5)),
        ([1.0, 2.0], [1.1, 1.9], "not worse", (2 / 1.1 / 1.9) ** 0.5),
        ([1.0, math.inf], [2.0, 2.0], "worse", (10 / 2) ** 0.5),
        ([1.0, 1.0], [2.0, math.inf], "better", (0.1 / 2) ** 0.5),
        ([math.inf, math.inf], [math.inf, math.inf], "not worse", 1.0),
        ([1.0], [2.0], "better", 0.5),
    ],
)
def test_signs_come_from_paired_t_intervals(ours, theirs, sign, ratio):
    assert difference(ours, theirs) == (sign, pytest.approx(ratio))


def test_signs_agree_with_the_interval_of_scipy():
    from scipy import stats

    rng = np.random.default_rng(0)
    for shift in np.linspace(-0.6, 0.6, 41):
        ours, theirs = np.exp(rng.normal(shift, 0.25, 4)), np.exp(rng.normal(0, 0.25, 4))
        low, high = stats.ttest_rel(np.log(ours), np.log(theirs)).confidence_interval(0.95)
        expected = "better" if high < 0 else "worse" if low > 0 else "not worse"
        assert difference(ours.tolist(), theirs.tolist()).sign == expected


def test_an_effect_is_a_geometric_mean_with_an_interval_over_workloads():
    mean, low, high = effect([0.5, 2.0, 1.0, 1.0])
    assert mean == pytest.approx(1.0)
    assert low == pytest.approx(1 / high, rel=0.05)
    assert 0.5 < low < 0.9
    assert str(effect([0.5, 0.5])) == "0.50 [0.50, 0.50]"
    assert str(effect([])) == ""


def test_curves_are_read_at_the_smaller_budget():
    ours, theirs = falling(1.0, evaluations=200), falling(1.2)
    assert loss_at(ours, "evaluations", 100) == 1.5
    table = table_of([ours] * 2, [theirs] * 2)
    assert compared(table, SMALL, REFERENCE, BY_KIND["final", "updates"]).sign == "better"
    assert compared(table, SMALL, REFERENCE, BY_KIND["final", "evaluations"]).sign == "worse"
    diverged = falling(math.inf, outcome="diverged")
    assert loss_at(diverged, "updates", 100) == math.inf
    assert loss_at(diverged, "updates", 75) == math.inf
    assert loss_at(diverged, "updates", 0) == 2.0


def test_a_stream_is_not_compared_at_other_budgets_and_a_failure_not_at_all():
    at_end, in_seconds = BY_KIND["final", "updates"], BY_KIND["final", "seconds"]
    cells = {("stream", name): Cell(DEFAULT, {0: falling(1.0)}) for name in ("vsgd", REFERENCE)}
    table = Table((STREAM,), (OURS, TUNED), 1, cells, {})
    assert compared(table, STREAM, REFERENCE, at_end) == ("not worse", 1.0)
    assert compared(table, STREAM, REFERENCE, in_seconds) is None
    assert compared(table_of([falling(1.0)], [failed("so")]), SMALL, REFERENCE, at_end) is None


def test_overfitting_shows_as_three_signs():
    """vSGD has a lower training loss and a lower best loss, but a higher final loss."""
    ours = [falling(1.2, best=0.8, training=0.1)] * 2
    table = table_of(ours, [falling(1.0, training=0.5)] * 2)
    signs = {kind: compared(table, SMALL, REFERENCE, BY_KIND[kind, "updates"]).sign for kind, _ in BY_KIND}
    assert signs == {"final": "worse", "best": "better", "final_training": "better"}
    text = markdown(table, pages.SMALL)
    assert "| Small digits | vSGD | 1.2 ± 0 | **0.8 ± 0** | **0.1 ± 0** |" in text
    assert "| Small digits | SGD, tuned | **1 ± 0** | 1 ± 0 | 0.5 ± 0 |" in text
    assert "| SGD, tuned | 1 | 0 / 0 / 1 | 1.20 [1.20, 1.20] | 1 / 0 / 0 | 0.80 [0.80, 0.80] | 1 / 0 / 0 |" in text
    assert "final not worse on 85%: **missed**" in text


def test_failures_come_first():
    table = table_of([falling(1.2)] * 2, [falling(1.0)] * 2, [falling(0.8)] * 2)
    for words in (markdown(table, pages.SMALL), html(table, pages.SMALL)):
        assert words.index("Where vSGD is worse") < words.index("vSGD against each") < words.index("Final losses")
        assert words.index("Where vSGD is worse") < words.index("How it was measured")
    assert "| Small digits | Adam 1e-3 (1.5); SGD, tuned (1.2) |" in markdown(table, pages.SMALL)
    assert tables.failures(table_of([falling(0.5)] * 2, [falling(1.0)] * 2)).rows == []


def test_updates_to_target_are_compared_if_one_of_two_arrives():
    table = table_of([falling(0.5)], [falling(1.0)], [falling(1.5)])
    assert target_ratios(table, REFERENCE, "updates") == [pytest.approx(0.98 / 1.5 / 0.98)]
    assert target_ratios(table, "adam-default", "updates") == [pytest.approx(0.1)], "a miss is infinite, and limited"
    assert target_ratios(table_of([falling(1.5)], [falling(1.0)], [falling(1.5)]), "adam-default", "updates") == []


def test_a_single_seed_has_no_standard_error():
    text = markdown(table_of([falling(1.2)], [falling(1.0)]), pages.SMALL)
    assert "| Small digits | vSGD | 1.2 |" in text


@pytest.mark.parametrize(
    ("goal", "better", "equal", "reached"),
    [
        (Goal(not_worse=0.8), 4, 4, True),
        (Goal(not_worse=0.8), 7, 0, False),
        (Goal(better=0.5), 5, 0, True),
        (Goal(better=0.5), 4, 6, False),
        (Goal(not_worse=0.8, better=0.5), 5, 2, False),
        (Goal(ratio_below=1.0), 6, 0, True),
        (Goal(ratio_below=1.0), 5, 0, False),
    ],
)
def test_goals_are_shares_of_ten_workloads_or_mean_ratios(goal, better, equal, reached):
    counts = {"better": (better, 0.5), "not worse": (equal, 1.0), "worse": (10 - better - equal, 2.0)}
    found = [Difference(sign, ratio) for sign, (count, ratio) in counts.items() for _ in range(count)]
    assert goal.is_reached(found) == reached


def test_goals_are_those_of_the_protocol():
    final, best, training = (BY_KIND[kind, "updates"] for kind in ("final", "best", "final_training"))
    tuned = BY_NAME["soap-cosine"]
    assert goal_of(tuned, final) == Goal(not_worse=0.75)
    assert goal_of(tuned, training) == Goal(better=0.6)
    assert goal_of(tuned, best) is None
    assert goal_of(tuned._replace(name="soap-cosine/default"), final) == Goal(ratio_below=1.0)
    assert goal_of(tuned._replace(name="soap-cosine/single"), final) is None
    assert goal_of(BY_NAME["prodigy"], final) == Goal(ratio_below=1.0)


def test_profiles_count_a_miss_as_infinite():
    table = table_of([falling(0.5)], [falling(1.0)], [falling(1.5)])
    assert targets(table, SMALL) == {0: pytest.approx(1.02)}
    assert targets(table, ABSENT) == {}
    assert time_to(falling(1.0), 1.5, "updates", online=False) == 50
    assert time_to(falling(1.0), 1.5, "seconds", online=True) == 2.0
    ratios = profiles(table, "updates")
    assert ratios["vsgd"] == [1.0]
    assert 1.0 < ratios[REFERENCE][0] < 2.0
    assert ratios["adam-default"] == [math.inf]


def test_time_to_target_is_shown_if_all_seeds_reach_it():
    table = table_of([falling(0.5), falling(1.5)], [falling(1.0)] * 2, [falling(1.9)] * 2)
    rows = [line.split(" | ")[-3:] for line in markdown(table, pages.SMALL).splitlines() if "| Small digits |" in line]
    ours, tuned, adam = rows[1:4]
    assert ours == ["1 of 2 seeds", "1 of 2 seeds", "1 of 2 seeds |"]
    assert tuned == ["98", "98", "1.96 |"]
    assert adam == ["never", "never", "never |"]


def test_what_an_update_takes_is_a_mean_over_seeds():
    table = table_of([falling(1.0, 110), falling(1.0, 120)], [falling(1.0), failed("broken")])
    grid = tables.costs(table)
    assert grid.rows[0] == ["Small digits", "1.15, 20 ms", "1.00, 20 ms", "not run", "not run"]
    assert tables.costs(table_of([failed("broken")], [falling(1.0)])).rows[0][1] == "failed"


def test_pages_say_what_a_stranger_needs():
    table = table_of([falling(1.0), falling(1.1)], [falling(0.5), falling(math.inf)], [falling(0.7), falling(0.8)])
    text, page = markdown(table, pages.SMALL), html(table, pages.SMALL)
    for words in (text, page):
        for phrase in (
            "vsgd compare --seeds 2",
            "2 seeds; vsgd",
            "1.05 ± 0.05",
            "diverged (1/2) @0.1",
            "Where vSGD is worse",
            "put it there",
            "Not run: Absent data, Uninstalled.",
            "not worse on 85%",
            "best loss at equal updates",
            "final loss at equal gradient evaluations",
            "final loss at equal seconds",
            "updates to target",
            "Cost of an update",
        ):
            assert phrase in words, phrase
    assert "**0.75 ± 0.05**" in text
    assert "<b>0.75 ± 0.05</b>" in page
    assert "http" not in page
    assert "quick version" not in text


class TestWhatIsMissing:
    """With an empty, partial or damaged folder, the pages name missing runs and show the others."""

    ALL = frozenset(
        {("small", name) for name in (ADAM.name, *(f"{GRID.name}{end}" for end in ("", "/single", "/default")))}
    )

    @pytest.fixture
    def folder(self, tmp_path):
        runs = Runs(tmp_path, "suite")
        for seed in range(2):
            runs.save(Job(SMALL, ADAM, DEFAULT, seed), falling(0.5))
            for rate in (GRID.default.rate, *GRID.rates):
                end = 0.9 if rate == GRID.rates[1] else 1.0
                runs.save(Job(SMALL, GRID, Setting(rate), seed), falling(end))
        return tmp_path

    def pages(self, folder, workloads=(SMALL, STREAM), **options):
        table = assemble(workloads, (ADAM, GRID, UNINSTALLED), 2, Runs(folder, "suite"), **options)
        return table, markdown(table, pages.SMALL), html(table, pages.SMALL)

    def keep(self, folder, keys):
        """Return a folder with the stored runs of some methods, settings and seeds."""
        path = folder / "suite.jsonl.gz"
        path.write_bytes(packed(r for r in RunFile(path, KEYS) if (r["method"], r["rate"], r["seed"]) in keys))

    def test_complete_folder_reports_only_runs_that_never_ran(self, folder):
        table, text, _ = self.pages(folder, (SMALL,))
        assert set(table.cells) == self.ALL
        assert "| Small digits | Uninstalled | pip install no-such-package |" in text

    def test_nothing_at_all(self, tmp_path):
        for words in self.pages(tmp_path / "nowhere")[1:]:
            assert "What is missing" in words
            assert "not run" in words
        assert "There are no runs yet" in words

    def test_parts(self, folder):
        self.keep(folder, {(ADAM.name, None, 0), (GRID.name, 0.001, 0), (GRID.name, 0.1, 0)})
        table, text, _ = self.pages(folder)
        assert not table.cells
        assert f"| Small digits | {ADAM.title}, {GRID.title}, default | 1 of 2 seeds |" in text
        assert f"| Small digits | {GRID.title}, tuned | search of its tuned setting not finished |" in text

    def test_a_damaged_file_gives_a_page_of_its_intact_runs(self, folder, capsys):
        path = folder / "suite.jsonl.gz"
        text = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(text[:-10]))
        table, _, _ = self.pages(folder)
        assert table.cells.keys() == self.ALL - {("small", f"{GRID.name}/single")}
        assert capsys.readouterr().err.count(f"{path} is damaged") == 1
        lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
        path.write_bytes(gzip.compress(b"".join(line[: 200 + 1000 * (b"adam" in line)] for line in lines)))
        table, text, _ = self.pages(folder)
        assert set(table.cells) == {("small", ADAM.name)}
        assert f"| Small digits | {GRID.title}, default | not run |" in text
        assert capsys.readouterr().err.count(f"{path} is damaged") == 1

    def test_a_page_says_which_runs_are_of_another_version(self, folder, monkeypatch):
        assert "another version" not in self.pages(folder)[1]
        versions = {"torch": "0.1", "vsgd": "0.1"}
        monkeypatch.setattr("vsgd_bench.compare.runs.version_of", versions.get)
        line = "Runs trained with another version of the source or of a package: all 6."
        assert all(words.count(line) == 1 for words in self.pages(folder)[1:])
        Runs(folder, "suite").save(Job(SMALL, ADAM, DEFAULT, 0), falling(0.5))
        line = f"another version of the source or of a package: {ADAM.title} (1 of 2), {GRID.title}, tuned (2 of 2), "
        line += f"{GRID.title}, default (2 of 2)."
        assert all(words.count(line) == 1 for words in self.pages(folder)[1:])

    def test_pages_of_stored_runs_need_neither_data_nor_packages(self, tmp_path, monkeypatch):
        monkeypatch.delenv("VSGD_DATA", raising=False)
        runs = Runs(tmp_path, "suite")
        for seed in range(2):
            runs.save(Job(ABSENT, UNINSTALLED, DEFAULT, seed), falling(0.5))
        table, text, _ = self.pages(tmp_path, (ABSENT,), stored_only=True)
        assert set(table.cells) == {("absent", "uninstalled")}
        assert "VSGD_DATA" not in text
        assert "pip install" not in text

    def test_runs_on_data_that_are_gone_are_shown(self, tmp_path):
        runs = Runs(tmp_path, "suite")
        for seed in range(2):
            runs.save(Job(ABSENT, ADAM, DEFAULT, seed), falling(0.5))
        table, text, _ = self.pages(tmp_path, (ABSENT,))
        assert set(table.cells) == {("absent", ADAM.name)}
        assert "| Absent data | SGD, default | not run; " in text


def rates_in(folder):
    return json.loads((folder / "rates.json").read_text())


def test_the_command_writes_both_pages(tmp_path):
    narrow = ("--workloads", "digits-logistic", "--optimizers", "prodigy", "--seeds", "1", "--jobs", "1")
    assert main(["compare", "--quick", *narrow, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "quick" / "results.md").read_text()
    assert "This is the quick version" in text
    assert "vsgd compare --quick --seeds 1" in text
    assert "Digits, MLP" in text
    assert "not run" in text
    assert (tmp_path / "quick" / "index.html").exists()
    assert len(list(RunFile(tmp_path / "quick.jsonl.gz", KEYS))) == 1
    assert rates_in(tmp_path / "quick") == {"suite": "quick", "tuned": {}, "single": {}}, "no grid was run"
    assert not list(tmp_path.rglob(".*")), "temporary files were left"


def test_stored_writes_pages_without_training(tmp_path, capsys):
    narrow = ("--workloads", "digits-logistic", "--optimizers", "prodigy", "--seeds", "1", "--jobs", "1")
    assert main(["compare", "--quick", *narrow, "--stored", "--out", str(tmp_path)]) == 0
    assert "There are no runs yet" in (tmp_path / "quick" / "index.html").read_text()
    assert not (tmp_path / "quick.jsonl.gz").exists()


def test_absent_data_are_a_line_not_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("VSGD_DATA", raising=False)
    arguments = ("--suite", "large", "--workloads", "adult", "--optimizers", "cocob", "--seeds", "1")
    assert main(["compare", *arguments, "--out", str(tmp_path)]) == 0
    assert "adult is left out: set VSGD_DATA to a folder that holds adult.csv.gz" in capsys.readouterr().out
    text = (tmp_path / "large" / "results.md").read_text()
    assert "set VSGD_DATA to a folder that holds adult.csv.gz" in text
    assert "vsgd compare --suite large --seeds 1" in text
    assert "rates from 0.00032 to 0.032, and beyond; weight decay 0, 0.01, 0.1, 1" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workloads", "imagenet"), ["imagenet", "digits-mlp"]),
        (("--optimizers", "lion"), ["lion", "prodigy"]),
        (("--suite", "large", "--workloads", "digits-mlp"), ["digits-mlp", "gpt"]),
        (("--suite", "large", "--optimizers", "sgd"), ["sgd", "cocob"]),
    ],
)
def test_bad_input_is_one_clear_line(arguments, words, tmp_path, capsys):
    assert main(["compare", *arguments, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1, said
    assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("page", "suite", "arguments"),
    [
        ("networks", "small", ["--rates", "small/rates.json"]),
        ("large", "large", ["--suite", "large", "--seeds", "3", "--rates", "large/rates.json"]),
        ("unseen", "unseen", ["--suite", "unseen", "--rates", "unseen/rates.json"]),
        ("science", "science", ["--suite", "science", "--seeds", "3"]),
        ("ablations", "ablations", ["--ablations", "--seeds", "2"]),
        ("sensitivity", "sensitivity", ["--sensitivity", "--seeds", "2"]),
        ("stress", "stress", ["--stress", "--seeds", "1"]),
    ],
)
def test_the_tables_of_docs_are_those_of_the_stored_runs(page, suite, arguments, tmp_path, monkeypatch):
    """`make results` writes these pages from runs of any version of the source, without data."""
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VSGD_DATA", raising=False)
    assert main(["compare", *arguments, "--stored", "--out", "."]) == 0
    written, committed = (
        [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        for path in (tmp_path / suite / "results.md", ROOT / "docs" / f"results-{page}.md")
    )
    assert len(written) > 10
    assert written == committed
