"""What `vsgd compare` does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from vsgd.disk import only_writer
from vsgd.errors import UserError
from vsgd_bench.compare import pages, rates
from vsgd_bench.compare.curves import draw_profiles, png
from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.ours import ABLATIONS, DEFAULT
from vsgd_bench.compare.pages import Page, html, markdown, tables_only
from vsgd_bench.compare.stress import stress_table, stress_workloads
from vsgd_bench.compare.suites import LARGE, SMALL, UNSEEN, Suite, quick
from vsgd_bench.compare.table import Table, assemble, compute
from vsgd_bench.compare.tables import Grid, finals
from vsgd_bench.compare.workloads import WORKLOADS, Workload
from vsgd_bench.store import write_whole

Item = TypeVar("Item", Workload, Method)


def chosen(items: Sequence[Item], names: list[str] | None, what: str) -> tuple[Item, ...]:
    known = [item.name for item in items]
    for name in names or ():
        if name not in known:
            raise UserError(f"there is no {what} {name!r}, there are {', '.join(known)}")
    return tuple(item for item in items if names is None or item.name in names)


class Plan(NamedTuple):
    """What is to be run, and where its pages go."""

    suite: Suite
    out: Path
    pages: Callable[[Table], dict[str, str | bytes]]
    """What to write to each file."""


def plan(arguments: argparse.Namespace) -> Plan:
    out = arguments.out
    if arguments.ablations:
        return Plan(Suite(WORKLOADS, ABLATIONS, 3), out, partial(table_page, "ablations.md", pages.ABLATED, finals))
    if arguments.stress:
        suite = Suite(stress_workloads(), (DEFAULT,), 2)
        return Plan(suite, out, partial(table_page, "stress.md", pages.STRESS, stress_table))
    if arguments.quick:
        return Plan(quick(), out / "quick", partial(whole_pages, pages.QUICK))
    if arguments.suite == "large":
        return Plan(LARGE, out / "large", partial(whole_pages, pages.LARGE))
    if arguments.suite == "unseen":
        return Plan(UNSEEN, out / "unseen", partial(whole_pages, pages.UNSEEN))
    return Plan(SMALL, out, partial(whole_pages, pages.SMALL))


def table_page(file: str, page: Page, grid: Callable[[Table], Grid], table: Table) -> dict[str, str | bytes]:
    return {file: tables_only(table, page, [grid(table)])}


def whole_pages(page: Page, table: Table) -> dict[str, str | bytes]:
    profiles = png(draw_profiles(table, "updates"))
    return {
        "results.md": markdown(table, page),
        "profiles.png": profiles,
        "index.html": html(table, page),
        "rates.json": rates.text_of(table.rates),
    }


def compare(arguments: argparse.Namespace) -> None:
    suite, out, make_pages = plan(arguments)
    workloads = chosen(suite.workloads, arguments.workloads, "workload")
    methods = chosen(suite.methods, arguments.optimizers, "optimizer")
    seeds = arguments.seeds or suite.seeds
    given = None if arguments.rates is None else rates.read(arguments.rates, suite.workloads, suite.methods)

    with only_writer(out):
        compute(workloads, methods, seeds, arguments.jobs, out, given)
        files = make_pages(assemble(suite.workloads, suite.methods, seeds, out, given))
        for name, text in files.items():
            write_whole(out / name, text)
    print("wrote " + ", ".join(str(out / name) for name in files))
