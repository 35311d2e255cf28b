"""Plain functions of this package compiled by numba, which is loaded when it is first needed.

The functions stay undecorated, so `import vsgd` is light and one text serves all array libraries. `compiled` registers
what a function calls with `numba.extending.register_jitable`. `kept` also keeps the machine code on disk, in a folder
whose name depends on the text of everything that the function reaches. That cache is optional in every sense: if it
cannot be read or written, the function is compiled anew, with one warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import shutil
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUMBA_SETTINGS = threading.Lock()
"""Held while numba's cache folder is set."""

UNUSED_DAYS = 30
"""Machine code of other versions of a function is removed when it has not been used for so long."""

NOTICE_SECONDS = 1.0
"""A compilation that takes longer is announced on stderr."""


def callees(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function refers to by name, in its globals and in the scope that it was defined in."""
    found = inspect.getclosurevars(function)
    return {**found.globals, **found.nonlocals}


def reached(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The plain functions of this package that a function calls, directly or not, and itself."""
    found: dict[Any, None] = {}
    pending: list[Any] = [function]
    while pending:
        candidate = pending.pop()
        ours = isinstance(candidate, types.FunctionType) and candidate.__module__.startswith("vsgd.")
        if candidate not in found and (ours or candidate is function):
            found[candidate] = None
            pending.extend(callees(candidate).values())
    return list(found)


def digest(function: Callable[..., Any]) -> str:
    """A name for the text of all that a function reaches, and for the constants that it was defined with."""
    texts = sorted(inspect.getsource(each) for each in reached(function))
    constants = [
        f"{name}={value!r}"
        for each in reached(function)
        for name, value in sorted(inspect.getclosurevars(each).nonlocals.items())
        if not callable(value)
    ]
    return hashlib.sha256("\0".join(texts + sorted(constants)).encode()).hexdigest()[:16]


@functools.cache
def register(function: Callable[..., Any]) -> None:
    """Let compiled code call a plain function. Its attribute `jit_options`, if it has one, goes to numba."""
    from numba.extending import register_jitable

    register_jitable(error_model="numpy", **getattr(function, "jit_options", {}))(function)


@functools.cache
def compiled(function: Callable[..., Any], cache: bool = False) -> Any:
    """Compile a plain function of this package together with the plain functions that it calls.

    Compiled code is free of the interpreter lock, so loops run side by side in ordinary threads.
    """
    import numba

    for callee in reached(function):
        if callee is not function:
            register(callee)
    return numba.njit(function, nogil=True, error_model="numpy", cache=cache)


# --- machine code on disk -----------------------------------------------------------------------------------------


def cache_root() -> Path | None:
    """The folder for machine code, made if need be. None if it is not ours alone: it will be run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(home) / "vsgd"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except (OSError, RuntimeError):
        return None
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return None
    return root


def remove_unused(folder: Path) -> None:
    """Remove machine code of other versions of the same function that nobody has used for a while."""
    name = folder.name.rpartition("-")[0]
    for other in folder.parent.glob(f"{name}-*"):
        with contextlib.suppress(OSError):
            if other != folder and time.time() - other.stat().st_mtime > UNUSED_DAYS * 86400:
                shutil.rmtree(other, ignore_errors=True)


def seal_of(file: Path) -> Path:
    return file.with_name(file.name + ".sha256")


def checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def seal(folder: Path) -> None:
    """Note the checksums of all files, so that damage is seen before damaged machine code runs."""
    for file in machine_code(folder):
        seal_of(file).write_text(checksum(file))


def machine_code(folder: Path) -> Iterator[Path]:
    """The files that numba wrote: indices and object code."""
    return (file for file in folder.rglob("*.nb?") if file.is_file())


def discard_damaged(folder: Path) -> None:
    """Remove all machine code of a folder if any of its files is not what was sealed."""
    try:
        whole = all(seal_of(file).read_text() == checksum(file) for file in machine_code(folder))
    except (OSError, UnicodeDecodeError):
        whole = False
    if not whole:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def announce(name: str) -> None:
    print(f"vsgd: compiling {name} for this processor, once; later runs take it from the cache", file=sys.stderr)


class Kernel:
    """A compiled function whose machine code is kept on disk where that is possible."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.folder: Path | None = None
        self._overloads = 0
        self._dispatcher: Any = None

    def __call__(self, *args: Any) -> Any:
        if self._dispatcher is None:
            self._open()
        timer = None
        if not self._overloads:
            timer = threading.Timer(NOTICE_SECONDS, announce, [self.function.__name__])
            timer.daemon = True
            timer.start()
        try:
            result = self._dispatcher(*args)
        except Exception as error:
            if self.folder is None or type(error).__module__.startswith("numba"):
                raise  # not the cache: numba cannot compile this, or the function itself raised
            self._do_without(error)
            result = self._dispatcher(*args)
        finally:
            if timer is not None:
                timer.cancel()
        if len(self._dispatcher.overloads) != self._overloads:
            self._overloads = len(self._dispatcher.overloads)
            self._seal()
        return result

    def _open(self) -> None:
        """Compile with a cache folder of our own if there can be one."""
        import numba

        config: Any = numba.config
        name = f"{self.function.__name__}-{digest(self.function)}"
        if inspect.getclosurevars(self.function).nonlocals:
            # processes may compile it with other constants, and one load both: a name would stand for two functions
            self.function.__qualname__ = name.replace("-", "_")
        root = cache_root()
        if root is not None:
            folder = root / name
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                os.utime(folder)
                discard_damaged(folder)
                remove_unused(folder)
                with NUMBA_SETTINGS:
                    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
                    try:
                        self._dispatcher = compiled(self.function, cache=True)
                    finally:
                        config.CACHE_DIR = before
                self.folder = folder
                return
            except (OSError, RuntimeError):
                pass  # nowhere to write
        self._dispatcher = compiled(self.function)

    def _do_without(self, error: Exception) -> None:
        """Go on without the cache: reading or writing it has failed."""
        assert self.folder is not None
        shutil.rmtree(self.folder, ignore_errors=True)
        message = f"the cache of compiled code in {self.folder} is not usable ({error}); compiling anew"
        warnings.warn(message, stacklevel=3)
        self.folder = None
        self._overloads = 0
        self._dispatcher = compiled(self.function)

    def _seal(self) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):
                seal(self.folder)


@functools.cache
def kept(function: Callable[..., Any]) -> Kernel:
    """`compiled`, with machine code kept on disk: for functions that take seconds to compile."""
    return Kernel(function)
