"""Learning rates that one call of `vsgd compare` chooses and another reads."""

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
from vsgd_bench.compare.compute import compute
from vsgd_bench.compare.methods import DECAYS, RATES, Setting
from vsgd_bench.compare.pages import html, markdown
from vsgd_bench.compare.progress import Progress, duration
from vsgd_bench.compare.rates import Chosen
from vsgd_bench.compare.runs import KEYS, Job, Runs
from vsgd_bench.compare.search import best_single, grow, log_ratio, search
from vsgd_bench.compare.suites import quick
from vsgd_bench.compare.table import assemble
from vsgd_bench.compare.train import Run
from vsgd_bench.results import RunFile

NARROW = ("--quick", "--workloads", "digits-logistic", "--seeds", "1", "--jobs", "1")
EARLIER = Chosen({("small", "sgd"): Setting(RATES[6])}, {}, Path("earlier/rates.json"))
ADAMW = BY_NAME["adamw-cosine"]


class Landscape:
    """Losses by setting, and the settings that were requested."""

    def __init__(self, loss):
        self.loss, self.run = loss, {}

    def __call__(self, setting):
        return self.run.get(setting)

    def finish(self, state):
        """Run the settings that a search needs until it is finished."""
        found = state(self)
        while found.needed:
            assert not set(found.needed) & set(self.run)
            self.run.update({setting: self.loss(setting) for setting in found.needed})
            found = state(self)
        return found.best


def valley(rate, decay=0.01):
    """Return a loss that grows with the log distance to the best rate and with other decays."""
    return lambda s: abs(math.log(s.rate / rate)) + (5 if s.decay not in (None, decay) else 0)


@pytest.mark.parametrize("best", range(len(RATES)))
def test_a_grid_grows_until_the_best_rate_is_inside_or_at_a_limit(best):
    landscape = Landscape(valley(RATES[best]))
    assert landscape.finish(lambda loss: grow(RATES[5:10], None, loss)) == Setting(RATES[best])
    tried = sorted(setting.rate for setting in landscape.run)
    assert tried == list(RATES[min(5, max(best - 1, 0)) : max(10, best + 2)])


def test_where_everything_diverges_the_smallest_rate_ends_the_search():
    landscape = Landscape(lambda setting: math.inf)
    assert landscape.finish(lambda loss: grow(RATES[5:10], None, loss)) == Setting(RATES[0])


@pytest.mark.parametrize("decay", DECAYS)
def test_weight_decay_is_searched_at_the_best_rate_then_the_rate_again(decay):
    best = {0.01: RATES[7]}.get(decay, RATES[9])

    def loss(setting):
        return valley(RATES[7] if setting.decay == 0.01 else best, decay)(setting)

    landscape = Landscape(loss)
    assert landscape.finish(lambda find: search(ADAMW, find)) == Setting(best, decay)
    assert {setting.decay for setting in landscape.run if setting.rate == RATES[7]} == set(DECAYS)
    assert {setting.decay for setting in landscape.run if setting.rate == RATES[5]} == {0.01}
    if decay != 0.01:
        assert Setting(RATES[10], decay) in landscape.run, "the second grid grows as well"


def test_the_single_setting_has_the_lowest_mean_ratio_of_those_run_everywhere():
    a, b, c = (Setting(rate) for rate in RATES[:3])
    losses = {"one": {a: 1.0, b: 2.0, c: 0.5}, "two": {a: 9.0, b: 1.0}, "three": {a: 1.0, b: 1.1}}
    assert best_single(losses) == b
    assert best_single({**losses, "four": {a: 1.0, b: math.inf}}) == a
    assert best_single({"one": {a: 1.0}, "two": {b: 1.0}}) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [
        (1.0, 2.0, 0.5),
        (3.0, 3.0, 1.0),
        (math.inf, math.inf, 1.0),
        (math.inf, 1.0, 10.0),
        (1.0, math.inf, 0.1),
        (50.0, 1.0, 10.0),
        (0.0, 1.0, 0.1),
        (0.0, 0.0, 1.0),
    ],
)
def test_ratios_are_limited(ours, theirs, ratio):
    assert math.exp(log_ratio(ours, theirs)) == pytest.approx(ratio)


def test_the_remaining_time_is_estimated_from_similar_runs():
    now = [0.0]
    progress = Progress(2, lambda: now[0])
    progress.learn("a", "adam", 60.0)
    assert progress.left({("a", "adam"): 4}) == 120, "two processes"
    assert progress.left({("a", "sgd"): 1, ("b", "sgd"): 1}) == 60
    now[0] = 120.0
    progress.finish("a", "adam")
    assert progress.left({("a", "adam"): 4}) == 480, "the first run took twice as long as expected"
    assert progress.line({("a", "adam"): 4}) == "1 runs done, about 4 to go, 8 min left"
    assert [duration(seconds) for seconds in (1, 90, 8000)] == ["less than a minute", "2 min", "2.2 h"]


def ending_at(loss):
    return Run([0, 100], [0, 100], [0.0, 1.0], [2.0, loss], [math.nan, 1.0], loss, loss, loss)


def save_grid(runs, workload, method, best):
    """A whole grid on the first seed."""
    for rate in method.rates:
        runs.save(Job(workload, method, Setting(rate), 0), ending_at(0.5 if rate == best else 1.0))


def stored_in(out, suite="suite"):
    """Return workload, method, rate and seed of every stored run."""
    records = RunFile(out / f"{suite}.jsonl.gz", KEYS)
    return {(r["workload"], r["method"], r["rate"], r["seed"]) for r in records}


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path, "suite")


def test_best_setting_of_every_complete_grid_is_stored(runs):
    save_grid(runs, SMALL, GRID, GRID.rates[1])
    runs.save(Job(STREAM, GRID, Setting(0.1), 0), ending_at(0.5))
    runs.save(Job(SMALL, ADAM, Setting(), 0), ending_at(0.5))
    for seeds in (1, 2):
        table = assemble((SMALL, STREAM), (ADAM, GRID, UNINSTALLED), seeds, runs)
        kept = json.loads(rates.text_of("suite", table.chosen))
        best = {"rate": GRID.rates[1], "decay": None}
        assert kept == {"suite": "suite", "tuned": {"small": {"sgd": best}}, "single": {}}
    assert ("small", "sgd") in table.missing, "other seeds may be missing still"
    assert table.missing["stream", "sgd"] == "search of its tuned setting not finished"


def test_what_is_written_is_read_again(tmp_path):
    chosen = Chosen({("small", "adamw-cosine"): Setting(RATES[3], 0.1)}, {"sgd": Setting(RATES[5])})
    file = tmp_path / "rates.json"
    file.write_text(rates.text_of("mine", chosen))
    assert rates.read(file, "mine", [SMALL], [ADAMW, BY_NAME["sgd"]]) == chosen._replace(file=file)
    file.write_text(file.read_text().replace(str(RATES[3]), f"{RATES[3]:.2g}"))
    assert rates.read(file, "mine", [SMALL], [ADAMW, BY_NAME["sgd"]]).tuned == chosen.tuned, "two digits suffice"


def test_given_settings_run_on_all_seeds_and_no_search(tmp_path, runs):
    workloads, methods = (SMALL, NORMALIZED), (GRID, ADAM)
    compute(workloads, methods, seeds=2, processes=1, runs=runs, given=EARLIER)
    expected = {(w.name, "adam-default", None, seed) for w in workloads for seed in (0, 1)}
    expected |= {(w.name, "sgd", 0.001, seed) for w in workloads for seed in (0, 1)}
    assert stored_in(tmp_path) == expected, "the given rate is also the default"

    table = assemble(workloads, methods, 2, runs, EARLIER)
    assert table.cells["small", "sgd"].setting == Setting(0.001)
    assert set(table.cells["small", "sgd"].runs) == {0, 1}
    assert table.missing["normalized", "sgd"] == "no setting in rates.json"


def test_pages_say_where_settings_come_from(runs):
    searched = assemble([SMALL], [GRID], 2, runs)
    for words in (markdown(searched, pages.LARGE), html(searched, pages.LARGE)):
        assert "Settings are searched on the first seed" in words
        assert "--rates" not in words
    given = assemble([SMALL, STREAM], [GRID], 2, runs, EARLIER)
    text, page = markdown(given, pages.LARGE), html(given, pages.LARGE)
    for words in (text, page):
        assert "vsgd compare --suite large --seeds 2 --rates earlier/rates.json" in words
        assert "were chosen in an earlier comparison" in words
        assert "Settings are searched" not in words
    assert "are in `rates.json`; without `--rates` they are searched again" in text
    assert "| A stream | SGD, tuned, SGD, one setting | no setting in rates.json |" in text


def test_any_file_name_can_be_shown(runs):
    odd = EARLIER._replace(file=Path("my rates\udcff\n.json"))
    text = markdown(assemble([SMALL, STREAM], [GRID], 2, runs, odd), pages.SMALL)
    assert "--rates 'my rates\\udcff\\n.json'" in text
    assert "no setting in my rates\\udcff\\n.json |" in text.encode().decode()


def test_one_command_takes_up_what_another_chose(tmp_path):
    file, out = tmp_path / "rates.json", tmp_path / "out"
    best = {"rate": RATES[9], "decay": 0.1}
    content = {"suite": "quick", "tuned": {"digits-logistic": {"adamw-cosine": best}}, "single": {}}
    file.write_text(json.dumps(content))
    succeeds("compare", *NARROW, "--optimizers", "adamw-cosine", "--rates", file, "--out", out)
    logistic = next(workload for workload in quick().workloads if workload.name == "digits-logistic")
    assert stored_in(out, "quick") == {(logistic.name, "adamw-cosine", rate, 0) for rate in (1e-3, RATES[9])}
    assert json.loads((out / "quick" / "rates.json").read_text()) == content
    text = (out / "quick" / "results.md").read_text()
    assert f"Written by `vsgd compare --quick --seeds 1 --rates {file}`" in text
    assert " @0.032, decay 0.1" in text
    assert "AdamW + cosine, one setting | no setting in rates.json |" in text


def chosen_on_digits(method, setting, suite="quick"):
    return json.dumps({"suite": suite, "tuned": {"digits-mlp": {method: setting}}, "single": {}}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot read"]),
        (b"", ["is not JSON with a suite"]),
        (b"{", ["is not JSON"]),
        (b"\xff\x00", ["is not JSON"]),
        (b"[" * 100_000, ["is not JSON"]),
        (b"[]", ["is not JSON"]),
        (b'{"digits-mlp": {"adamw-cosine": 0.1}}', ["is not JSON with a suite"]),
        (b'{"suite": "quick", "tuned": {"digits-mlp": 0.1}, "single": {}}', ["is not JSON"]),
        (b'{"suite": "quick", "tuned": {}}', ["is not JSON"]),
        (chosen_on_digits("adamw-cosine", 0.1), ["is not JSON"]),
        (chosen_on_digits("adamw-cosine", {"rate": "0.1", "decay": 0.1}), ["is not JSON"]),
        (chosen_on_digits("adamw-cosine", {"rate": 0.1}), ["is not JSON"]),
        (chosen_on_digits("adamw-cosine", {"rate": 0.1, "decay": None}), ["is not JSON"]),
        (
            chosen_on_digits("adamw-cosine", {"rate": 0.1, "decay": 0.1}, "large"),
            ["is of the suite 'large'", "'quick'"],
        ),
        (b'{"suite": "quick", "tuned": {"gpt": {}}, "single": {}}', ["'gpt' as a workload", "digits-mlp"]),
        (
            chosen_on_digits("lion", {"rate": 0.1, "decay": None}),
            ["'lion' as an optimizer with a grid", "adamw-cosine"],
        ),
        (chosen_on_digits("vsgd", {"rate": 0.1, "decay": None}), ["'vsgd' as an optimizer with a grid"]),
        (chosen_on_digits("adamw-cosine", {"rate": 0.05, "decay": 0.1}), ["'0.05' as a rate", "0.032, 0.1, 0.32"]),
        (chosen_on_digits("adamw-cosine", {"rate": math.nan, "decay": 0.1}), ["'nan' as a rate"]),
        (chosen_on_digits("adamw-cosine", {"rate": 0.1, "decay": 0.5}), ["'0.5' as a weight decay", "0, 0.01, 0.1, 1"]),
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
