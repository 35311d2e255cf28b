"""Plain functions of this package compiled by numba, which is loaded when it is first needed.

The functions stay undecorated, so `import vsgd` is light and one text serves all array libraries. `compiled` registers
what a function calls with `numba.extending.register_jitable`. `kept` also keeps the machine code on disk, in a folder
whose name depends on the text of everything that the function reaches and on the types of the arguments. That cache is
optional in every sense: if it cannot be read or written, the function is compiled again, with one warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
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

from vsgd import core
from vsgd.disk import locked, write_whole
from vsgd.errors import UserError

NUMBA_SETTINGS = threading.Lock()
"""Held while numba's cache folder is set."""

UNUSED_DAYS = 30
"""Machine code that has not been used for this many days is removed."""

WAITING_SECONDS = 60.0
"""For this long a process waits for another one that compiles the same function; then it compiles for itself."""

NOTICE_SECONDS = 1.0
"""A compilation that takes longer is announced on stderr."""


def is_ours(value: Any, function: Callable[..., Any]) -> bool:
    """Return whether a function or module belongs to this package, or to the package of the function that uses it."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] in ("vsgd", function.__module__.partition(".")[0])


def names(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function refers to: globals, variables of the scope that it was defined in, attributes of our modules."""
    found = inspect.getclosurevars(function)
    values = {**found.globals, **found.nonlocals}
    modules = {name: value for name, value in values.items() if isinstance(value, types.ModuleType)}
    attributes = {
        f"{name}.{attribute}": getattr(module, attribute)
        for name, module in modules.items()
        if is_ours(module, function)
        for attribute in function.__code__.co_names
        if hasattr(module, attribute)
    }
    return {**values, **attributes}


def reached(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The function itself and the plain functions of this package that it calls, directly or not."""
    found: dict[Any, None] = {}
    pending: list[Any] = [function]
    while pending:
        candidate = pending.pop()
        if candidate not in found:
            found[candidate] = None
            pending.extend(
                value
                for value in names(candidate).values()
                if isinstance(value, types.FunctionType) and is_ours(value, candidate)
            )
    return list(found)


def digest(function: Callable[..., Any]) -> str:
    """A name for all that machine code depends on: texts, constants, and the fields of NamedTuples with their defaults.

    How it is sealed is part of it, so that versions that seal otherwise do not take each other's files for damaged.
    """
    parts = {inspect.getsource(checksum)}
    for each in reached(function):
        parts.add(inspect.getsource(each))
        options = sorted(getattr(each, "jit_options", {}).get("fastmath", ()))
        parts.add(f"{each.__module__}.{each.__name__}{each.__defaults__!r}{options}")
        for name, value in names(each).items():
            if not callable(value) and not isinstance(value, types.ModuleType):
                parts.add(f"{each.__module__}.{each.__name__}: {name}={value!r}")
        for value in vars(sys.modules[each.__module__]).values():
            if isinstance(value, type) and hasattr(value, "_fields"):
                parts.add(f"{value.__qualname__}{value._fields!r}{getattr(value, '_field_defaults', None)!r}")
    return hashlib.sha256("\0".join(sorted(parts)).encode()).hexdigest()[:16]


@functools.cache
def register(function: Callable[..., Any]) -> None:
    """Let compiled code call a plain function. Its attribute `jit_options`, if it has one, goes to numba."""
    from numba.extending import overload, register_jitable

    if function is core.square_root:  # a power would be taken in float64
        overload(function)(lambda x: lambda x: math.sqrt(x))
    else:
        register_jitable(error_model="numpy", **getattr(function, "jit_options", {}))(function)


def dispatcher_of(function: Callable[..., Any], cache: bool = False) -> Any:
    """Compiles a plain function of this package, and the plain functions that it calls, for each type of arguments.

    Compiled code is free of the interpreter lock, so loops run side by side in ordinary threads.
    """
    import numba

    for callee in reached(function):
        if callee is not function:
            register(callee)
    return numba.njit(function, nogil=True, error_model="numpy", cache=cache)


compiled = functools.cache(dispatcher_of)
"""A plain function, compiled when it is called."""


# --- machine code on disk -----------------------------------------------------------------------------------------


def cache_root() -> Path:
    """The folder for machine code, made if need be. OSError if others could write to it: its content will be run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(home) / "vsgd"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{root} belongs to another user or can be written by others")
    return root


def age(path: Path) -> float:
    """Seconds since the last change."""
    return time.time() - path.stat().st_mtime


def remove_unused(root: Path) -> None:
    """Remove machine code that nobody has used for a while, such as that of older versions of this package."""
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            if age(folder) > UNUSED_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)


def machine_code(folder: Path) -> Iterator[Path]:
    """The files that numba wrote, indices and object code, and whatever else has such a name."""
    return folder.rglob("*.nb?")


def seal_of(file: Path) -> Path:
    """The file that holds the checksum of another."""
    return file.with_name(file.name + ".sha256")


def checksum(file: Path) -> str:
    """Of the content and of where it is: machine code of another kernel is as wrong as damaged code."""
    place = "/".join(file.parts[-3:])
    return hashlib.sha256(place.encode() + b"\0" + file.read_bytes()).hexdigest()


def seal(folder: Path) -> None:
    """Note the checksums of new files, so that damage is seen before damaged machine code runs."""
    for file in machine_code(folder):
        if file.is_file() and not is_whole(file):
            write_whole(seal_of(file), checksum(file))  # other processes may be reading it


def is_whole(file: Path) -> bool:
    """Is the file what was sealed?"""
    return file.is_file() and seal_of(file).exists() and seal_of(file).read_bytes() == checksum(file).encode()


def clear(folder: Path) -> None:
    """Remove all machine code; other processes may be writing, so the folder stays."""
    for file in list(machine_code(folder)):
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)


def open_folder(name: str) -> Path:
    """A folder for machine code. OSError if there can be none."""
    root = cache_root()
    folder = root / name
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(OSError):  # a folder that cannot be written may still be read
        os.utime(folder)
        remove_unused(root)
    return folder


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes away meanwhile. Damaged files are removed before, new ones are sealed after."""
    with locked(folder, WAITING_SECONDS):
        if not all(map(is_whole, machine_code(folder))):
            warnings.warn(f"the cache of compiled code in {folder} is damaged; compiling again", stacklevel=4)
            clear(folder)
        yield
        with contextlib.suppress(OSError, UserError):
            seal(folder)


@contextlib.contextmanager
def announced(message: str) -> Iterator[None]:
    """Say on stderr what is happening if it takes long."""
    timer = threading.Timer(NOTICE_SECONDS, print, [message], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def code_for(dispatcher: Any, signature: tuple[Any, ...]) -> Any:
    """Machine code for these types of arguments: loaded if the dispatcher has a cache that holds it, else compiled."""
    dispatcher.compile(signature)
    if signature not in dispatcher.overloads:
        raise OSError("it has machine code for other types of arguments")
    return dispatcher.overloads[signature]


def caching(function: Callable[..., Any], folder: Path) -> Any:
    """A dispatcher with this folder as its cache."""
    import numba

    config: Any = numba.config
    with NUMBA_SETTINGS:
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            dispatcher = dispatcher_of(function, cache=True)
        finally:
            config.CACHE_DIR = before
    if folder not in Path(dispatcher.stats.cache_path).parents:
        raise PermissionError(f"{folder} cannot be written")  # numba chose a folder of its own
    return dispatcher


def load_or_compile(function: Callable[..., Any], text: str, signature: tuple[Any, ...]) -> Any:
    """Machine code of a function with this digest of its text, from the disk or for it, if possible.

    Each type of arguments has a folder of its own. Numba would keep an index of several, and processes that add to it
    at once may leave one that gives a type of arguments the machine code of another.
    """
    from numba.core.errors import NumbaError

    message = f"vsgd: compiling {function.__name__} for this processor"
    try:
        types_digest = hashlib.sha256(repr(signature).encode()).hexdigest()[:16]
        folder = open_folder(f"{function.__name__}-{text}-{types_digest}")
        dispatcher = caching(function, folder)
    except (OSError, RuntimeError) as error:
        with announced(f"{message}; the result cannot be kept ({error})"):
            return code_for(dispatcher_of(function), signature)
    is_there = any(machine_code(folder))  # to load it is nothing to announce
    notice = contextlib.nullcontext() if is_there else announced(f"{message}, once; later runs take it from the cache")
    try:
        with notice, alone_in(folder):
            return code_for(dispatcher, signature)
    except NumbaError:
        raise
    except Exception as error:  # whatever a file can raise that was neither written nor read as it should
        warnings.warn(f"the cache of compiled code in {folder} is not usable ({error}); compiling again", stacklevel=5)
        if not isinstance(error, BlockingIOError):
            with contextlib.suppress(OSError), locked(folder):
                clear(folder)
        with announced(message):
            return code_for(dispatcher_of(function), signature)


class Kernel:
    """A compiled function whose machine code is kept on disk where that is possible."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._lock = threading.RLock()
        self._dispatcher: Any = None

    def __call__(self, *args: Any) -> Any:
        if self._dispatcher is None:
            with self._lock:
                if self._dispatcher is None:
                    self._dispatcher = self._open()
        return self._dispatcher(*args)

    def _open(self) -> Any:
        """A dispatcher that takes machine code from the disk, for each type of arguments that it meets."""
        function, text = self.function, digest(self.function)
        if inspect.getclosurevars(function).nonlocals:
            # processes may compile it with other constants, and one load both: a name would mean two functions
            function.__qualname__ = f"{function.__name__}_{text}"
        dispatcher = dispatcher_of(function)

        def compile_once(signature: tuple[Any, ...]) -> Any:
            with self._lock:
                if signature not in dispatcher.overloads:
                    dispatcher.add_overload(load_or_compile(function, text, signature))
                return dispatcher.overloads[signature].entry_point

        dispatcher.compile = compile_once  # which every call with new types of arguments ends in
        return dispatcher


@functools.cache
def kept(function: Callable[..., Any]) -> Kernel:
    """`compiled`, with machine code kept on disk: for functions that take seconds to compile."""
    return Kernel(function)
