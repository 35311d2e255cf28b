"""Damaged inputs: a few in `make test`, many in `make fuzz`. They depend on the seed only."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator

SEED = int(os.environ.get("VSGD_FUZZ", "0"))
"""Seed of `make fuzz`; 0 in `make test`."""

LONGEST_SECONDS = 300
"""Maximum duration of a case, without the time in which the process is suspended."""

PIECES = [
    *(bytes([byte]) for byte in b'\x00\xff\n\r",:# -+._e{'),
    *(b"9" * 30, b"\xef\xbb\xbf", b"nan", b"inf", b"1e160", b"1e308", b"5e-324", b"NA", b"0x1", b'"\n'),
    *(b"99999999999:1", b"1:", b":1", b"qid:1"),
]


def cases(short: int, long: int) -> int:
    """Return the number of cases."""
    return long if SEED else short


def generator(name: str) -> random.Random:
    return random.Random(f"{name} {SEED}")


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return the content with a few bytes or pieces changed, inserted, removed, repeated or truncated."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        at = rng.randrange(len(data) + 1)
        length = rng.choice([1, 1, 2, 8, 50, len(data)])
        change = rng.randrange(7)
        if change == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1 and at < len(data):
            data[at] = rng.randrange(256)
        elif change == 2:
            del data[at : at + length]
        elif change == 3:
            data[at:at] = data[at : at + length][:1000]
        elif change == 4:
            data[at:at] = rng.choice(PIECES)
        elif change == 5:
            data[at : at + length] = rng.randbytes(min(length, 50))
        elif change == 6 and rng.random() < 0.2:
            del data[at:]
    return bytes(data)


class Hang(BaseException):
    """Raised if a case takes too long."""


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """Raise `Hang` if the block takes too long.

    Seconds are counted one by one. A process that is suspended for any time receives a single signal when it continues.
    """
    seconds = 0

    def count(number: int, frame: object) -> None:
        nonlocal seconds
        seconds += 1
        if seconds >= LONGEST_SECONDS:
            raise Hang(f"more than {LONGEST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
