"""Run by test_interrupts.py: real signals at short intervals, while a model trains."""

from __future__ import annotations

import random
import signal
import sys

import torch
from fuzzing import cases
from interrupting import Interrupt, handled
from test_interrupts import CASES, is_equal, started

TIMERS = {
    signal.SIGALRM: signal.ITIMER_REAL,
    signal.SIGVTALRM: signal.ITIMER_VIRTUAL,
    signal.SIGPROF: signal.ITIMER_PROF,
}
ROUNDS = cases(300, 1500)

armed = False


def interrupt(number, frame):
    if armed:
        raise Interrupt


def interrupted_step(run, timer, rng):
    """Take a step; whether it was interrupted."""
    global armed
    signal.setitimer(timer, rng.uniform(2e-5, 5e-3), rng.choice([0, rng.uniform(2e-5, 6e-4)]))
    try:
        armed = True
        run.step()
        armed = False
    except Interrupt:
        armed = False
        return True
    finally:
        armed = False
        signal.setitimer(timer, 0)
    return False


def main(name):
    torch.set_num_threads(1)
    rng, hits, before = random.Random(0), 0, None
    run = started(CASES[name])
    with handled(TIMERS, interrupt):
        for k in range(ROUNDS):
            before = run.state()
            twin = run.copy(warm=False)
            torch.set_rng_state(before["random"])
            timer = list(TIMERS.values())[k % len(TIMERS)]
            try:
                hits += interrupted_step(run, timer, rng)
            except Interrupt:  # at the very moment that the timer was being stopped
                signal.setitimer(timer, 0)
            after = run.state()
            torch.set_rng_state(before["random"])
            twin.step()
            whole = twin.state()
            assert is_equal(after, before) or is_equal(after, whole), f"step {k} was left half-done"
            assert {signal.getsignal(number) for number in TIMERS} == {interrupt}
            torch.set_rng_state(after["random"])
    print(f"{hits} of {ROUNDS} steps interrupted")


if __name__ == "__main__":
    main(sys.argv[1])
