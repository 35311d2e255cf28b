"""Outputs of commands: complete files, links, devices and pipes. Inputs from pipes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading

import pytest
from command import refuses, succeeds
from processes import TIMEOUT

from vsgd.disk import output, write_whole
from vsgd.errors import UserError

COMMAND = [sys.executable, "-m", "vsgd"]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A data file and a model of it."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "d.svm").write_text("1 1:1\n2 2:1\n" * 50)
    succeeds("fit", folder / "d.svm", "--model", folder / "m.npz")
    return folder


def told(given):
    return succeeds("predict", given / "d.svm", "--model", given / "m.npz")


def run(*words, **options):
    return subprocess.run([*COMMAND, *map(str, words)], capture_output=True, timeout=TIMEOUT, **options)


def private_device(path, minor):
    """Create a copy of /dev/null (3) or /dev/full (7), since code with an error could replace the original as root."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    except OSError:
        pytest.skip("device nodes cannot be made here")
    return path


class TestPlaces:
    def test_a_device_is_written_to_not_replaced(self, given, tmp_path):
        device = private_device(tmp_path / "null", 3)
        succeeds("predict", given / "d.svm", "--model", given / "m.npz", "--out", device)
        succeeds("fit", given / "d.svm", "--model", device, "--passes", 2)
        assert stat.S_ISCHR(device.stat().st_mode)
        assert [entry.name for entry in tmp_path.iterdir()] == ["null"]

    def test_a_named_pipe_gets_all_of_it_once(self, given, tmp_path):
        fit = ["fit", given / "d.svm", "--model"]
        for words in (["predict", given / "d.svm", "--model", given / "m.npz", "--out"], fit):
            pipe, got = tmp_path / "pipe", []
            os.mkfifo(pipe)
            reader = threading.Thread(target=lambda pipe=pipe, got=got: got.append(pipe.read_bytes()))
            reader.start()
            succeeds(*words, pipe)
            reader.join(timeout=TIMEOUT)
            assert stat.S_ISFIFO(pipe.stat().st_mode)
            expected = told(given).encode() if words[0] == "predict" else (given / "m.npz").read_bytes()
            assert got == [expected]
            pipe.unlink()

    def test_a_link_stays_a_link_and_its_target_is_written(self, given, tmp_path):
        (tmp_path / "there").mkdir()
        link, target = tmp_path / "link", tmp_path / "there" / "target"
        link.symlink_to(target)
        succeeds("predict", given / "d.svm", "--model", given / "m.npz", "--out", link)
        assert link.is_symlink()
        assert target.read_text() == told(given)
        succeeds("fit", given / "d.svm", "--model", link)
        assert link.is_symlink()
        assert target.read_bytes() == (given / "m.npz").read_bytes()

    @pytest.mark.parametrize("how", ["same", "link", "hard link"])
    def test_the_data_are_not_overwritten_by_their_model(self, given, tmp_path, how):
        data, model = tmp_path / "d.svm", tmp_path / "m"
        data.write_bytes((given / "d.svm").read_bytes())
        if how == "same":
            model = data
        elif how == "link":
            model.symlink_to(data)
        else:
            model.hardlink_to(data)
        refuses("fit", data, "--model", model, saying="is the data file")
        refuses("predict", data, "--model", given / "m.npz", "--out", model, saying="is the data file")
        assert data.read_bytes() == (given / "d.svm").read_bytes()

    def test_predictions_do_not_overwrite_the_model(self, given):
        words = ["--model", given / "m.npz", "--out", given / "m.npz"]
        refuses("predict", given / "d.svm", *words, saying="is the model")

    @pytest.mark.parametrize("name", ["", ".", "/", "x" * 250, "x" * 5000, "missing/m", "d.svm/m", "/proc/m"])
    @pytest.mark.parametrize("option", ["--model", "--out"])
    def test_places_that_cannot_be_written_to(self, given, tmp_path, monkeypatch, name, option):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "d.svm").write_bytes((given / "d.svm").read_bytes())
        if option == "--model":
            words = ["fit", given / "d.svm", "--model", name]
        else:
            words = ["predict", given / "d.svm", "--model", given / "m.npz", "--out", name]
        if len(name) == 250:
            succeeds(*words)
            return
        refuses(*words)
        assert [entry.name for entry in tmp_path.iterdir()] == ["d.svm"]

    def test_nothing_is_left_or_written_through_a_planted_link(self, given, tmp_path):
        victim = tmp_path / "victim"
        victim.write_text("mine")
        for name in (".out.part", f".out.{os.getpid()}"):
            (tmp_path / name).symlink_to(victim)
        before = sorted(tmp_path.iterdir())
        succeeds("predict", given / "d.svm", "--model", given / "m.npz", "--out", tmp_path / "out")
        assert victim.read_text() == "mine"
        assert sorted([*before, tmp_path / "out"]) == sorted(tmp_path.iterdir())

    def test_modes(self, tmp_path):
        path = tmp_path / "file"
        before = os.umask(0o027)
        try:
            write_whole(path, "a")
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
            path.chmod(0o604)
            write_whole(path, "b")
            assert stat.S_IMODE(path.stat().st_mode) == 0o604
        finally:
            os.umask(before)

    def test_a_full_disk_leaves_what_was_there(self, given, tmp_path):
        """A limit on the size of files simulates a full disk."""
        out = tmp_path / "out"
        out.write_text("before")
        limited = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
        limited += "from vsgd.cli import main; sys.exit(main(sys.argv[1:]))"
        for words in (
            ["predict", given / "d.svm", "--model", given / "m.npz", "--out", out],
            ["fit", given / "d.svm", "--model", out],
        ):
            result = subprocess.run([sys.executable, "-c", limited, *map(str, words)], capture_output=True, text=True)
            assert result.returncode == 2, result.stderr
            assert result.stderr.count("\n") == 1
            assert out.read_text() == "before"
            assert list(tmp_path.iterdir()) == [out]

    def test_what_a_killed_writer_left_is_removed_by_the_next(self, tmp_path):
        code = "import os, sys; from pathlib import Path; from vsgd.disk import output\n"
        code += "with output(Path(sys.argv[1])) as write: write(b'half'); os.kill(os.getpid(), 9)"
        for name in ("a", "b"):
            subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], timeout=TIMEOUT)
        assert len(list(tmp_path.iterdir())) == 2
        (tmp_path / ".vsgd-of-mine").write_text("")
        write_whole(tmp_path / "a", b"whole")
        left = sorted(path.name for path in tmp_path.iterdir())
        assert len(left) == 3, "only what was left of `a` is removed"
        assert {".vsgd-of-mine", "a"} <= set(left)

    def test_what_another_writer_is_writing_is_left_alone(self, tmp_path):
        with output(tmp_path / "out") as write:
            write(b"first")
            write_whole(tmp_path / "out", b"second")
        assert (tmp_path / "out").read_bytes() == b"first"
        assert len(list(tmp_path.iterdir())) == 1

    def test_an_error_while_writing_removes_the_temporary_file(self, given, tmp_path):
        (tmp_path / "bad.svm").write_text("1 1:1\n" * 30_000 + "nonsense nonsense\n")
        refuses("predict", tmp_path / "bad.svm", "--model", given / "m.npz", "--out", tmp_path / "out", saying="30001")
        assert [entry.name for entry in tmp_path.iterdir()] == ["bad.svm"]

    def test_two_at_once_to_one_place(self, given, tmp_path):
        words = ["predict", given / "d.svm", "--model", given / "m.npz", "--out", tmp_path / "out"]
        processes = [subprocess.Popen([*COMMAND, *map(str, words)], stderr=subprocess.PIPE) for _ in range(2)]
        assert [(process.communicate()[1], process.returncode) for process in processes] == [(b"", 0)] * 2
        assert (tmp_path / "out").read_text() == told(given)
        assert len(list(tmp_path.iterdir())) == 1


class TestStandardOutput:
    """`link` simulates /dev/stdout."""

    @pytest.mark.parametrize("out", [None, "-", "link to link"])
    def test_by_any_name(self, given, tmp_path, monkeypatch, out):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "link").symlink_to("/proc/self/fd/1")
        (tmp_path / "link to link").symlink_to("link")
        words = ["predict", given / "d.svm", "--model", given / "m.npz", *(["--out", out] if out else [])]
        assert run(*words).stdout.decode() == told(given)
        log = tmp_path / "log"
        log.write_text("before\n")
        with log.open("a") as file:
            assert subprocess.run([*COMMAND, *map(str, words)], stdout=file, timeout=TIMEOUT).returncode == 0
        assert log.read_text() == "before\n" + told(given)
        assert os.readlink(tmp_path / "link") == "/proc/self/fd/1"

    def test_a_model(self, given, tmp_path):
        (tmp_path / "link").symlink_to("/proc/self/fd/1")
        result = run("fit", given / "d.svm", "--model", tmp_path / "link")
        assert result.stdout == (given / "m.npz").read_bytes()
        assert b"pass 5" in result.stderr

    def test_head_ends_it_quietly(self, given, tmp_path):
        (tmp_path / "long.svm").write_text("1 1:1\n" * 60_000)
        words = [*COMMAND, "predict", str(tmp_path / "long.svm"), "--model", str(given / "m.npz")]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout.readline() == b"1\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait() == 141

    def test_closed(self, given):
        words = f"{sys.executable} -m vsgd predict {given}/d.svm --model {given}/m.npz >&-"
        result = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=TIMEOUT)
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1

    def test_full(self, given, tmp_path):
        device = private_device(tmp_path / "full", 7)
        with device.open("w") as full:
            words = [*COMMAND, "score", str(given / "d.svm"), "--model", str(given / "m.npz")]
            result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
        refuses("predict", given / "d.svm", "--model", given / "m.npz", "--out", device, saying="No space")


class TestPipesToRead:
    """`predict` and `score` read data and models from pipes."""

    def test_standard_input(self, given):
        data = (given / "d.svm").read_bytes()
        for name in ("-", "/dev/stdin"):
            assert run("predict", name, "--model", given / "m.npz", input=data).stdout.decode() == told(given)
        assert b"accuracy 1" in run("score", "-", "--model", given / "m.npz", input=data).stdout

    def test_a_table(self, tmp_path):
        (tmp_path / "d.csv").write_text("a,y\n1,p\n-1,q\n" * 1 + "1,p\n-1,q\n" * 20)
        succeeds("fit", tmp_path / "d.csv", "--target", "y", "--model", tmp_path / "m.npz")
        result = run("predict", "-", "--model", tmp_path / "m.npz", input=b"a\n1\n-1\n")
        assert result.stdout == b"p\nq\n"

    def test_a_named_pipe(self, given, tmp_path):
        pipe = tmp_path / "pipe.svm"
        os.mkfifo(pipe)
        writer = threading.Thread(target=lambda: pipe.write_bytes((given / "d.svm").read_bytes()))
        writer.start()
        assert succeeds("predict", pipe, "--model", given / "m.npz") == told(given)
        writer.join(timeout=TIMEOUT)

    def test_fit_rejects_a_pipe_immediately(self, given, tmp_path):
        pipe = tmp_path / "pipe.svm"
        os.mkfifo(pipe)
        for name in (pipe, "-"):
            refuses("fit", name, "--model", tmp_path / "m.npz", saying="several times")

    def test_an_empty_one(self, given):
        result = run("score", "-", "--model", given / "m.npz", input=b"")
        assert result.returncode == 2
        assert b"no rows" in result.stderr


def test_messages_are_always_one_line(tmp_path):
    (tmp_path / "d\n2.svm").write_text("1 1:x\n")
    refuses("fit", tmp_path / "d\n2.svm", "--model", tmp_path / "m.npz", saying="d\\n2.svm")
    refuses("fit", tmp_path / "a\nb", "--model", tmp_path / "m.npz", "--seed", "1\n2")


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", "-1"],
        ["--seed", "9" * 23],
        ["--batch-size", "9" * 23],
        ["--hash-bits", "40"],
        ["--hash-bits", "9" * 5000],
        ["--chunk-rows", "0"],
    ],
)
def test_numbers_out_of_range(given, tmp_path, words):
    refuses("fit", given / "d.svm", "--model", tmp_path / "m.npz", *words)


def test_write_whole_names_what_it_cannot_write(tmp_path):
    with pytest.raises(UserError, match="missing"):
        write_whole(tmp_path / "missing" / "file", "")
