"""What `vsgd compare` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeVar

from vsgd.bench.compare.pages import html, markdown
from vsgd.bench.compare.rivals import RIVALS, Rival
from vsgd.bench.compare.table import assemble, compute
from vsgd.bench.compare.workloads import WORKLOADS, Workload
from vsgd.bench.store import write_whole
from vsgd.errors import UserError

QUICK_RIVALS = ("vsgd", "vsgd-paper", "sgd", "adam", "adam-default", "prodigy", "schedulefree-adamw", "dog")
QUICK_SHARE = 3
"""Quick runs have so many times fewer epochs."""


def quick_workloads() -> tuple[Workload, ...]:
    """Those whose data come with scikit-learn, shortened."""
    return tuple(w._replace(epochs=max(1, w.epochs // QUICK_SHARE)) for w in WORKLOADS if not w.files)


Item = TypeVar("Item", Workload, Rival)


def chosen(items: Sequence[Item], names: list[str] | None, what: str) -> tuple[Item, ...]:
    known = [item.name for item in items]
    for name in names or ():
        if name not in known:
            raise UserError(f"there is no {what} {name!r}, there are {', '.join(known)}")
    return tuple(item for item in items if names is None or item.name in names)


def compare(arguments: argparse.Namespace) -> None:
    quick = arguments.quick
    all_workloads = quick_workloads() if quick else WORKLOADS
    all_rivals = tuple(rival for rival in RIVALS if not quick or rival.name in QUICK_RIVALS)
    workloads = chosen(all_workloads, arguments.workloads, "workload")
    rivals = chosen(all_rivals, arguments.optimizers, "optimizer")
    seeds = arguments.seeds or (2 if quick else 5)
    out = arguments.out / "quick" if quick else arguments.out

    write_whole(out / ".writable", "")  # better now than after the work
    (out / ".writable").unlink()
    compute(workloads, rivals, seeds, arguments.jobs, out)
    table = assemble(all_workloads, all_rivals, seeds, out)
    write_whole(out / "results.md", markdown(table, quick))
    write_whole(out / "index.html", html(table, quick))
    print(f"wrote {out / 'results.md'} and {out / 'index.html'}")
