"""The implementation of `vsgd compare`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from vsgd.disk import only_writer
from vsgd.errors import UserError
from vsgd_bench.compare import pages, rates
from vsgd_bench.compare.compute import compute
from vsgd_bench.compare.curves import draw_profiles, png
from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.pages import Page, html, markdown, tables_only
from vsgd_bench.compare.runs import Runs
from vsgd_bench.compare.sensitivity import SENSITIVITY, sensitivity_pages
from vsgd_bench.compare.stress import stress_table
from vsgd_bench.compare.suites import ABLATION, LARGE, SCIENCE, SMALL, UNSEEN, Suite, quick, stress_suite
from vsgd_bench.compare.table import Table, assemble
from vsgd_bench.compare.tables import Grid, final_ratios, finals
from vsgd_bench.compare.workloads import Workload
from vsgd_bench.store import write_whole

Item = TypeVar("Item", Workload, Method)


def chosen(items: Sequence[Item], names: list[str] | None, what: str) -> tuple[Item, ...]:
    known = [item.name for item in items]
    for name in names or ():
        if name not in known:
            raise UserError(f"there is no {what} {name!r}, there are {', '.join(known)}")
    return tuple(item for item in items if names is None or item.name in names)


class Plan(NamedTuple):
    """A suite, and the files of its pages."""

    suite: Suite
    pages: Callable[[Table], dict[str, str | bytes]]


def plan(arguments: argparse.Namespace) -> Plan:
    if arguments.ablations:
        return Plan(ABLATION, partial(table_page, pages.ABLATED, (final_ratios, finals)))
    if arguments.stress:
        return Plan(stress_suite(), partial(table_page, pages.STRESS, (stress_table,)))
    if arguments.sensitivity:
        return Plan(SENSITIVITY, sensitivity_pages)
    if arguments.quick:
        return Plan(quick(), partial(whole_pages, pages.QUICK, "quick"))
    suite, page = {
        "small": (SMALL, pages.SMALL),
        "large": (LARGE, pages.LARGE),
        "unseen": (UNSEEN, pages.UNSEEN),
        "science": (SCIENCE, pages.SCIENCE),
    }[arguments.suite]
    return Plan(suite, partial(whole_pages, page, suite.name))


def table_page(page: Page, grids: Sequence[Callable[[Table], Grid]], table: Table) -> dict[str, str | bytes]:
    return {"results.md": tables_only(table, page, [grid(table) for grid in grids])}


def whole_pages(page: Page, suite: str, table: Table) -> dict[str, str | bytes]:
    profiles = png(draw_profiles(table, "updates"))
    return {
        "results.md": markdown(table, page),
        "profiles.png": profiles,
        "index.html": html(table, page),
        "rates.json": rates.text_of(suite, table.chosen),
    }


def compare(arguments: argparse.Namespace) -> None:
    suite, make_pages = plan(arguments)
    workloads = chosen(suite.workloads, arguments.workloads, "workload")
    methods = chosen(suite.methods, arguments.optimizers, "optimizer")
    seeds = arguments.seeds or suite.seeds
    given = None if arguments.rates is None else rates.read(arguments.rates, suite.name, suite.workloads, suite.methods)

    runs = Runs(arguments.out, suite.name, suite.shared)
    out = arguments.out / suite.name
    with only_writer(out):
        if not arguments.stored:
            compute(workloads, methods, seeds, arguments.jobs, runs, given, suite.workloads)
        files = make_pages(assemble(suite.workloads, suite.methods, seeds, runs, given, arguments.stored))
        for name, text in files.items():
            write_whole(out / name, text)
    print("wrote " + ", ".join(str(out / name) for name in files))
