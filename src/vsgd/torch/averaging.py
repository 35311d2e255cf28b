"""Window of the average and horizon of the rates of each group, which follow every step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vsgd.algorithms.networks import Averaging, Progress, update_window_and_horizon
from vsgd.algorithms.strategy import strategy_of
from vsgd.torch.block import Group, Report
from vsgd.torch.blocks import Blocks
from vsgd.torch.devices import read_numbers


class PendingReports:
    """Reports of the last step. They are read before the next one, so that no step waits for the device at its end."""

    def __init__(self) -> None:
        self._reports: list[tuple[Group, Report]] = []
        self._loss: Any = 0.0
        self._are_read = True
        """Whether all numbers are on the CPU."""

    def put(self, reports: list[tuple[Group, Report]], loss: Tensor) -> None:
        """Remember the reports of a step, and its loss."""
        self._reports, self._loss, self._are_read = reports, loss, False

    def numbers(self) -> list[Any]:
        """Return the loss and all numbers of the reports that may be on a device; nothing if none is."""
        if not self._reports or self._are_read:
            return []
        numbers: list[Any] = [self._loss]
        for _, report in self._reports:
            numbers += report.products, 0.0 if report.penalty is None else report.penalty
        return numbers

    def set_numbers(self, values: list[float]) -> None:
        """Replace `numbers` by their values on the CPU."""
        self._are_read = True
        if values:
            self._loss, products, penalties = values[0], values[1::2], values[2::2]
            self._reports = [
                (group, report._replace(products=product, penalty=None if report.penalty is None else penalty))
                for (group, report), product, penalty in zip(self._reports, products, penalties, strict=True)
            ]

    def update_groups(self, groups: list[Group], blocks: Blocks) -> None:
        """Let window and horizon of the groups follow the last step. Nothing happens if that was done before.

        ½ (θ−θ̄)ᵀ|H|(θ−θ̄) is measured after a probe, and used until the next. Rows of tables have no part in it. With
        tables the cost of noise is therefore unknown, and rates are optimal for a single step.

        Args:
            groups: settings and counters, with the step included.
            blocks: all blocks of the groups.
        """
        if not self._reports:
            return
        if not self._are_read:
            self.set_numbers(read_numbers(self.numbers()))
        reports, self._reports = self._reports, []
        for group in groups:
            own, config = [report for each, report in reports if each is group], group["algorithm"]
            if not own or not strategy_of(config).averages_iterates(config):
                continue
            has_table = blocks.has_table(group)
            loss = None if has_table else self._loss * (-1 if group["maximize"] else 1)
            window, advantage, penalty = group["averaging"]
            penalties = [float(report.penalty) for report in own if report.penalty is not None]
            penalty = sum(penalties) if penalties else penalty
            products = sum([float(report.products) for report in own])
            before, steps = Averaging(window, advantage), group["steps"] - 1
            averaging, progress = update_window_and_horizon(
                before, Progress(*group["progress"]), products, penalty, loss, steps, config
            )
            if has_table:
                progress = progress._replace(horizon=1.0)
            group["averaging"] = [float(averaging.window), float(averaging.advantage), penalty]
            group["progress"] = list(map(float, progress))
