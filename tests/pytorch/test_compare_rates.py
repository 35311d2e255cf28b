"""Learning rates that one run of `vsgd compare` chooses and another takes up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from command import refuses, succeeds
from standins import ADAM, BY_NAME, GRID, NORMALIZED, SMALL, STREAM, UNINSTALLED

from vsgd_bench.compare import pages, rates
from vsgd_bench.compare.opponents import HALF_DECADES
from vsgd_bench.compare.pages import html, markdown
from vsgd_bench.compare.rates import GivenRates
from vsgd_bench.compare.runs import KEYS, Job, Runs, setting_name
from vsgd_bench.compare.suites import quick
from vsgd_bench.compare.table import assemble, compute
from vsgd_bench.compare.train import Run
from vsgd_bench.results import RunFile

NARROW = ("--quick", "--workloads", "digits-logistic", "--seeds", "1", "--jobs", "1")
EARLIER = GivenRates(Path("earlier/rates.json"), {("small", "sgd"): 0.001})


def ending_at(loss):
    return Run([0, 100], [0, 100], [0.0, 1.0], [2.0, loss], [math.nan, 1.0], loss, loss, loss)


def save_grid(runs, workload, method, best):
    """A whole grid on the first seed."""
    for setting in method.settings:
        runs.save(Job(workload, method, setting, 0), ending_at(0.5 if setting == best else 1.0))


def stored_in(out, suite="suite"):
    """The workload, method, setting and seed of every stored run."""
    records = RunFile(out / f"{suite}.jsonl.gz", KEYS)
    return {(r["workload"], r["method"], setting_name(r["setting"]), r["seed"]) for r in records}


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path, "suite")


def test_the_best_of_every_whole_grid_is_kept(runs):
    save_grid(runs, SMALL, GRID, 0.1)
    runs.save(Job(STREAM, GRID, 0.1, 0), ending_at(0.5))
    runs.save(Job(SMALL, ADAM, None, 0), ending_at(0.5))
    for seeds in (1, 2):
        table = assemble((SMALL, STREAM), (ADAM, GRID, UNINSTALLED), seeds, runs)
        assert json.loads(rates.text_of(table.rates)) == {"small": {"sgd": 0.1}}
    assert ("small", "sgd") in table.missing, "other seeds may be missing still"


def test_a_rate_is_known_by_two_digits(tmp_path):
    sgd = BY_NAME["sgd"]
    for rate in (HALF_DECADES[1], 0.00032, 0.000316):
        file = tmp_path / "rates.json"
        file.write_text(json.dumps({"small": {"sgd": rate}}))
        assert rates.read(file, [SMALL, STREAM], [ADAM, sgd]).rates == {("small", "sgd"): HALF_DECADES[1]}
    file.write_text('{"small": {"sgd": 1}}')
    assert rates.read(file, [SMALL], [sgd]).rates == {("small", "sgd"): 1.0}


def test_given_rates_run_on_all_seeds_and_nothing_else_of_a_grid(tmp_path, runs):
    workloads, methods = (SMALL, NORMALIZED), (GRID, ADAM)
    compute(workloads, methods, seeds=2, processes=1, runs=runs, given=EARLIER)
    expected = {(w.name, "adam-default", "default", seed) for w in workloads for seed in (0, 1)}
    assert stored_in(tmp_path) == expected | {("small", "sgd", "0.001", seed) for seed in (0, 1)}

    table = assemble(workloads, methods, 2, runs, EARLIER)
    assert table.cells["small", "sgd"].setting == 0.001
    assert set(table.cells["small", "sgd"].runs) == {0, 1}
    assert table.missing == {("normalized", "sgd"): "no rate in rates.json"}


def test_the_ends_are_those_of_the_grid(runs):
    for seed in range(2):
        runs.save(Job(SMALL, GRID, 0.001, seed), ending_at(0.5))
    wider = GRID._replace(settings=(0.0001, 0.001, 0.1))
    for method, at_edge in ((GRID, True), (wider, False)):
        assert assemble([SMALL], [method], 2, runs, EARLIER).cells["small", "sgd"].at_edge == at_edge


def test_given_rates_are_written_on_even_of_what_is_not_installed(runs):
    absent = UNINSTALLED._replace(settings=(0.1, 1.0))
    given = EARLIER._replace(rates={**EARLIER.rates, ("stream", "uninstalled"): 0.1})
    table = assemble([SMALL, STREAM], [GRID, absent], 1, runs, given)
    assert json.loads(rates.text_of(table.rates)) == {"small": {"sgd": 0.001}, "stream": {"uninstalled": 0.1}}


def test_pages_say_where_rates_come_from(runs):
    anew = assemble([SMALL], [GRID], 2, runs)
    for words in (markdown(anew, pages.LARGE), html(anew, pages.LARGE)):
        assert "Grids are tuned on the first seed" in words
        assert "--rates" not in words
    given = assemble([SMALL, STREAM], [GRID], 2, runs, EARLIER)
    text, page = markdown(given, pages.LARGE), html(given, pages.LARGE)
    for words in (text, page):
        assert "vsgd compare --suite large --seeds 2 --rates earlier/rates.json" in words
        assert "were chosen in an earlier comparison" in words
        assert "Grids are tuned" not in words
    assert "are in `rates.json`; without `--rates` they are chosen anew" in text
    assert "are in <code>rates.json</code>" in page
    assert "| A stream | all | no rate in rates.json |" in text


def test_any_file_name_can_be_shown(runs):
    odd = EARLIER._replace(file=Path("my rates\udcff\n.json"))
    text = markdown(assemble([SMALL, STREAM], [GRID], 2, runs, odd), pages.SMALL)
    assert "--rates 'my rates\\udcff\\n.json'" in text
    assert "no rate in my rates\\udcff\\n.json |" in text.encode().decode()


def test_one_command_takes_up_what_another_chose(tmp_path):
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    (logistic,) = (workload for workload in quick().workloads if workload.name == "digits-logistic")
    best = HALF_DECADES[5]
    save_grid(Runs(earlier, "quick"), logistic, BY_NAME["sgd"], best)
    out = succeeds("compare", *NARROW, "--optimizers", "sgd", "--out", earlier)
    file = earlier / "quick" / "rates.json"
    assert str(file) in out
    assert json.loads(file.read_text()) == {"digits-logistic": {"sgd": best}}

    methods = "sgd,adamw-cosine,adam-default"
    succeeds("compare", *NARROW, "--optimizers", methods, "--rates", file, "--out", later)
    assert stored_in(later, "quick") == {
        ("digits-logistic", "sgd", "0.032", 0),
        ("digits-logistic", "adam-default", "default", 0),
    }
    assert (later / "quick" / "rates.json").read_text() == file.read_text()
    text = (later / "quick" / "results.md").read_text()
    assert f"Written by `vsgd compare --quick --seeds 1 --rates {file}`" in text
    assert " @0.032" in text
    assert "best AdamW + cosine | no rate in rates.json |" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot read"]),
        (b"", ["is not JSON with a learning rate by workload and optimizer"]),
        (b"{", ["is not JSON"]),
        (b"\xff\x00", ["is not JSON"]),
        (b"[" * 100_000, ["is not JSON"]),
        (b"[]", ["is not JSON"]),
        (b'{"digits-mlp": 0.1}', ["is not JSON"]),
        (b'{"digits-mlp": {"sgd": "0.1"}}', ["is not JSON"]),
        (b'{"digits-mlp": {"sgd": true}}', ["is not JSON"]),
        (b'{"digits-mlp": {"sgd": null}}', ["is not JSON"]),
        (b'{"gpt": {"adamw-cosine": 0.001}}', ["'gpt' as a workload", "digits-mlp"]),
        (b'{"digits-mlp": {"lion": 0.1}}', ["'lion' as an optimizer with a grid", "sgd, adamw-cosine"]),
        (b'{"digits-mlp": {"vsgd": 0.1}}', ["'vsgd' as an optimizer with a grid"]),
        (b'{"digits-mlp": {"sgd": 0.05}}', ["'0.05' as the rate of sgd on digits-mlp", "0.032, 0.1, 0.32"]),
        (b'{"digits-mlp": {"sgd": NaN}}', ["'nan' as the rate"]),
        (b'{"digits-mlp": {"sgd": 1' + b"0" * 400 + b"}}", ["'inf' as the rate"]),
    ],
)
def test_a_file_that_does_not_fit_is_one_clear_line(content, words, tmp_path):
    file, out = tmp_path / "rates.json", tmp_path / "out"
    if content is not None:
        file.write_bytes(content)
    said = refuses("compare", "--quick", "--rates", file, "--out", out)
    assert all(word in said for word in (*words, str(file), "leave --rates out"))
    assert not out.exists(), "nothing is written"


@pytest.mark.parametrize("flag", ["--ablations", "--stress"])
def test_without_grids_there_is_nothing_to_give(flag, tmp_path):
    file, out = tmp_path / "rates.json", tmp_path / "out"
    file.write_text("{}")
    refuses("compare", flag, "--rates", file, "--out", out, saying=f"so --rates {file} has no use. Leave it out.")
    assert not out.exists()
