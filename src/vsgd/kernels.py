"""numba, loaded when it is first needed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a plain function of this package, and the plain functions of this package that it calls.

    The rule stays importable without numba, and its one text is also the body of every fused loop. Compiled
    code is free of the interpreter lock, so loops run side by side in ordinary threads.
    """
    import numba

    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        callee = scope.get(name)
        if isinstance(callee, types.FunctionType) and callee.__module__.startswith("vsgd."):
            scope[name] = compiled(callee)
    clone = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    # a product and a sum may round once instead of twice
    return numba.njit(clone, nogil=True, error_model="numpy", fastmath={"contract"})
