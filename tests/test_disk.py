"""Records with a checksum, and locks of folders."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vsgd.disk import only_writer, read_checked, seal, unseal, write_checked
from vsgd.errors import UserError

RECORD = {"final": 0.0092, "curve": [1.5, float("inf"), 1e-300], "name": "η", "setting": None, "counts": {"a": 3}}


def test_a_record_comes_back(tmp_path):
    path = tmp_path / "new" / "r.json"
    assert read_checked(path) is None
    write_checked(path, RECORD)
    assert read_checked(path) == RECORD
    assert unseal(seal({1: (2, 3)})) == {"1": [2, 3]}


def test_any_changed_byte_is_noticed(tmp_path, capsys):
    path = tmp_path / "r.json"
    write_checked(path, RECORD)
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        assert read_checked(path) in (None, RECORD)
        assert capsys.readouterr().err.count("\n") <= 1
    path.write_bytes(content.replace(b"0.0092", b"9.0092"))
    assert read_checked(path) is None
    assert "r.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"3", b"[" * 100_000, b'{"checksum": 3}', b"\xff\xfe", b"null"])
def test_something_else_is_no_record(tmp_path, capsys, content):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    assert read_checked(path) is None
    assert capsys.readouterr().err.count("\n") == 1


def test_second_process_raises_an_error(tmp_path):
    code = "import sys; from pathlib import Path; from vsgd.disk import only_writer\n"
    code += "with only_writer(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout.readline() == "in\n"
    with pytest.raises(UserError, match="another process"), only_writer(tmp_path):
        pass
    first.kill()
    first.communicate()
    with only_writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
