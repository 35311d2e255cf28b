"""Variants, tables and figures of `vsgd compare --sensitivity` and `benchmarks/scaling.py`."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from vsgd import NETWORKS
from vsgd.cli import main
from vsgd_bench.compare.methods import Setting
from vsgd_bench.compare.sensitivity import (
    CONSTANTS,
    SENSITIVITY,
    name_of,
    ratios,
    sensitivity_pages,
    sensitivity_table,
)
from vsgd_bench.compare.table import Cell, Table
from vsgd_bench.compare.train import Run

SCALING = Path(__file__).parents[2] / "benchmarks" / "scaling.py"


def ending_at(loss):
    return Run([0, 100], [0, 100], [0.0, 1.0], [2.0, loss], [math.nan, 1.0], loss, loss, loss)


def table_of(losses):
    """Return runs with final loss 1, except those of some methods."""
    cells = {
        (w.name, m.name): Cell(Setting(), {0: ending_at(losses.get(m.name, 1.0))})
        for w in SENSITIVITY.workloads
        for m in SENSITIVITY.methods
    }
    return Table(SENSITIVITY.workloads, SENSITIVITY.methods, 1, cells, {})


def test_every_number_is_halved_and_doubled_on_six_workloads():
    assert len(SENSITIVITY.workloads) == 6
    assert {*CONSTANTS} == {f for f in NETWORKS._fields if not isinstance(getattr(NETWORKS, f), bool)}
    assert len(SENSITIVITY.methods) == 1 + 2 * len(CONSTANTS)
    made = {method.name: method.make.args[0] for method in SENSITIVITY.methods[1:]}
    for constant in CONSTANTS:
        for factor in (0.5, 2.0):
            changed = made[name_of(constant, factor)]
            assert getattr(changed, constant) == factor * getattr(NETWORKS, constant)
            assert changed._replace(**{constant: getattr(NETWORKS, constant)}) == NETWORKS


def test_a_higher_loss_is_a_ratio_above_one():
    table = table_of({name_of("step_limit", 2.0): 1.5})
    assert list(ratios(table, "step_limit", 2.0).values()) == pytest.approx([1.5] * 6)
    rows = {(row[0], row[1]): row for row in sensitivity_table(table).rows}
    assert rows["`step_limit`", "×2"][2:] == ["6", *["1.500"] * 6, "1.50 [1.50, 1.50]"]
    assert rows["`step_limit`", "×0.5"][-1] == "1.00 [1.00, 1.00]"
    files = sensitivity_pages(table)
    assert files["sensitivity.png"].startswith(b"\x89PNG")


def test_the_page_is_written_without_any_run(tmp_path):
    assert main(["compare", "--sensitivity", "--stored", "--out", str(tmp_path)]) == 0
    assert "not run" in (tmp_path / "sensitivity" / "results.md").read_text()
    assert (tmp_path / "sensitivity" / "sensitivity.png").exists()


def test_scaling_varies_one_size_at_a_time_over_two_decades():
    script = runpy.run_path(str(SCALING))
    for family in (script["MLP"], script["TRANSFORMER"]):
        assert max(family.sizes["width"]) >= 60 * min(family.sizes["width"])
        for axis, sizes in family.sizes.items():
            assert getattr(family.middle, axis) in sizes
            for size, task in script["along"](family, axis).items():
                changed = task.build.args[0]
                assert changed == family.middle._replace(**{axis: size})
                assert task.batch == changed.batch
