"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

LARGEST_SEED = 2**63 - 1


def at_least(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argument type for whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small, it must be at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{value} is too large, it must be at most {most}")
        return value

    return number


def positive_number(text: str) -> float:
    """Convert an argument to a positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    return value
