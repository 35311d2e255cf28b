"""What `vsgd compare` does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from vsgd.bench.compare.curves import draw_profiles, png
from vsgd.bench.compare.methods import ABLATIONS, METHODS, Method
from vsgd.bench.compare.pages import ABLATED, QUICK, SMALL, STRESS, Page, html, markdown, tables_only
from vsgd.bench.compare.stress import stress_table, stress_workloads
from vsgd.bench.compare.table import Table, assemble, compute
from vsgd.bench.compare.tables import finals
from vsgd.bench.compare.workloads import WORKLOADS, Workload
from vsgd.bench.store import write_whole
from vsgd.errors import UserError

QUICK_METHODS = ("vsgd", "vsgd-paper", "sgd", "adamw-cosine", "adam-default", "prodigy", "schedulefree-adamw", "dog")
QUICK_SHARE = 3
"""Quick runs have so many times fewer epochs."""


def quick_workloads() -> tuple[Workload, ...]:
    """Those whose data come with scikit-learn, shortened."""
    return tuple(w._replace(epochs=max(1, w.epochs // QUICK_SHARE)) for w in WORKLOADS if not w.files)


Item = TypeVar("Item", Workload, Method)


def chosen(items: Sequence[Item], names: list[str] | None, what: str) -> tuple[Item, ...]:
    known = [item.name for item in items]
    for name in names or ():
        if name not in known:
            raise UserError(f"there is no {what} {name!r}, there are {', '.join(known)}")
    return tuple(item for item in items if names is None or item.name in names)


class Plan(NamedTuple):
    """What is to be run, and where its pages go."""

    workloads: tuple[Workload, ...]
    methods: tuple[Method, ...]
    seeds: int
    out: Path
    pages: Callable[[Table], dict[str, str | bytes]]
    """What to write to each file."""


def plan(arguments: argparse.Namespace) -> Plan:
    out = arguments.out
    if arguments.ablations:
        return Plan(WORKLOADS, ABLATIONS, 3, out, lambda t: {"ablations.md": tables_only(t, ABLATED, [finals(t)])})
    if arguments.stress:
        return Plan(
            stress_workloads(), METHODS[:1], 2, out, lambda t: {"stress.md": tables_only(t, STRESS, [stress_table(t)])}
        )
    if arguments.quick:
        few = tuple(method for method in METHODS if method.name in QUICK_METHODS)
        return Plan(quick_workloads(), few, 2, out / "quick", partial(whole_pages, QUICK))
    return Plan(WORKLOADS, METHODS, 5, out, partial(whole_pages, SMALL))


def whole_pages(page: Page, table: Table) -> dict[str, str | bytes]:
    profiles = png(draw_profiles(table, "updates"))
    return {"results.md": markdown(table, page), "profiles.png": profiles, "index.html": html(table, page)}


def compare(arguments: argparse.Namespace) -> None:
    everything = plan(arguments)
    workloads = chosen(everything.workloads, arguments.workloads, "workload")
    methods = chosen(everything.methods, arguments.optimizers, "optimizer")
    seeds, out = arguments.seeds or everything.seeds, everything.out

    write_whole(out / ".writable", "")  # better now than after the work
    (out / ".writable").unlink()
    compute(workloads, methods, seeds, arguments.jobs, out)
    pages = everything.pages(assemble(everything.workloads, everything.methods, seeds, out))
    for name, text in pages.items():
        write_whole(out / name, text)
    print("wrote " + ", ".join(str(out / name) for name in pages))
