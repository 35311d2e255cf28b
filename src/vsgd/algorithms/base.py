"""The structure of an algorithm, and validation of its constants.

Each module of `vsgd.algorithms` defines, in this order:

- a NamedTuple of constants, decorated by `checked`, and named instances of it;
- `init(theta, config)`: the state before the first sample;
- the probe: the offset δ of the second gradient, and the steps that have one;
- `rate(...)`: the learning rate η* of each coordinate;
- `update(theta, state, batch, count, config, ...)`: one step;
- `evaluation_point(theta, state)`: the parameters for evaluation and for saving.

`networks` needs quantities of whole tensors, so its state and its update are in the front ends, which call its
functions. All functions are plain arithmetic, as described in `vsgd.core`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Config = TypeVar("Config", bound=tuple[Any, ...])


def checked(**least: float) -> Callable[[type[Config]], type[Config]]:
    """Return a class decorator that validates a NamedTuple of constants.

    `repr` of an instance shows the constants that differ from their defaults: `Networks(probe_interval=5.0)`.

    Args:
        least: the minimum of each constant; 0 by default.

    Raises:
        ValueError: by the decorated class, if a constant is not finite or below its minimum.
    """

    def decorate(fields: type[Config]) -> type[Config]:
        def new(cls: type[Config], *args: Any, **kwargs: Any) -> Config:
            config = fields.__new__(cls, *args, **kwargs)
            for name, value in config._asdict().items():  # type: ignore[attr-defined]
                if not (math.isfinite(value) and value >= least.get(name, 0)):
                    raise ValueError(f"{fields.__name__}: {name} is {value}, it must be at least {least.get(name, 0)}")
            return config

        def make(cls: type[Config], values: Iterable[Any]) -> Config:
            return new(cls, *values)

        def show(config: Config) -> str:
            defaults = fields._field_defaults  # type: ignore[attr-defined]
            values = config._asdict().items()  # type: ignore[attr-defined]
            changed = [f"{name}={value!r}" for name, value in values if name not in defaults or value != defaults[name]]
            return f"{fields.__name__}({', '.join(changed)})"

        members = {"__slots__": (), "__doc__": fields.__doc__, "__module__": fields.__module__}
        return type(
            fields.__name__, (fields,), {**members, "__new__": new, "_make": classmethod(make), "__repr__": show}
        )

    return decorate


def require(config: Any, *accepted: type) -> None:
    """Raise TypeError unless `config` is an instance of one of the accepted algorithms, which the message lists."""
    if not isinstance(config, accepted):
        names = " or ".join(f"vsgd.{kind.__name__}" for kind in accepted)
        raise TypeError(f"the algorithm must be an instance of {names}; this is {config!r}")
