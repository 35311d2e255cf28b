"""The learning rates that a comparison chose, in a file from which a later one can take them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from vsgd.errors import UserError, one_line
from vsgd_bench.compare.methods import Method
from vsgd_bench.compare.runs import setting_name
from vsgd_bench.compare.workloads import Workload

WHAT_TO_DO = "Name the rates.json that a comparison of the same suite wrote, or leave --rates out."


class GivenRates(NamedTuple):
    """What is run in place of grids."""

    file: Path
    rates: Mapping[tuple[str, str], float]
    """By the names of workload and method."""

    @property
    def name(self) -> str:
        """Of the file, as pages show it."""
        return one_line(self.file.name)


def as_tried(workload: Workload, method: Method, given: GivenRates | None) -> Method:
    """The method with the settings that it runs with on a workload: of a grid, only the rate that was given, if any."""
    if given is None or not method.has_grid:
        return method
    rate = given.rates.get((workload.name, method.name))
    return method._replace(settings=() if rate is None else (rate,))


def text_of(rates: Mapping[tuple[str, str], float]) -> str:
    by_workload: dict[str, dict[str, float]] = {}
    for (workload, method), rate in rates.items():
        by_workload.setdefault(workload, {})[method] = rate
    return json.dumps(by_workload, indent=1) + "\n"


def read(file: Path, workloads: Iterable[Workload], methods: Iterable[Method]) -> GivenRates:
    """What `text_of` made, if it fits these workloads and the grids of these methods."""
    names = [workload.name for workload in workloads]
    grids = {
        method.name: {setting_name(rate): rate for rate in method.settings if rate is not None}
        for method in methods
        if method.has_grid
    }
    if not grids:
        raise UserError(f"no optimizer of this comparison has a grid, so --rates {file} has no use. Leave it out.")

    def require(name: str, what: str, known: Collection[str]) -> None:
        if name not in known:
            raise UserError(f"{file} names {name!r} as {what}, but there are only {', '.join(known)}. {WHAT_TO_DO}")

    rates = {}
    for workload, by_method in _parsed(file).items():
        require(workload, "a workload", names)
        for method, rate in by_method.items():
            require(method, "an optimizer with a grid", grids)
            require(setting_name(rate), f"the rate of {method} on {workload}", grids[method])
            rates[workload, method] = grids[method][setting_name(rate)]
    return GivenRates(file, rates)


def _parsed(file: Path) -> dict[str, dict[str, float]]:
    try:
        content: dict[str, dict[str, float]] = json.loads(file.read_bytes(), parse_int=float)
        if all(isinstance(rate, float) for by_method in content.values() for rate in by_method.values()):
            return content
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}. {WHAT_TO_DO}") from None
    except (ValueError, RecursionError, AttributeError):  # not JSON, nested without end, or without names
        pass
    raise UserError(f"{file} is not JSON with a learning rate by workload and optimizer. {WHAT_TO_DO}")
