"""What an algorithm is: one module with constants, state, probe and update, in that order.

Each module of `vsgd.algorithms` defines

- a NamedTuple of its own constants, checked when it is made, and the instances that have a name;
- `init(theta, config)`: the state before the first sample;
- its probe: the offset δ at which the second gradient is taken, and when one is due;
- `rate(...)`: the learning rate η* of each coordinate;
- `update(theta, state, batch, count, config, ...)`: one pass through its loop, in the order of its documentation;
- `evaluation_point(theta, state)`: the parameters to judge and to save.

`networks` computes with whole tensors, so its state and its update are those of the front ends, which call its parts.

The functions are plain arithmetic, as `vsgd.core` explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Config = TypeVar("Config", bound=tuple[Any, ...])


def checked(**least: float) -> Callable[[type[Config]], type[Config]]:
    """Return a class decorator for a NamedTuple of constants.

    A value that is not finite or below its least one is refused. `repr` shows the constants that differ from their
    defaults: `Networks(probe_interval=5.0)`.
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
    """Refuse an algorithm that a front end cannot run, naming those that it can."""
    if not isinstance(config, accepted):
        names = " or ".join(f"vsgd.{kind.__name__}" for kind in accepted)
        raise TypeError(f"the algorithm must be an instance of {names}; this is {config!r}")
