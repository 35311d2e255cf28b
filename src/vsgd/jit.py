"""Compile plain functions of this package with numba, which is imported at first use.

The functions are not decorated, so `import vsgd` is fast, and the same code runs with all array libraries. `compiled`
registers the functions that a function calls with `numba.extending.register_jitable`. `cached_jit` also stores the
machine code on disk, in a folder whose name depends on the source of all these functions and on the types of the
arguments. If this cache cannot be read or written, the function is compiled again, with one warning. If another process
is compiling the function and takes longer than `WAITING_SECONDS`, it is compiled here too, without a warning.
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
"""Lock of the cache folder in numba's configuration."""

UNUSED_DAYS = 30
"""Machine code is removed after this many days without use."""

WAITING_SECONDS = 60.0
"""Maximum time to wait for another process that compiles the same function."""

NOTICE_SECONDS = 1.0
"""A message is printed if a compilation takes longer."""


def is_ours(value: Any, function: Callable[..., Any]) -> bool:
    """Return whether a function or module belongs to this package, or to the package of the function that uses it."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] in ("vsgd", function.__module__.partition(".")[0])


def names(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the values that a function refers to: globals, closure variables, and attributes of our modules."""
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
    """Return a function and the plain functions of this package that it calls, directly or indirectly."""
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
    """Return a digest of everything that machine code depends on: source, constants, and fields of NamedTuples.

    It includes the source of `checksum`. Versions with different checksums therefore use different folders.
    """
    others = {each.__name__: inspect.getsource(how) for each, how in COMPILED_AS.items()}
    parts = {inspect.getsource(checksum), inspect.getsource(register), repr(others)}
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


def compiled_clip(value: Any, limit: Any) -> Callable[..., Any]:
    """Return `core.clip` as two choices, each of which is one instruction. NaN stays NaN."""

    def clip(value: Any, limit: Any) -> Any:
        lowered = limit if limit < value else value
        return -limit if lowered < -limit else lowered

    return clip


def compiled_add_one(value: Any, condition: Any) -> Callable[..., Any]:
    """Return `core.add_one` as a choice. `value` is its numba type, which also converts the number 1."""
    number = value

    def add_one(value: Any, condition: Any) -> Any:
        return value + number(1) if condition else value

    return add_one


COMPILED_AS: dict[Callable[..., Any], Callable[..., Any]] = {
    # a power would be taken in float64
    core.square_root: lambda x: lambda x: math.sqrt(x),
    # a choice between two numbers is one instruction, a product with 0 or 1 several
    core.add_one: compiled_add_one,
    core.clip: compiled_clip,
    core.larger: lambda a, b: lambda a, b: b if b > a else a,
}
"""Functions that compiled code computes in another way, for numba's `overload`."""


@functools.cache
def register(function: Callable[..., Any]) -> None:
    """Register a plain function for calls from compiled code, with the numba options in its attribute `jit_options`.

    It is always inlined. A call would copy the pointers and shapes of all arrays in its NamedTuples to the stack.
    """
    from numba.extending import overload, register_jitable

    if function in COMPILED_AS:
        overload(function)(COMPILED_AS[function])
    else:
        register_jitable(error_model="numpy", forceinline=True, **getattr(function, "jit_options", {}))(function)


def dispatcher_of(function: Callable[..., Any], cache: bool = False) -> Any:
    """Return a numba dispatcher, which compiles a plain function and those it calls for each type of arguments.

    Compiled code releases the global interpreter lock, so that threads run in parallel.
    """
    import numba

    for callee in reached(function):
        if callee is not function:
            register(callee)
    return numba.njit(function, nogil=True, error_model="numpy", cache=cache)


compiled = functools.cache(dispatcher_of)
"""Return a plain function as a numba function that is compiled at its first call."""


# --- machine code on disk -----------------------------------------------------------------------------------------


def cache_root() -> Path:
    """Return the cache folder, and create it if necessary.

    Raises:
        OSError: if the folder cannot be created, or if other users can write to it, since its content is executed.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(home) / "vsgd"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{root} belongs to another user or can be written by others")
    return root


def age(path: Path) -> float:
    """Return the seconds since the last change of a file."""
    return time.time() - path.stat().st_mtime


def remove_unused(root: Path) -> None:
    """Remove machine code that has not been used for `UNUSED_DAYS`, such as that of older versions."""
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            if age(folder) > UNUSED_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)


def machine_code(folder: Path) -> Iterator[Path]:
    """Return the files with the suffixes of numba's indices and object code."""
    return folder.rglob("*.nb?")


def seal_of(file: Path) -> Path:
    """Return the path of the checksum of a file."""
    return file.with_name(file.name + ".sha256")


def checksum(file: Path) -> str:
    """Return a checksum of the content and the path of a file, since code of another function is also wrong."""
    place = "/".join(file.parts[-3:])
    return hashlib.sha256(place.encode() + b"\0" + file.read_bytes()).hexdigest()


def seal(folder: Path) -> None:
    """Write the checksums of new files, so that damaged machine code is detected before it runs."""
    for file in machine_code(folder):
        if file.is_file() and not is_whole(file):
            write_whole(seal_of(file), checksum(file))  # other processes may be reading it


def is_whole(file: Path) -> bool:
    """Return whether a file matches its checksum."""
    return file.is_file() and seal_of(file).exists() and seal_of(file).read_bytes() == checksum(file).encode()


def clear(folder: Path) -> None:
    """Remove all machine code in a folder, but not the folder, since other processes may be writing to it."""
    for file in list(machine_code(folder)):
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)


def open_folder(name: str) -> Path:
    """Return the folder for machine code of this name, and create it if necessary.

    Raises:
        OSError: if that is not possible.
    """
    root = cache_root()
    folder = root / name
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(OSError):  # a folder that cannot be written may still be read
        os.utime(folder)
        remove_unused(root)
    return folder


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Remove damaged files at the beginning, and write checksums of new files at the end."""
    with locked(folder, WAITING_SECONDS):
        if not all(map(is_whole, machine_code(folder))):
            warnings.warn(f"the cache of compiled code in {folder} is damaged; compiling again", stacklevel=4)
            clear(folder)
        yield
        with contextlib.suppress(OSError, UserError):
            seal(folder)


@contextlib.contextmanager
def announced(message: str) -> Iterator[None]:
    """Print a message to standard error if the context takes longer than `NOTICE_SECONDS`."""
    timer = threading.Timer(NOTICE_SECONDS, print, [message], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def code_for(dispatcher: Any, signature: tuple[Any, ...]) -> Any:
    """Return machine code for these types of arguments, from the cache of the dispatcher or compiled."""
    dispatcher.compile(signature)
    if signature not in dispatcher.overloads:
        raise OSError("it has machine code for other types of arguments")
    return dispatcher.overloads[signature]


def caching(function: Callable[..., Any], folder: Path) -> Any:
    """Return a dispatcher whose cache is this folder."""
    import numba

    config: Any = numba.config
    with NUMBA_SETTINGS:
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            dispatcher = dispatcher_of(function, cache=True)
        finally:
            config.CACHE_DIR = before
    if folder not in Path(dispatcher.stats.cache_path).parents:
        raise PermissionError(f"{folder} cannot be written")  # numba has chosen another folder
    return dispatcher


def load_or_compile(function: Callable[..., Any], text: str, signature: tuple[Any, ...]) -> Any:
    """Return machine code of a function. Load it from disk, or compile it and store it if possible.

    Each type of arguments has a separate folder. In a shared folder, numba keeps an index of all types. Processes that
    write this index at the same time can assign machine code to the wrong type.

    Args:
        function: the function.
        text: digest of its source.
        signature: numba types of the arguments.
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
    is_there = any(machine_code(folder))  # loading needs no message
    notice = contextlib.nullcontext() if is_there else announced(f"{message}, once; later runs take it from the cache")
    try:
        with notice, alone_in(folder):
            return code_for(dispatcher, signature)
    except NumbaError:
        raise
    except BlockingIOError:
        pass  # the cache is intact, and another process is still compiling this function
    except Exception as error:  # damaged files can raise any exception
        warnings.warn(f"the cache of compiled code in {folder} is not usable ({error}); compiling again", stacklevel=5)
        with contextlib.suppress(OSError), locked(folder):
            clear(folder)
    with announced(message):
        return code_for(dispatcher_of(function), signature)


class Kernel:
    """A compiled function whose machine code is stored on disk if possible."""

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
        """Return a dispatcher that loads machine code from disk for each new type of arguments."""
        function, text = self.function, digest(self.function)
        if inspect.getclosurevars(function).nonlocals:
            # closures with different constants need different names, since one process may load both
            function.__qualname__ = f"{function.__name__}_{text}"
        dispatcher = dispatcher_of(function)

        def compile_once(signature: tuple[Any, ...]) -> Any:
            with self._lock:
                if signature not in dispatcher.overloads:
                    dispatcher.add_overload(load_or_compile(function, text, signature))
                return dispatcher.overloads[signature].entry_point

        dispatcher.compile = compile_once  # called for every new type of arguments
        return dispatcher


@functools.cache
def cached_jit(function: Callable[..., Any]) -> Kernel:
    """Return a compiled function whose machine code is stored on disk, for functions that compile for seconds."""
    return Kernel(function)
