"""Threads that wait for each other sleep soon, as others may need their cores."""

import os

_SPINS = "4000"
_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def let_idle_threads_sleep() -> None:
    """Have OpenMP's threads in processes that start from now on spin for some 0.1 ms, not for milliseconds.

    It has to come before torch is loaded; what the environment says already is kept. Beside ten busy programs on two
    cores, a step of the demo's network with two threads took 63 to 463 ms in the mean by default (300,000 spins), and
    64 to 74 ms with 4,000. With 1,000 it took 39 to 46 ms, but 12 to 30 % more on quiet cores,
    where 4,000 cost nothing.
    """
    if not any(name in os.environ for name in _SET_BY_USER):
        os.environ["GOMP_SPINCOUNT"] = _SPINS
