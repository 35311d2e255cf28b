"""`vsgd watch`: growing logs, truncated logs, other files, and messages about a run."""

from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
import time

import pytest
from command import refuses, succeeds
from processes import TIMEOUT

from vsgd.errors import UserError
from vsgd.integrations import run_file
from vsgd.integrations.alarms import alarms
from vsgd.integrations.run_file import HEADER, Reader, Record, TensorRecord, from_line, to_line
from vsgd.integrations.watch import duration, sparkline, tensor_lines, view

WIDE = os.terminal_size((200, 60))


def tensor(name="layer", rate=0.01, signal_to_noise=0.1, outliers=0.0):
    return TensorRecord(name, "eigenbasis 3 x 4", rate / 10, rate, rate * 10, 20.0, signal_to_noise, outliers)


def record(step, loss=1.0, skipped=0, tensors=(), **changes):
    whole = Record(step, 1e9 + step, 20, loss, 1.1, skipped, math.nan, tuple(tensors))
    return whole._replace(**changes)


def log_of(path, records):
    before = [None, *records]
    path.write_text("\n".join([HEADER, *map(to_line, records, before), ""]))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def shown(path, size=WIDE, now=0.0):
    reader = Reader(path)
    reader.update()
    return view(reader, size, now, color=False)


def test_a_line_is_read_as_it_was_written():
    here = record(20, tensors=[tensor("a"), tensor("b")], batch=2.5)
    assert from_line(to_line(here, None), []) == here
    assert "names" not in to_line(here, here)
    assert from_line(to_line(here, here), here.names) == here
    nothing = record(20, loss=math.inf)
    assert math.isnan(from_line(to_line(nothing, None), []).loss)


def test_what_is_shown(path):
    records = [record(20 * k, loss=1 / k, tensors=[tensor("first"), tensor("second", 1.0)]) for k in range(1, 9)]
    log_of(path, [*records[:-1], records[-1]._replace(batch=2.5)])
    text = shown(path)
    for words in (
        "step       160",
        "loss       0.125",
        "lowest 0.125 at step 160",
        "1.10",
        "0 steps skipped",
        "no alarms",
    ):
        assert words in text
    assert "×2.5       the current size is worth using" in text
    first, second = (line for line in text.splitlines() if line.startswith(("first", "second")))
    assert "eigenbasis 3 x 4" in first
    assert first.index("●") < second.index("●"), "rates of all tensors have one scale"
    assert "worth using" not in shown(log_of(path, records))


class TestGrowing:
    def test_line_by_line(self, path):
        text = log_of(path, [record(20), record(40)]).read_text()
        path.write_text("")
        reader, found = Reader(path), []
        for end in range(len(text) + 1):
            path.write_text(text[:end])
            reader.update()
            found.append([r.step for r in reader.records])
        assert found[-1] == [20, 40]
        assert found[-2] == [20], "a half-written line waits for its end"
        assert not reader.bad_lines

    def test_a_new_run_in_its_place(self, path):
        reader = Reader(log_of(path, [record(20), record(40)]))
        reader.update()
        log_of(path, [record(60)])
        reader.update()
        assert [r.step for r in reader.records] == [60]

    def test_taken_up_again_from_a_checkpoint_after_a_crash(self, path):
        log_of(path, [record(20), record(40), record(60)])
        with path.open("a") as file:
            file.write('{"step": 80, "ti\n' + HEADER + "\n" + to_line(record(40, loss=0.5), None) + "\n")
        reader = Reader(path)
        reader.update()
        assert [(r.step, r.loss) for r in reader.records] == [(20, 1.0), (40, 0.5)]
        assert reader.bad_lines == 1
        assert "1 lines of the log could not be read" in shown(path)

    def test_skipped_steps_do_not_take_the_last_good_one_away(self, path):
        reader = Reader(log_of(path, [record(8), record(9), record(9, loss=math.nan), record(9, loss=math.nan)]))
        reader.update()
        assert [r.step for r in reader.records] == [8, 9, 9, 9]

    def test_old_records_give_up_their_tensors(self, path):
        reader = Reader(log_of(path, [record(k, tensors=[tensor()]) for k in range(1, 9)]))
        reader.update()
        assert [len(r.tensors) for r in reader.records] == [0] * 5 + [1] * 3


class TestOddFiles:
    @pytest.mark.parametrize("content", ["", HEADER[:10], HEADER, HEADER + "\n"])
    def test_nothing_yet(self, path, content):
        path.write_text(content)
        assert "no step has been recorded yet" in shown(path)

    @pytest.mark.parametrize("content", [b"{}", b"hello", b"\x00\xff" * 500, b'{"a": 1}\n' * 50, b"\n"])
    def test_foreign(self, path, content):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not the log of a run"):
            Reader(path).update()

    @pytest.mark.parametrize(
        "line", ["{}", "[]", "3", "null", "\udcff", '{"step": "x"}', "[" * 10_000, to_line(record(40), None)[:-3]]
    )
    def test_damaged_lines_are_counted(self, path, line):
        log_of(path, [record(20)])
        with path.open("a", errors="surrogateescape") as file:
            file.write(line + "\n" + to_line(record(60), None) + "\n")
        text = shown(path)
        assert "step       60" in text
        assert "1 lines of the log could not be read" in text

    def test_names_that_are_lost(self, path):
        here = record(20, tensors=[tensor("a")])
        path.write_text("\n".join([HEADER, to_line(here, here), ""]))
        assert "tensor 0" in shown(path)

    def test_the_command(self, path, tmp_path):
        refuses("watch", path, saying="there is no")
        refuses("watch", tmp_path)
        refuses("watch", path, "--seconds", "0", saying="above 0")
        log_of(path, [record(20)])
        assert "still starting" in succeeds("watch", path)


class TestAlarms:
    def test_none(self):
        assert alarms([]) == []
        assert alarms([record(20 * k, tensors=[tensor("a"), tensor("b"), tensor("c")]) for k in range(30)]) == []

    def test_not_finite(self):
        records = [record(20 * k, skipped=3 * (k >= 8)) for k in range(10)]
        assert alarms(records) == [
            "the loss or its gradient was not finite in 3 of the last 100 steps, which were skipped"
        ]
        assert alarms([*records, *(record(20 * k, skipped=3) for k in range(10, 20))]) == []

    def test_a_rising_loss(self):
        losses = [1.0, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.4, 0.4, 0.4, 0.4, 0.4]
        (said,) = alarms([record(20 * k, loss=loss) for k, loss in enumerate(losses)])
        assert said == "the loss has risen to 0.4, 4.0 times its lowest at step 120"
        assert alarms([record(20 * k, loss=-loss) for k, loss in enumerate(losses)]) == []

    def test_no_gradient_and_no_curvature(self):
        flat, dead = tensor("flat", rate=1e5), tensor("dead", rate=0.0, signal_to_noise=0.0)
        said = alarms([record(20, tensors=[tensor("a"), tensor("b"), tensor("c"), flat, dead])])
        assert said == [
            "no gradient reaches dead",
            "almost no curvature in flat: only the step limits bound its steps",
        ]

    def test_data_that_changed(self):
        records = [record(20 * k, tensors=[tensor("a", outliers=0.5 * (k > 5))]) for k in range(9)]
        assert alarms(records[:8]) == []
        assert alarms(records) == ["many outliers in a: the data may have changed"]

    def test_silence(self, path):
        log_of(path, [record(20 * k) for k in range(1, 9)])
        assert "nothing has been recorded" not in shown(path, now=1e9 + 160 + 100)
        assert "nothing has been recorded for 16 min 40 s" in shown(path, now=1e9 + 160 + 1000)


def test_narrow_and_low_terminals(path):
    log_of(
        path,
        [record(20 * k, tensors=[tensor(f"layers.{i}.attention.output.weight") for i in range(99)]) for k in (1, 2)],
    )
    lines = shown(path, os.terminal_size((60, 24))).splitlines()
    assert max(map(len, lines)) <= 60
    assert len(lines) <= 24
    assert "more" in lines[-1]
    assert len(tensor_lines((tensor("x" * 99),), 5, 200)) == 2


def test_small_things():
    assert sparkline([1, 2, 4, 8], 4) == "▁▃▆█"
    assert sparkline([3.0] * 5, 3) == "▁▁▁"
    assert sparkline([math.nan], 3) == ""
    assert duration(59) == "59 s"
    assert duration(3600 * 25 + 61) == "25 h 1 min"


def test_live_in_a_terminal(path):
    """The display is redrawn as the file grows, until Ctrl-C."""
    log_of(path, [record(20)])
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vsgd", "watch", str(path), "--seconds", "0.1"]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, stdin=theirs, start_new_session=True)
    os.close(theirs)
    os.set_blocking(ours, False)
    seen, deadline = b"", time.monotonic() + 600
    try:
        for wanted in (b"step       20", b"step       40"):
            while wanted not in seen and time.monotonic() < deadline:
                time.sleep(0.05)
                try:
                    seen += os.read(ours, 100_000)
                except BlockingIOError:
                    continue
            assert wanted in seen
            with path.open("a") as file:
                file.write(to_line(record(40), None) + "\n")
        process.send_signal(2)
        assert process.wait(timeout=TIMEOUT) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        os.close(ours)


def with_field(name, value):
    """Return a line of a log with one field replaced by other JSON."""
    fields = json.loads(to_line(record(40, tensors=[tensor("a")]), None))
    return json.dumps({**fields, name: "?"}).replace('"?"', value)


class TestHostileLogs:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *((name, value) for name in ("step", "steps", "skipped") for value in ("NaN", "-1", "1.5", "true", '"3"')),
            *((name, "9" * 400) for name in ("step", "steps", "skipped", "time")),
            *(
                (name, value)
                for name in ("time", "loss", "gradients", "batch")
                for value in ("NaN", "Infinity", "-Infinity", "1e999", "[]", "{}", '"x"', "false")
            ),
            ("time", "null"),
            ("time", "1e300"),
            ("time", "-1"),
            ("gradients", "-1"),
            ("names", "3"),
            ("names", '["ab"]'),
            ("names", "[[1, 2]]"),
            ("names", "[[]]"),
            ("names", '{"a": "b"}'),
            ("tensors", "3"),
            ("tensors", "null"),
            ("tensors", "[3]"),
            ("tensors", "[[]]"),
            ("tensors", "[[1, 1, 1, 1, 1]]"),
            ("tensors", "[[NaN, 1, 1, 1, 1, 1]]"),
            ("tensors", "[[1, -1, 1, 1, 1, 1]]"),
            ("tensors", '[["1", 1, 1, 1, 1, 1]]'),
            ("tensors", '["abcdef"]'),
        ],
    )
    def test_a_field_of_another_type_or_range_is_a_bad_line(self, path, name, value):
        log_of(path, [record(20)])
        with path.open("a") as file:
            file.write(with_field(name, value) + "\n")
        text = succeeds("watch", path)
        assert "step       20" in text
        assert "1 lines of the log could not be read" in text

    @pytest.mark.parametrize("value", ["null", "1e101", "-1e300", "9" * 200, "5e-324", "0", "-3"])
    def test_any_loss_is_shown(self, path, value):
        path.write_text("\n".join([HEADER, *[with_field("loss", value)] * 20, ""]))
        assert "step       40" in succeeds("watch", path)

    @pytest.mark.parametrize(
        "rates",
        [
            "null, 1, 1",
            "null, null, 1",
            "1, null, 2",
            "0, 0, 0",
            "5e-324, 1e-320, 1e-310",
            "0, 1e-300, 1e99",
            "9, 5, 1",
        ],
    )
    def test_any_rates_are_drawn(self, path, rates):
        path.write_text(f"{HEADER}\n" + with_field("tensors", f"[[{rates}, null, null, null]]") + "\n")
        assert "eigenbasis" in succeeds("watch", path)

    @pytest.mark.parametrize("name", ["\x1b[2J", "a\rb", "\x9b31m", "\u202e", "\ud800", "\x00", "a\nb"])
    def test_nothing_is_printed_raw(self, tmp_path, name):
        path = tmp_path / f"run{name}.jsonl" if "\x00" not in name and name != "\ud800" else tmp_path / "run.jsonl"
        dead = tensor(name, rate=0.0, signal_to_noise=0.0)._replace(basis=name)
        lines = json.dumps({**json.loads(to_line(record(20, tensors=[dead]), None)), "names": [[name, name]]})
        path.write_text(f"{HEADER}\n{lines}\n")
        text = succeeds("watch", path)
        assert all(c == "\n" or c.isprintable() for c in text)
        assert text.count(repr(name)[1:-1]) >= 3, "escaped in the table, and in the alarm"

    def test_a_line_without_end_is_passed_over(self, path, monkeypatch):
        monkeypatch.setattr(run_file, "MAX_LINE", 1000)
        monkeypatch.setattr(run_file, "BLOCK", 64)
        log_of(path, [record(20)])
        with path.open("a") as file:
            file.write("[" * 5000 + "\n" + to_line(record(40), None) + "\n" + "x" * 5000)
        reader = Reader(path)
        reader.update()
        assert [r.step for r in reader.records] == [20, 40]
        assert reader.bad_lines == 2
        assert len(reader._rest) <= 1064

    def test_records_of_a_long_log_are_thinned_out(self, path, monkeypatch):
        monkeypatch.setattr(run_file, "MAX_RECORDS", 100)
        reader = Reader(log_of(path, [record(k) for k in range(1, 2000)]))
        reader.update()
        steps = [r.step for r in reader.records]
        assert len(steps) <= 100
        assert steps[0] == 1
        assert steps[-50:] == [*range(1950, 2000)]
        assert steps == sorted(steps)

    def test_only_a_regular_file_is_a_log(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe", "/dev/zero", "/dev/null"):
            refuses("watch", path, saying="not a regular file")
