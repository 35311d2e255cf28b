"""The command `vsgd watch RUN`, which shows a training run as text and follows its log."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from vsgd.arguments import positive_number
from vsgd.errors import one_line
from vsgd.integrations.alarms import alarms
from vsgd.integrations.run_file import Reader, Record, TensorRecord

BLOCKS = "▁▂▃▄▅▆▇█"
CLEAR, BOLD, WARN, QUIET, END = "\x1b[H\x1b[J", "\x1b[1m", "\x1b[1;33m", "\x1b[2m", "\x1b[0m"
BAR = 24
"""Width of the drawing of the learning rates of a tensor, in characters."""

SILENT = 10
"""An alarm is shown if the log has no new line for this many times its usual interval."""

OTHER_LINES = 12
"""Number of lines that do not show tensors."""


def sparkline(values: list[float], width: int) -> str:
    """Return block characters for means over equal parts of the values, on a log scale if all are positive."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    count = min(width, len(known))
    parts = [known[i * len(known) // count : (i + 1) * len(known) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    if min(means) > 0:
        means = [math.log(value) for value in means]
    low, span = min(means), max(means) - min(means)
    return "".join(
        BLOCKS[int((value - low) / span * (len(BLOCKS) - 1) + 0.5)] if span else BLOCKS[0] for value in means
    )


def duration(seconds: float) -> str:
    """Return a duration such as "2 h 5 min"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def rate_bar(tensor: TensorRecord, low: float, high: float) -> str:
    """Return a line from the 5 % to the 95 % quantile of the rates, with a dot at the median.

    Args:
        tensor: the tensor.
        low, high: ends of the log scale, equal for all tensors.
    """

    def place(rate: float) -> int:
        share = math.log(rate / low) / math.log(high / low) if high > low and rate > low else 0.5 * (high <= low)
        return round(share * (BAR - 1))

    if not tensor.high_rate > 0:
        return " " * BAR
    first, dot, last = place(tensor.low_rate), place(tensor.rate), place(tensor.high_rate)
    return "".join("●" if i == dot else "─" if first <= i <= last else " " for i in range(BAR))


def tensor_lines(tensors: tuple[TensorRecord, ...], room: int, width: int) -> list[str]:
    """Return a table of the first tensors, with at most `room` rows of `width` characters."""
    positive = [rate for t in tensors for rate in (t.low_rate, t.rate, t.high_rate) if rate > 0]
    high = max(positive, default=1.0)
    low = max(min(positive, default=1.0), 1e-8 * high)
    longest = min(28, max((len(one_line(t.name)) for t in tensors), default=6))
    scale = f"rates {low:.0e} to {high:.0e}"
    titles = f"{'median':>8}{'signal/noise':>14}{'memory':>8}{'outliers':>10}  coordinates"
    lines = [f"{'tensor':<{longest}}  {scale:<{BAR}}  {titles}"]
    shown = tensors if len(tensors) <= room else tensors[: max(1, room - 1)]
    for t in shown:
        name = one_line(t.name)
        name = name if len(name) <= longest else "…" + name[1 - longest :]
        numbers = f"{t.rate:>8.1e}{t.signal_to_noise:>14.2g}{t.memory:>8.1f}{t.outliers:>10.1%}  {one_line(t.basis)}"
        lines.append(f"{name:<{longest}}  {rate_bar(t, low, high)}  {numbers}")
    if len(shown) < len(tensors):
        lines.append(f"… and {len(tensors) - len(shown)} more; enlarge the window or use --once to see them")
    return [line[:width] for line in lines]


def loss_line(records: list[Record], width: int) -> str:
    """Return the line about the loss."""
    known = [record for record in records if math.isfinite(record.loss)]
    if not known:
        return "loss       not known"
    lowest = min(known, key=lambda record: record.loss)
    line = sparkline([record.loss for record in known], min(48, max(8, width - 60)))
    return f"loss       {known[-1].loss:<10.4g} {line}  lowest {lowest.loss:.4g} at step {lowest.step:,}"


def view(reader: Reader, size: os.terminal_size, now: float, color: bool) -> str:
    """Return the text of the whole window."""

    def paint(text: str, code: str) -> str:
        return f"{code}{text}{END}" if color else text

    lines = [paint(one_line(reader.path)[: size.columns], BOLD)]
    if not (records := reader.records):
        return "\n".join([*lines, "no step has been recorded yet"])
    first, last = records[0], records[-1]
    elapsed = max(0.0, last.time - first.time)
    pace = f", {(last.step - first.step) / elapsed:.3g} steps/s" if elapsed > 0 else ""
    lines += [f"step       {last.step:<10,} {duration(elapsed)}{pace}", loss_line(records, size.columns)]
    lines.append(f"gradients  {f'{last.gradients:.2f}':<10} per step; {last.skipped} steps skipped")
    if math.isfinite(last.batch):
        lines.append(f"batch      ×{last.batch:<9.3g} the current size is worth using")
    messages = alarms(records)
    if len(records) > 2 and now - last.time > SILENT * max(1.0, elapsed / (len(records) - 1)):
        messages.append(f"nothing has been recorded for {duration(now - last.time)}: the run has ended or hangs")
    if reader.bad_lines:
        messages.append(f"{reader.bad_lines} lines of the log could not be read")
    lines += [paint(f"! {alarm}"[: size.columns], WARN) for alarm in messages] or [paint("no alarms", QUIET)]
    if not last.tensors:
        return "\n".join([*lines, "", "still starting: no tensor has been updated yet"])
    room = size.lines - OTHER_LINES - len(messages)
    return "\n".join([*lines, "", *tensor_lines(last.tensors, room, size.columns)])


def watch(arguments: argparse.Namespace) -> None:
    """Show a training run that RunLog records: loss, gradients per step, learning rates and noise of each tensor, the
    batch size worth using, and alarms. Ctrl-C ends the display; it does not affect training."""
    reader = Reader(arguments.run_file)
    reader.update()
    live = sys.stdout is not None and sys.stdout.isatty() and not arguments.once
    color = live and "NO_COLOR" not in os.environ
    if not live:
        print(view(reader, os.terminal_size((1000, 100_000)), time.time(), color))
        return
    try:
        while True:
            print(CLEAR + view(reader, shutil.get_terminal_size(), time.time(), color), flush=True)
            time.sleep(arguments.seconds)
            reader.update()
    except KeyboardInterrupt:
        print()


def add_watch_command(commands: Any) -> None:
    """Add the command to the result of `ArgumentParser.add_subparsers`."""
    command = commands.add_parser("watch", help="show a training run while it runs", description=watch.__doc__)
    command.add_argument("run_file", type=Path, metavar="RUN", help="the file that RunLog(opt, RUN) writes")
    command.add_argument("--once", action="store_true", help="print the current state with all tensors, and exit")
    command.add_argument("--seconds", type=positive_number, default=1.0, help="seconds between updates (default: 1)")
    command.set_defaults(run=watch)
