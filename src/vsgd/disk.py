"""Atomic writes, records with a checksum, and locks of folders."""

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
MAX_LINKS = 40
"""Maximum number of symbolic links that are followed, as in Linux."""


@contextlib.contextmanager
def _write_errors(path: Path | str) -> Iterator[None]:
    """Raise UserError for an error of writing, except for a pipe whose reader has ended."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. Choose another place.") from None


def descriptor_of(path: Path) -> int | None:
    """Return the file descriptor that a path such as /dev/stdout refers to, or None. `-` is standard output."""
    if str(path) == "-":
        return 1
    at = os.path.abspath(path)
    for _ in range(MAX_LINKS):
        if match := OPEN_FILE.fullmatch(at):
            return int(match[1])
        if not os.path.islink(at):
            return None
        at = os.path.abspath(os.path.join(os.path.dirname(at), os.readlink(at)))
    return None


def is_stream(path: Path) -> bool:
    """Return whether the path is a device, a pipe or an open file, rather than a regular file or a free name."""
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
    """Raise UserError unless the path is a regular file or a pipe. A device may have no end.

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
    """Yield a function that writes to `path`, or to standard output if it is None.

    A regular file is replaced atomically when all data is written. It keeps its mode and the symbolic links to it.
    Devices and pipes are written to directly.

    Raises:
        UserError: if the path cannot be written to.
    """
    if path is None or (number := descriptor_of(path)) == 1:
        with _into(_standard_output(), "standard output") as write:
            yield write
    elif is_stream(path):
        with _write_errors(path):
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
    """Close a flushed file on exit. Errors are ignored: if flushing failed, closing repeats that error."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.close()


@contextlib.contextmanager
def _into(stream: IO[bytes], name: str) -> Iterator[Write]:
    def write(data: bytes | memoryview) -> None:
        with _write_errors(name):
            stream.write(data)

    yield write
    with _write_errors(name):
        stream.flush()


def _final_mode(target: str) -> int:
    """Return the mode of the file to be replaced, or that of a new file."""
    if os.path.exists(target):
        return stat.S_IMODE(os.stat(target).st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def _prefix(target: str) -> str:
    """Return the prefix of temporary files for this target."""
    return f".vsgd-{hashlib.sha256(os.path.basename(target).encode(errors='surrogateescape')).hexdigest()[:8]}-"


def _lock(descriptor: int) -> bool:
    """Lock an open file until it is closed. Return False if another process has locked it."""
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
    """Return a new file that stays locked while it is open, so that other processes do not remove it."""
    while True:
        file = tempfile.NamedTemporaryFile(dir=folder, prefix=prefix, delete=False)  # noqa: SIM115
        if _lock(file.fileno()) and os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process removed it as stale before it was locked


def _remove_stale(folder: str, prefix: str) -> None:
    """Remove temporary files of killed writers of the same target: files of this user without a lock."""
    if fcntl is None:
        return
    for name in os.listdir(folder):
        if name.startswith(prefix):
            with contextlib.suppress(OSError):
                descriptor = os.open(os.path.join(folder, name), os.O_RDWR | os.O_NOFOLLOW)
                try:
                    if os.fstat(descriptor).st_uid == os.geteuid():
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if a process writes it
                        os.unlink(os.path.join(folder, name))
                finally:
                    os.close(descriptor)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """Yield a temporary file in the folder of the target, and the target: `path` with symbolic links resolved.

    Only its owner can read the temporary file.
    """
    target = os.path.realpath(path)
    with _write_errors(path):
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
        with _write_errors(path):
            os.fsync(file.fileno())
            os.chmod(file.name, _final_mode(target))
            os.replace(file.name, target)
            _sync_folder(os.path.dirname(target))


def _sync_folder(folder: str) -> None:
    """Flush a folder to disk, so that a new name survives a power failure. Some file systems cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def ensure_folder(folder: Path) -> None:
    """Create a folder and its parents.

    Raises:
        UserError: if that is not possible.
    """
    with _write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def check_writable(path: Path) -> None:
    """Raise UserError if `output` could not write to the path. Call it before a long computation."""
    if not is_stream(path):
        with _temporary(path):
            pass


def refuse_same(path: Path | None, other: Path, what: str) -> None:
    """Raise UserError if the output `path` is the input `other`."""
    with contextlib.suppress(OSError):
        if path is not None and os.path.isfile(path) and os.path.samefile(path, other):
            raise UserError(f"{path} is {what}, which would be overwritten. Choose another name.")


def write_whole(path: Path, content: bytes | memoryview | str, make_folder: bool = False) -> None:
    """Write a file atomically: readers see all of the content or none of it."""
    if make_folder:
        ensure_folder(path.parent)
    with output(path) as write:
        write(content.encode() if isinstance(content, str) else content)


def seal(record: dict[str, Any], indent: int | None = None) -> str:
    """Return a record as JSON that includes a checksum."""
    plain = json.loads(json.dumps(record))
    return json.dumps({**plain, "checksum": _checksum(plain)}, indent=indent, ensure_ascii=False)


def unseal(text: str | bytes) -> dict[str, Any]:
    """Return the record in a text that `seal` returned.

    Raises:
        ValueError: if the text is damaged.
    """
    try:
        record = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(record, dict) or record.pop("checksum", None) != _checksum(record):
        raise ValueError("its checksum is wrong")
    return record


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def write_checked(path: Path, record: dict[str, Any]) -> None:
    """Store a record of results with a checksum. Its folder is created if necessary."""
    write_whole(path, seal(record, indent=1) + "\n", make_folder=True)


def read_checked(path: Path) -> dict[str, Any] | None:
    """Return the record that `write_checked` stored, or None if it is missing or damaged. Damage is reported."""
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
    """Report a damaged file on standard error."""
    message = f"{path} is damaged ({why}) and not used. Its content is computed again if necessary."
    say(f"vsgd: {one_line(message)}")


@contextlib.contextmanager
def locked(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder.

    Args:
        folder: an existing folder.
        seconds: how long to wait for the lock.

    Raises:
        BlockingIOError: if another process or thread holds the lock for longer.
    """
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
            with contextlib.suppress(OSError):  # closing does not unlock if a forked process has the file open
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of results, so that no other process writes to it. It ends with the process.

    Raises:
        UserError: if another process holds the lock, or the folder is not writable.
    """
    ensure_folder(folder)
    check_writable(folder / "some file")
    with contextlib.ExitStack() as lock:
        with _write_errors(folder):
            try:
                lock.enter_context(locked(folder))
            except BlockingIOError as error:
                raise UserError(f"{error}. Wait for it, or choose another folder.") from None
        yield
