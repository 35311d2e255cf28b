"""The page of `vsgd figures` in a real browser."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest

from vsgd_bench import baselines
from vsgd_bench.figures import FIGURES, Request, comparison, drift
from vsgd_bench.gain import averaged, counted, fixed, relative_gain
from vsgd_bench.problems import SHAPES, Elementary
from vsgd_bench.report import html
from vsgd_bench.reproduce import Reproduced
from vsgd_bench.simulate import draw_noise, simulate_vectorized
from vsgd_bench.web import embedded
from vsgd_bench.web.translate import Translator

REQUEST = Request(runs=3, updates=64)


def results_of_figure_6():
    rng = np.random.default_rng(0)
    shape = (len(comparison.ELEMENTARY), REQUEST.runs, 8)
    return {row.key: {"theta": rng.standard_normal(shape)} for row in comparison.ROWS}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """All interactive figures, with synthetic results for Figure 6."""
    items = []
    for name in ("1", "2", "6", "drift"):
        picture, results = io.BytesIO(), results_of_figure_6() if name == "6" else {}
        if name == "6":
            comparison.draw(results, REQUEST).savefig(picture, format="png", dpi=50)
        items.append(Reproduced(FIGURES[name], picture.getvalue(), [], 0.0, FIGURES[name].data(results, REQUEST)))
    file = tmp_path_factory.mktemp("report") / "index.html"
    file.write_text(html(items, REQUEST))
    return file


ALGORITHMS = {a.update: a for a in (*(row.algorithm for row in comparison.ROWS), *(a for a, _ in drift.ALGORITHMS))}
"""One algorithm of each kind. Those that differ only in a rate share their code."""


def test_the_page_simulates_what_python_does(open_page, path):
    """Run every algorithm for a thousand updates on partly zero samples, with a jump of the optimum."""
    checkpoints = [0, 1, 10, 100, 1000]
    noise = draw_noise(7, range(2), 1000, 2, presence=0.8)
    centers = 0.5 * (np.arange(1000) >= 500)
    page = open_page(path)
    page.tab.evaluate(
        "([normal, present, lead]) => { window.noise = {normal, present, lead}; "
        "for (const all of [normal, present]) all.shape = [all.length, all[0].length, all[0][0].length]; }",
        [noise.normal.tolist(), noise.present.tolist(), noise.lead],
    )
    for shape, algorithm in itertools.product(SHAPES, (*ALGORITHMS.values(), baselines.vsgd())):
        problem = Elementary(shape, 0.5, 0.3)
        track = page.tab.evaluate(
            "([problem, name, checkpoints, centers]) => { "
            "const track = simulate(problem, ALGORITHMS[name], noise, checkpoints, centers); "
            "return {...track, loss: track.theta.map((row) => row.map((theta) => excessLoss(problem, theta)))}; }",
            [problem._asdict(), algorithm.name, checkpoints, centers.tolist()],
        )
        expected, where = (
            simulate_vectorized(problem, algorithm, noise, checkpoints, centers),
            f"{algorithm.name} {shape}",
        )
        np.testing.assert_allclose(track["theta"], expected.theta, rtol=1e-7, err_msg=where)
        np.testing.assert_allclose(track["rate"], expected.rate, rtol=1e-7, err_msg=where)
        loss = problem.excess_loss(expected.theta)
        np.testing.assert_allclose(track["loss"], loss, rtol=1e-6, atol=1e-13, err_msg=where)


def test_the_page_computes_the_gain_that_python_does(open_page, path):
    page = open_page(path)
    for n, p, noise in ((1, 0.1, 1.0), (7, 0.1, 0.01), (100, 0.013, 3.0), (1000, 1.0, 10.0)):
        steps = {
            "counted(noise)": counted(noise),
            "averaged(noise, n, p)": averaged(noise, n, p),
            "fixedRate(0.3, n)": fixed(0.3, n),
        }
        for text, step in steps.items():
            got = page.tab.evaluate(f"([n, p, noise]) => relativeGain(n, p, noise, {text})", [n, p, noise])
            assert got == pytest.approx(relative_gain(n, p, noise, step), rel=1e-9), (text, n, p, noise)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_scrolls_sideways_on_a_phone(open_page, path, dark):
    page = open_page(path, width=360, height=740, dark=dark)
    assert not page.scrolls_sideways()
    ground = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") != dark
    assert page.tab.locator("svg.chart").count() == 7


def test_sliders_redraw(open_page, path):
    page = open_page(path)
    for figure, labels in {"1": ["noise", "non-zero"], "2": ["noise", "non-zero"], "drift": ["jump", "noise"]}.items():
        box = page.tab.locator(f"#figure-{figure} .panel")
        for label in labels:
            before = box.locator(".charts").inner_html()
            box.get_by_label(label).press("ArrowLeft" if label == "non-zero" else "ArrowRight")
            page.frames()
            assert box.locator(".charts").inner_html() != before, (figure, label)


def test_squares_by_mouse(open_page, path):
    page = open_page(path)
    squares, peek = page.tab.locator(".squares"), page.tab.locator(".peek")
    layout = comparison.data(results_of_figure_6(), REQUEST)["layout"]
    squares.scroll_into_view_if_needed()
    frame, box = squares.bounding_box(), layout["box"]
    column, row = 4, 1
    x = box["left"] + (layout["lefts"][column] + 11) / layout["width"] * box["width"]
    y = box["top"] + (layout["tops"][row] + 11) / layout["height"] * box["height"]
    position = {"x": x * frame["width"], "y": y * frame["height"]}
    squares.hover(position=position)
    assert "SGD η=0.01 γ=0, n = 10 on quad, A = 1, σ² = 1" in peek.inner_text()
    assert "est of" in peek.inner_text()
    assert peek.locator("path.line").count() == 2
    squares.click(position=position)
    explorer = page.tab.locator("#figure-6 .panel")
    assert explorer.get_by_label("algorithm").input_value() == "SGD η=0.01 γ=0"
    assert "quad, A = 1, σ² = 1, n = 10" in explorer.inner_text()
    assert not peek.is_visible()


def test_squares_by_keyboard(open_page, path):
    page = open_page(path)
    squares, explorer = page.tab.locator(".squares"), page.tab.locator("#figure-6 .panel")
    for _ in range(40):
        page.tab.keyboard.press("Tab")
        if squares.evaluate("node => node === document.activeElement"):
            break
    assert page.tab.locator(".peek").is_visible()
    for key in ("ArrowRight", "ArrowUp", "ArrowDown", "Enter"):
        page.tab.keyboard.press(key)
    assert "vSGD-fd: median loss" in explorer.inner_text()
    assert "on quad, A = 1, σ² = 10, n = 1" in explorer.inner_text()
    assert explorer.evaluate("node => node === document.activeElement")
    before = explorer.inner_text()
    for label in ("curvature", "noise", "minibatch"):
        explorer.get_by_label(label).press("ArrowRight")
    explorer.get_by_label("shape").select_option("gauss")
    page.frames()
    assert "on gauss, A = 1.17, σ² = 11.7, n = 2" in explorer.inner_text() != before


def unknown(x):
    return [x]


def calls_unknown(x):
    return baselines.sgd(x)


@pytest.mark.parametrize("function", [unknown, calls_unknown])
def test_what_cannot_be_translated_is_refused(function):
    with pytest.raises(TypeError, match=r"translat|counterpart"):
        Translator().add(function)


def test_data_cannot_end_their_script():
    assert embedded({"a": "</script>", "b": [float("nan"), float("inf"), 1.5]}) == (
        '{"a":"\\u003c/script>","b":[null,null,1.5]}'
    )
