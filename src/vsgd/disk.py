"""Files that are whole or absent, records with a checksum, folders that one process at a time writes to."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from vsgd.errors import UserError, one_line, say

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

Write = Callable[[bytes | memoryview], object]

OPEN_FILE = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
MOST_LINKS = 40


@contextlib.contextmanager
def _told(path: Path | str) -> Iterator[None]:
    """Report an error of writing in one line. A reader that has gone away is no error."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. Choose another place.") from None


def descriptor_of(path: Path) -> int | None:
    """The open file that a path such as /dev/stdout stands for; `-` is standard output."""
    if str(path) == "-":
        return 1
    at = os.path.abspath(path)
    for _ in range(MOST_LINKS):
        if match := OPEN_FILE.fullmatch(at):
            return int(match[1])
        if not os.path.islink(at):
            return None
        at = os.path.abspath(os.path.join(os.path.dirname(at), os.readlink(at)))
    return None


def is_stream(path: Path) -> bool:
    """Whether the path is no regular file and none that could become one: a device, a pipe, an open file."""
    return descriptor_of(path) is not None or (path.exists() and not path.is_file() and not path.is_dir())


KINDS_REFUSED = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def _is_null_device(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev


def check_input(path: Path) -> None:
    """Refuse to read what is neither a regular file nor a pipe: a device may have no end.

    Standard input (`-` or /dev/stdin) may also be a terminal, a socket or the null device.
    """
    standard = str(path) == "-" or descriptor_of(path) == 0
    status = os.fstat(0) if str(path) == "-" else os.stat(path)
    if standard and (stat.S_ISSOCK(status.st_mode) or _is_null_device(status) or os.isatty(0)):
        return
    for is_kind, name in KINDS_REFUSED:
        if is_kind(status.st_mode):
            raise UserError(f"cannot read {path}: it is {name}. Name a regular file or a pipe.")


def open_input(path: Path) -> io.BufferedReader:
    """Open a regular file or a pipe for reading; `-` is standard input."""
    check_input(path)
    return open(0 if str(path) == "-" else path, "rb", closefd=str(path) != "-")


@contextlib.contextmanager
def output(path: Path | None) -> Iterator[Write]:
    """A function that writes to `path`, or to standard output.

    A regular file is replaced, mode and links to it kept, when all has been written; before, nobody sees anything of
    it. Whatever else is there is written to as it is.
    """
    if path is None or (number := descriptor_of(path)) == 1:
        with _into(_standard_output(), "standard output") as write:
            yield write
    elif is_stream(path):
        with _told(path):
            stream = open(path if number is None else os.dup(number), "wb")  # noqa: SIM115
        with _closing(stream), _into(stream, str(path)) as write:
            yield write
    else:
        with _replacing(path) as write:
            yield write


def _standard_output() -> IO[bytes]:
    if sys.stdout is None:
        raise UserError("cannot write to standard output: it is closed")
    sys.stdout.flush()
    return sys.stdout.buffer


@contextlib.contextmanager
def _closing(file: IO[bytes]) -> Iterator[None]:
    """Close what has been flushed. If flushing failed, closing fails once more, which is nothing new to say."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.close()


@contextlib.contextmanager
def _into(stream: IO[bytes], name: str) -> Iterator[Write]:
    def write(data: bytes | memoryview) -> None:
        with _told(name):
            stream.write(data)

    yield write
    with _told(name):
        stream.flush()


def _final_mode(target: str) -> int:
    """That of the file to be replaced, or the one that a new file would get."""
    if os.path.exists(target):
        return stat.S_IMODE(os.stat(target).st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def _prefix(target: str) -> str:
    """How the names of temporary files for this target begin."""
    return f".vsgd-{hashlib.sha256(os.path.basename(target).encode(errors='surrogateescape')).hexdigest()[:8]}-"


def _lock(descriptor: int) -> bool:
    """Lock an open file until it is closed, at the latest by the end of the process; False if it is locked already."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _locked_file(folder: str, prefix: str) -> IO[bytes]:
    """A new file that is locked as long as it is open, so that others see that somebody writes it."""
    while True:
        file = tempfile.NamedTemporaryFile(dir=folder, prefix=prefix, delete=False)  # noqa: SIM115
        if _lock(file.fileno()) and os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # somebody took it for a stale one before it was locked


def _remove_stale(folder: str, prefix: str) -> None:
    """Remove what writers of the same target left when they were killed: files of this user that nobody has locked."""
    if fcntl is None:
        return
    for name in os.listdir(folder):
        if name.startswith(prefix):
            with contextlib.suppress(OSError):
                descriptor = os.open(os.path.join(folder, name), os.O_RDWR | os.O_NOFOLLOW)
                try:
                    if os.fstat(descriptor).st_uid == os.geteuid():
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if somebody writes it
                        os.unlink(os.path.join(folder, name))
                finally:
                    os.close(descriptor)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A file beside what `path` finally names, readable by its owner alone, and that final name."""
    target = os.path.realpath(path)
    with _told(path):
        if os.path.isdir(target):
            raise UserError(f"cannot write {path}: it is a folder. Name a file.")
        if os.path.exists(target) and not os.access(target, os.W_OK):
            raise UserError(f"cannot write {path}: it is write-protected. Choose another place.")
        os.stat(os.path.dirname(target))
        with contextlib.suppress(FileNotFoundError):
            os.lstat(target)  # raises now if the name is too long
        prefix = _prefix(target)
        _remove_stale(os.path.dirname(target), prefix)
        file = _locked_file(os.path.dirname(target), prefix)
    try:
        with _closing(file):
            yield file, target
    finally:
        with contextlib.suppress(OSError):
            os.unlink(file.name)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Write]:
    with _temporary(path) as (file, target):
        with _into(file, str(path)) as write:
            yield write
        with _told(path):
            os.fsync(file.fileno())
            os.chmod(file.name, _final_mode(target))
            os.replace(file.name, target)
            _sync_folder(os.path.dirname(target))


def _sync_folder(folder: str) -> None:
    """So that the new name outlives a power cut; not every file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def ensure_folder(folder: Path) -> None:
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)


def check_writable(path: Path) -> None:
    """Tell now, rather than after the work, if `output` could not write here."""
    if not is_stream(path):
        with _temporary(path):
            pass


def refuse_same(path: Path | None, other: Path, what: str) -> None:
    """An output must not be what it is made of."""
    with contextlib.suppress(OSError):
        if path is not None and os.path.isfile(path) and os.path.samefile(path, other):
            raise UserError(f"{path} is {what}, which would be overwritten. Choose another name.")


def write_whole(path: Path, content: bytes | memoryview | str, make_folder: bool = False) -> None:
    """Whoever reads the file sees all or nothing."""
    if make_folder:
        ensure_folder(path.parent)
    with output(path) as write:
        write(content.encode() if isinstance(content, str) else content)


def seal(record: dict[str, Any], indent: int | None = None) -> str:
    """A record as JSON with a checksum in it."""
    plain = json.loads(json.dumps(record))
    return json.dumps({**plain, "checksum": _checksum(plain)}, indent=indent, ensure_ascii=False)


def unseal(text: str | bytes) -> dict[str, Any]:
    """The record, or a ValueError if this is not what `seal` made."""
    try:
        record = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(record, dict) or record.pop("checksum", None) != _checksum(record):
        raise ValueError("its contents are not what was written")
    return record


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def write_checked(path: Path, record: dict[str, Any]) -> None:
    """Store a record of results, its folder made if need be."""
    write_whole(path, seal(record, indent=1) + "\n", make_folder=True)


def read_checked(path: Path) -> dict[str, Any] | None:
    """The record that `write_checked` stored; None if there is none, or if it is damaged, which is said."""
    try:
        return unseal(path.read_bytes())
    except ValueError as error:
        say_damaged(path, error)
        return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def say_damaged(path: Path, why: object) -> None:
    message = f"{path} is damaged ({why}) and not used; what it held is computed again if need be."
    say(f"vsgd: {one_line(message)}")


@contextlib.contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder. BlockingIOError if another process, or thread, holds it for longer than this."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + seconds
        while not _lock(descriptor):
            if time.monotonic() >= end:
                raise BlockingIOError(f"another process is writing to {folder}")
            time.sleep(0.01)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # closing is not enough if a fork has it open, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing results to a folder meanwhile. The lock ends with the process at the latest."""
    ensure_folder(folder)
    check_writable(folder / "some file")
    with contextlib.ExitStack() as lock:
        with _told(folder):
            try:
                lock.enter_context(locked(folder))
            except BlockingIOError as error:
                raise UserError(f"{error}. Wait for it, or choose another folder.") from None
        yield
