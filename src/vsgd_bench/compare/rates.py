"""The settings that a comparison has chosen, in a file that later comparisons can read."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vsgd.errors import UserError, one_line
from vsgd_bench.compare.methods import RATES, Method, Setting
from vsgd_bench.compare.workloads import Workload

WHAT_TO_DO = "Name the rates.json that a comparison of the same suite wrote, or leave --rates out."


class Chosen(NamedTuple):
    """The settings of methods with a grid."""

    tuned: Mapping[tuple[str, str], Setting] = MappingProxyType({})
    """The best setting of each workload, by the names of workload and method."""
    single: Mapping[str, Setting] = MappingProxyType({})
    """The best single setting for all workloads, by the name of the method."""
    file: Path | None = None
    """The file that they were read from, or None."""

    @property
    def file_name(self) -> str:
        """Name of the file for pages."""
        return "" if self.file is None else one_line(self.file.name)


def text_of(suite: str, chosen: Chosen) -> str:
    tuned: dict[str, dict[str, Any]] = {}
    for (workload, method), setting in chosen.tuned.items():
        tuned.setdefault(workload, {})[method] = setting._asdict()
    single = {method: setting._asdict() for method, setting in chosen.single.items()}
    return json.dumps({"suite": suite, "tuned": tuned, "single": single}, indent=1) + "\n"


def read(file: Path, suite: str, workloads: Iterable[Workload], methods: Iterable[Method]) -> Chosen:
    """Read a file written from `text_of`. Raise UserError if it is of another suite."""
    names = [workload.name for workload in workloads]
    grids = {method.name: method for method in methods if method.rates}
    if not grids:
        raise UserError(f"no optimizer of this comparison has a grid, so --rates {file} has no use. Leave it out.")

    def require(name: str, what: str, known: Collection[str]) -> None:
        if name not in known:
            raise UserError(f"{file} names {name!r} as {what}, but there are only {', '.join(known)}. {WHAT_TO_DO}")

    def setting(method: str, content: dict[str, float | None]) -> Setting:
        require(method, "an optimizer with a grid", grids)
        rates = {f"{rate:.2g}": rate for rate in RATES}
        decays = {f"{decay:g}": decay for decay in grids[method].decays}
        require(f"{content['rate']:.2g}", f"a rate of {method}", rates)
        if decays or content["decay"] is not None:
            require(f"{content['decay']:g}", f"a weight decay of {method}", decays)
        return Setting(rates[f"{content['rate']:.2g}"], decays.get(f"{content['decay']:g}") if decays else None)

    content = _parsed(file)
    if content["suite"] != suite:
        raise UserError(f"{file} is of the suite {content['suite']!r}, but this is {suite!r}. {WHAT_TO_DO}")
    try:
        tuned = {}
        for workload, by_method in content["tuned"].items():
            require(workload, "a workload", names)
            tuned.update({(workload, method): setting(method, item) for method, item in by_method.items()})
        return Chosen(tuned, {method: setting(method, item) for method, item in content["single"].items()}, file)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{file} {NO_SETTINGS}. {WHAT_TO_DO}") from None


NO_SETTINGS = "is not JSON with a suite, and a learning rate by workload and optimizer"


def _parsed(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_bytes(), parse_int=float)
        if content["suite"] is not None:
            return content
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}. {WHAT_TO_DO}") from None
    except (ValueError, RecursionError, KeyError, TypeError):  # not JSON, nested too deeply, or a name is missing
        pass
    raise UserError(f"{file} {NO_SETTINGS}. {WHAT_TO_DO}")
