"""Threads that wait for each other sleep soon, as others may need their cores."""

import os

_SPINS = "1000"
_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def let_idle_threads_sleep() -> None:
    """Have OpenMP's threads in processes that start from now on spin for microseconds, not for milliseconds.

    It has to come before torch is loaded; what the environment says already is kept. Where other programs want the
    same two cores, a step of the demo's network with two threads took 150 to 190 ms by default (300,000 spins), and
    8 to 25 ms with 1,000.
    """
    if not any(name in os.environ for name in _SET_BY_USER):
        os.environ["GOMP_SPINCOUNT"] = _SPINS
