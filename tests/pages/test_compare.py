"""The page of `vsgd compare` in a real browser."""

from __future__ import annotations

import math

import pytest
from standins import ADAM, BY_NAME, GRID, SMALL, STREAM

from vsgd_bench.compare import pages
from vsgd_bench.compare.judging import AXES, REFERENCE, profiles
from vsgd_bench.compare.methods import Setting
from vsgd_bench.compare.table import Cell, Table
from vsgd_bench.compare.train import Run
from vsgd_bench.compare.workloads import WORKLOADS

METHODS = (BY_NAME["vsgd"], GRID._replace(name=REFERENCE, title="tuned"), ADAM)


def falling(end, pace):
    """Return a run from 2 to `end` in 100 updates, faster or slower at first."""
    spent = [0, 20, 50, 100]
    losses = [2.0, 2 - (2 - end) * pace, 2 - (2 - end) * (0.5 + pace / 2), end]
    seconds = [0.02 * updates / pace for updates in spent]
    return Run(spent, [2 * updates for updates in spent], seconds, losses, [math.nan, 1.0, 1.0, 1.0], end, end, end)


def table_of(workloads, seeds=2):
    cells = {}
    for i, workload in enumerate(workloads):
        for j, method in enumerate(METHODS):
            ends = [math.inf if (i, j) == (1, 2) else 0.5 + 0.1 * ((i + 2 * j + seed) % 4) for seed in range(seeds)]
            runs = {seed: falling(end, 0.2 + 0.2 * ((j + i) % 3)) for seed, end in enumerate(ends)}
            cells[workload.name, method.name] = Cell(Setting(), runs)
    return Table(workloads, METHODS, seeds, cells, {})


@pytest.fixture(scope="module")
def table():
    return table_of((SMALL, STREAM, SMALL._replace(name="third", title="Third")))


@pytest.fixture
def opened(open_page, table, tmp_path):
    def opened(shown=table, **options):
        path = tmp_path / "index.html"
        path.write_text(pages.html(shown, pages.SMALL))
        return open_page(path, **options)

    return opened


def test_profiles_are_those_of_python(opened, table):
    page = opened()
    names = [method.name for method in METHODS]
    for axis in AXES:
        got = page.tab.evaluate(
            "([axis, names]) => Object.values(ratiosOf(axis, names, chosen.workloads))"
            ".map((all) => all.map((ratio) => Number.isFinite(ratio) ? ratio : null))",
            [axis, names],
        )
        expected = profiles(table, axis)
        for name, ratios in zip(names, got, strict=True):
            ratios = [math.inf if ratio is None else ratio for ratio in ratios]
            assert ratios == pytest.approx(expected[name].tolist(), rel=1e-9), (axis, name)


def test_choosing_by_keyboard(opened):
    page = opened()
    page.frames()
    assert page.tab.locator("#curves svg.chart").count() == 3
    adam = page.tab.get_by_role("checkbox", name=ADAM.title)
    adam.focus()
    adam.press("Space")
    page.tab.get_by_role("checkbox", name="Third").press("Space")
    page.frames()
    assert page.tab.locator("#curves svg.chart").count() == 2
    assert page.tab.locator("#curves svg.chart").first.locator("path.line").count() == 2
    assert ADAM.title not in page.tab.locator("#profiles").inner_text()
    for text in (ADAM.title, "Third"):
        assert not page.tab.get_by_role("cell", name=text, exact=True).filter(visible=True).count()
        assert not page.tab.get_by_role("columnheader", name=text, exact=True).filter(visible=True).count()
    page.tab.get_by_role("radio", name="seconds").press("Space")
    page.frames()
    assert "seconds to the target" in page.tab.locator("#profiles").inner_text()
    page.tab.get_by_role("button", name="None Optimizers").press("Enter")
    page.frames()
    assert "Nothing to draw" in page.tab.locator("#profiles").inner_text()
    page.tab.get_by_role("button", name="All Optimizers").press("Enter")
    page.frames()
    assert page.tab.get_by_role("cell", name=ADAM.title, exact=True).filter(visible=True).count()


def test_sorting_a_table(opened):
    page = opened()
    finals = page.tab.locator("h2:text('Final losses') ~ div table").first
    head = finals.get_by_role("columnheader", name=ADAM.title)

    def column():
        return [text.split(" ")[0] for text in finals.locator("tbody tr td:nth-child(4)").all_inner_texts()]

    before = column()
    assert before[1].startswith("diverged")
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert column() == [*sorted(before[::2]), before[1]]
    head.get_by_role("button").click()
    assert column() == [before[1], *sorted(before[::2], reverse=True)]
    head.get_by_role("button").click()
    assert column() == before
    assert head.get_attribute("aria-sort") is None


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_scrolls_sideways_on_a_phone(opened, table, dark):
    page = opened(width=360, height=740, dark=dark)
    assert not page.scrolls_sideways()


def test_a_folder_with_nothing_in_it(opened, table):
    page = opened(table._replace(cells={}, missing={("small", "vsgd"): "not run"}))
    assert "There are no runs yet" in page.tab.inner_text("body")
    page.tab.get_by_role("link", name="are missing").click()
    assert "What is missing" in page.tab.inner_text("#missing")


def test_many_seeds_and_workloads(opened):
    workloads = tuple(w._replace(name=f"{w.name}{k}", title=f"{w.title} {k}") for k in range(8) for w in WORKLOADS)
    page = opened(table_of(workloads, seeds=20))
    page.frames()
    assert page.tab.locator("#curves svg.chart").count() == len(workloads)
