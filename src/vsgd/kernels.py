"""numba, loaded when it is first needed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBA_SETTINGS = threading.Lock()
"""To be held by whoever changes them for a moment."""


def once(make: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """Like `functools.cache`, but constants are the same only if they read the same.

    1.0 equals a float32 of 1, also within a tuple, and yet other machine code comes of it.
    """
    made: dict[tuple[Callable[..., Any], str], Callable[..., Any]] = {}

    @functools.wraps(make)
    def get(function: Callable[..., Any], **constants: Any) -> Callable[..., Any]:
        key = function, repr(constants)
        if key not in made:
            made[key] = make(function, **constants)
        return made[key]

    return get


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a plain function of this package, and the plain functions of this package that it calls.

    The rule stays importable without numba, and its one text is also the body of every fused loop. Compiled
    code is free of the interpreter lock, so loops run side by side in ordinary threads.
    """
    return compiled_with(function)


def digest_of(constants: dict[str, Any]) -> str:
    """The same in every process: functions count by their names."""
    names = {name: getattr(value, "__qualname__", value) for name, value in constants.items()}
    return hashlib.sha256(repr(names).encode()).hexdigest()[:16]


def calling(
    function: Callable[..., Any], compile: Callable[..., Callable[..., Any]], **constants: Any
) -> Callable[..., Any]:
    """A copy of a plain function that calls compiled functions instead of plain ones of this package.

    Some of its globals are set to `constants`, and so are those of its callees that have a global of that name. They
    are part of its own name: had two processes compiled two functions of one name, and a third loaded both from disk,
    its linker would take one for the other.
    """
    scope = {**function.__globals__, **constants}
    for name in function.__code__.co_names:
        callee = scope.get(name)
        if isinstance(callee, types.FunctionType) and callee.__module__.startswith("vsgd."):
            scope[name] = compile(callee, **{n: value for n, value in constants.items() if n in callee.__globals__})
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    if constants:
        copy.__qualname__ += "_" + digest_of(constants)
    return copy


@once
def compiled_with(function: Callable[..., Any], **constants: Any) -> Callable[..., Any]:
    """The same, with some globals set to values that the compiler then knows."""
    import numba

    return numba.njit(calling(function, compiled_with, **constants), nogil=True, error_model="numpy")  # type: ignore[no-any-return]


@functools.cache
def matrix_at() -> Callable[..., Any]:
    """For compiled code: a matrix of so many rows and columns, so many numbers behind an address, of an array's kind.

    Handing over an array takes longer than a small one takes to work on; its address is a number.
    """
    import numba
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    carray: Any = vars(numba)["carray"]

    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return types.voidptr(address), generate

    as_pointer: Any = intrinsic(pointer)

    def matrix(address: int, first: int, rows: int, columns: int, like: Any) -> Any:
        return carray(as_pointer(address + first * like.itemsize), (rows, columns), like.dtype)

    return numba.njit(matrix)  # type: ignore[no-any-return]


@functools.cache
def cache_folder() -> Path:
    """Where machine code is kept between runs: a folder for this very text of the package.

    numba notices when the file of a function changes, but not when that of a function it calls does.
    """
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "vsgd" / digest[:16]


@once
def kept(function: Callable[..., Any], **constants: Any) -> Callable[..., Any]:
    """`compiled_with`, and stored on disk: for functions that take seconds to compile."""
    import numba.core.config

    dispatcher: Any = compiled_with(function, **constants)
    config: Any = numba.core.config
    with NUMBA_SETTINGS, contextlib.suppress(OSError, RuntimeError):  # nowhere to write: compile anew each time
        before = config.CACHE_DIR
        try:
            config.CACHE_DIR = str(cache_folder() / digest_of(constants))
            dispatcher.enable_caching()
        finally:
            config.CACHE_DIR = before
    return dispatcher  # type: ignore[no-any-return]
