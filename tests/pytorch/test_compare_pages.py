"""What `vsgd compare` concludes from runs, and the pages it writes."""

from __future__ import annotations

import gzip
import math
import shutil
from pathlib import Path

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
    Bar,
    compared,
    loss_at,
    profiles,
    targets,
    time_to,
    verdict,
)
from vsgd_bench.compare.pages import html, markdown
from vsgd_bench.compare.runs import KEYS, Job, Runs
from vsgd_bench.compare.table import Cell, Table, assemble
from vsgd_bench.compare.train import Run, failed
from vsgd_bench.results import RunFile, packed

ROOT = Path(__file__).parents[2]
OURS = BY_NAME["vsgd"]
TUNED = GRID._replace(name=REFERENCE)
BY_KIND = {(comparison.measure, comparison.axis): comparison for comparison in COMPARISONS}


def falling(end, evaluations=100, outcome="finished", best=None, training=1.0):
    """From 2 to `end` in 100 updates."""
    held_out = [2.0, (2.0 + end) / 2, end]
    spent = [0, evaluations // 2, evaluations]
    losses = (end, end if best is None else best, training)
    return Run([0, 50, 100], spent, [0.0, 1.0, 2.0], held_out, [math.nan, 1.0, 1.0], *losses, outcome)


def table_of(ours, tuned, adam=None, **changes):
    cells = {
        ("small", "vsgd"): Cell(None, False, dict(enumerate(ours))),
        ("small", REFERENCE): Cell(0.1, True, dict(enumerate(tuned))),
    }
    if adam:
        cells["small", "adam-default"] = Cell(None, False, dict(enumerate(adam)))
    whole = Table((SMALL, ABSENT), (OURS, TUNED, ADAM, UNINSTALLED), len(ours), cells, {"absent": "put it there"})
    return whole._replace(**changes)


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        ([1.0, 2.0, 3.0], [1.1, 2.1, 3.1], "better"),  # paired: the spread over seeds does not hide it
        ([1.1, 2.1, 3.1], [1.0, 2.0, 3.0], "worse"),
        ([1.0, 2.0], [1.1, 1.9], "not worse"),
        ([1.0, math.inf], [2.0, 2.0], "worse"),
        ([1.0, 1.0], [2.0, math.inf], "better"),
        ([math.inf, math.inf], [math.inf, math.inf], "not worse"),
        ([1.0], [2.0], "better"),
    ],
)
def test_verdicts_are_about_paired_differences(ours, theirs, word):
    assert verdict(ours, theirs) == word


def test_curves_are_read_at_the_smaller_budget():
    ours, theirs = falling(1.0, evaluations=200), falling(1.2)
    assert loss_at(ours, "evaluations", 100) == 1.5
    table = table_of([ours] * 2, [theirs] * 2)
    assert compared(table, SMALL, REFERENCE, BY_KIND["final", "updates"]) == "better"
    assert compared(table, SMALL, REFERENCE, BY_KIND["final", "evaluations"]) == "worse"
    diverged = falling(math.inf, outcome="diverged")
    assert loss_at(diverged, "updates", 100) == math.inf
    assert loss_at(diverged, "updates", 75) == math.inf
    assert loss_at(diverged, "updates", 0) == 2.0


def test_a_stream_is_not_compared_at_other_budgets_and_a_failure_not_at_all():
    at_end, in_seconds = BY_KIND["final", "updates"], BY_KIND["final", "seconds"]
    cells = {("stream", name): Cell(None, False, {0: falling(1.0)}) for name in ("vsgd", REFERENCE)}
    table = Table((STREAM,), (OURS, TUNED), 1, cells, {})
    assert compared(table, STREAM, REFERENCE, at_end) == "not worse"
    assert compared(table, STREAM, REFERENCE, in_seconds) is None
    assert compared(table_of([falling(1.0)], [failed("so")]), SMALL, REFERENCE, at_end) is None


def test_over_fitting_shows_as_three_verdicts():
    """Ours fits the training rows better and was better on the way, but ends higher."""
    ours = [falling(1.2, best=0.8, training=0.1)] * 2
    table = table_of(ours, [falling(1.0, training=0.5)] * 2)
    said = {measure: compared(table, SMALL, REFERENCE, BY_KIND[measure, "updates"]) for measure, axis in BY_KIND}
    assert said == {"final": "worse", "best": "better", "final_training": "better"}
    text = markdown(table, pages.SMALL)
    assert "| Small digits | vSGD | 1.2 ± 0 | **0.8 ± 0** | **0.1 ± 0** |" in text
    assert "| Small digits | best SGD | **1 ± 0** | 1 ± 0 | 0.5 ± 0 |" in text
    assert "| best SGD | 0 / 0 / 1 | not worse on 80%, better on 50% | no | 1 / 0 / 0 |" in text


def test_a_single_seed_has_no_standard_error():
    text = markdown(table_of([falling(1.2)], [falling(1.0)]), pages.SMALL)
    assert "| Small digits | vSGD | 1.2 |" in text


@pytest.mark.parametrize(
    ("bar", "better", "equal", "met"),
    [
        (Bar(not_worse=0.8), 4, 4, True),
        (Bar(not_worse=0.8), 7, 0, False),
        (Bar(better=0.5), 5, 0, True),
        (Bar(better=0.5), 4, 6, False),
        (Bar(not_worse=0.8, better=0.5), 5, 2, False),
    ],
)
def test_bars_are_shares_of_ten_workloads(bar, better, equal, met):
    counts = {"better": better, "not worse": equal, "worse": 10 - better - equal}
    assert bar.is_met(counts) == met


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


def test_the_time_to_the_target_is_told_if_all_seeds_arrive():
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
            "diverged (1/2) @0.1†",
            "best SGD on Small digits",
            "put it there",
            "Not run: Absent data, Uninstalled.",
            "not worse on 80%, better on 50%",
            "best on the way loss at equal updates",
            "held-out loss at equal gradient evaluations",
            "held-out loss at equal seconds",
            "updates to target",
            "What an update takes",
        ):
            assert phrase in words, phrase
    assert "**0.75 ± 0.05**" in text
    assert "<b>0.75 ± 0.05</b>" in page
    assert "http" not in page
    assert "quick version" not in text


class TestWhatIsMissing:
    """An empty, partial or damaged folder: the pages say what is missing and show the rest."""

    @pytest.fixture
    def folder(self, tmp_path):
        runs = Runs(tmp_path, "suite")
        for seed in range(2):
            runs.save(Job(SMALL, ADAM, None, seed), falling(0.5))
            for setting in GRID.settings:
                runs.save(Job(SMALL, GRID, setting, seed), falling(1.0))
        return tmp_path

    def pages(self, folder, workloads=(SMALL, STREAM), **options):
        table = assemble(workloads, (ADAM, GRID, UNINSTALLED), 2, Runs(folder, "suite"), **options)
        return table, markdown(table, pages.SMALL), html(table, pages.SMALL)

    def keep(self, folder, keys):
        """Of the stored runs, only those of some methods, settings and seeds."""
        path = folder / "suite.jsonl.gz"
        path.write_bytes(packed(r for r in RunFile(path, KEYS) if (r["method"], r["setting"], r["seed"]) in keys))

    def test_a_whole_folder_says_so_of_nothing_but_what_was_never_run(self, folder):
        table, text, _ = self.pages(folder, (SMALL,))
        assert set(table.cells) == {("small", ADAM.name), ("small", GRID.name)}
        assert "| Small digits | Uninstalled | pip install no-such-package |" in text

    def test_nothing_at_all(self, tmp_path):
        for words in self.pages(tmp_path / "nowhere")[1:]:
            assert "What is missing" in words
            assert "not run" in words
        assert "Nothing has been run yet" in words

    def test_parts(self, folder):
        self.keep(folder, {(ADAM.name, None, 0), (GRID.name, 0.001, 0), (GRID.name, 0.1, 1)})
        table, text, _ = self.pages(folder)
        assert not table.cells
        assert f"| Small digits | {ADAM.title} | 1 of 2 seeds |" in text
        assert f"| Small digits | {GRID.title} | 1 of 2 settings of the grid |" in text

    def test_a_damaged_file_gives_a_page_of_its_intact_runs(self, folder, capsys):
        path = folder / "suite.jsonl.gz"
        text = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(text[:-10]))
        table, _, _ = self.pages(folder)
        assert set(table.cells) == {("small", ADAM.name), ("small", GRID.name)}
        assert capsys.readouterr().err.count(f"{path} is damaged") == 1
        lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
        path.write_bytes(gzip.compress(b"".join(line[: 200 + 1000 * (b"adam" in line)] for line in lines)))
        table, text, _ = self.pages(folder)
        assert set(table.cells) == {("small", ADAM.name)}
        assert f"| Small digits | {GRID.title} | not run |" in text
        assert capsys.readouterr().err.count(f"{path} is damaged") == 1

    def test_a_page_says_which_runs_are_of_another_version(self, folder, monkeypatch):
        assert "another version" not in self.pages(folder)[1]
        versions = {"torch": "0.1", "vsgd": "0.1"}
        monkeypatch.setattr("vsgd_bench.compare.runs.version_of", versions.get)
        line = "Runs trained with another version of the source or of a package: all 4."
        assert all(words.count(line) == 1 for words in self.pages(folder)[1:])
        Runs(folder, "suite").save(Job(SMALL, ADAM, None, 0), falling(0.5))
        line = f"another version of the source or of a package: {ADAM.title} (1 of 2), {GRID.title} (2 of 2)."
        assert all(words.count(line) == 1 for words in self.pages(folder)[1:])

    def test_pages_of_stored_runs_need_neither_data_nor_packages(self, tmp_path, monkeypatch):
        monkeypatch.delenv("VSGD_DATA", raising=False)
        runs = Runs(tmp_path, "suite")
        for seed in range(2):
            runs.save(Job(ABSENT, UNINSTALLED, None, seed), falling(0.5))
        table, text, _ = self.pages(tmp_path, (ABSENT,), stored_only=True)
        assert set(table.cells) == {("absent", "uninstalled")}
        assert "VSGD_DATA" not in text
        assert "pip install" not in text

    def test_runs_on_data_that_are_gone_are_shown(self, tmp_path):
        runs = Runs(tmp_path, "suite")
        for seed in range(2):
            runs.save(Job(ABSENT, ADAM, None, seed), falling(0.5))
        table, text, _ = self.pages(tmp_path, (ABSENT,))
        assert set(table.cells) == {("absent", ADAM.name)}
        assert "| Absent data | best SGD | not run; " in text


def test_the_command_writes_both_pages(tmp_path):
    narrow = ("--workloads", "digits-logistic", "--optimizers", "adam-default", "--seeds", "1", "--jobs", "1")
    assert main(["compare", "--quick", *narrow, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "quick" / "results.md").read_text()
    assert "This is the quick version" in text
    assert "vsgd compare --quick --seeds 1" in text
    assert "Digits, MLP" in text
    assert "not run" in text
    assert (tmp_path / "quick" / "index.html").exists()
    assert len(list(RunFile(tmp_path / "quick.jsonl.gz", KEYS))) == 1
    assert (tmp_path / "quick" / "rates.json").read_text() == "{}\n", "no grid was run"
    assert not list(tmp_path.rglob(".*")), "temporary files were left"


def test_the_command_trains_nothing_if_told_so(tmp_path, capsys):
    narrow = ("--workloads", "digits-logistic", "--optimizers", "adam-default", "--seeds", "1", "--jobs", "1")
    assert main(["compare", "--quick", *narrow, "--stored", "--out", str(tmp_path)]) == 0
    assert "Nothing has been run yet" in (tmp_path / "quick" / "index.html").read_text()
    assert not (tmp_path / "quick.jsonl.gz").exists()


def test_absent_data_are_a_line_not_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("VSGD_DATA", raising=False)
    arguments = ("--suite", "large", "--workloads", "adult", "--optimizers", "cocob", "--seeds", "1")
    assert main(["compare", *arguments, "--out", str(tmp_path)]) == 0
    assert "adult is left out: set VSGD_DATA to a folder that holds adult.csv.gz" in capsys.readouterr().out
    text = (tmp_path / "large" / "results.md").read_text()
    assert "set VSGD_DATA to a folder that holds adult.csv.gz" in text
    assert "vsgd compare --suite large --seeds 1" in text
    assert "4 rates from 0.00032 to 0.01" in text


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
        ("large", "large", ["--suite", "large", "--rates", "large/rates.json"]),
        ("unseen", "unseen", ["--suite", "unseen", "--rates", "unseen/rates.json"]),
        ("ablations", "ablations", ["--ablations", "--seeds", "2"]),
        ("stress", "stress", ["--stress", "--seeds", "1"]),
    ],
)
def test_the_tables_of_docs_are_those_of_the_stored_runs(page, suite, arguments, tmp_path, monkeypatch):
    """Whatever version of the source the runs are of, and without any data: `make results` writes these pages."""
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
