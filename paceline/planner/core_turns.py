"""Workers whose hosts share cores take turns at them: who comes first is served first, and has the core until done."""

import math
from typing import final

import numpy as np

from paceline.planner.fabric import Floats, Numbers


def ends_s(needed_s: Floats, cores: Numbers, *, rest_s: float) -> Floats:
    """When each worker has computed all its steps, from when all begin together, shape (tries, workers).

    Args:
        needed_s: what each step needs of a core, shape (steps, tries, workers).
        cores: each worker's.
        rest_s: what a worker does between two steps, for which it needs no core.
    """
    num_steps, num_tries, num_workers = needed_s.shape
    every_try = np.arange(num_tries)
    found = np.empty((num_tries, num_workers))
    for core in np.unique(cores):
        here = np.flatnonzero(cores == core)
        mine_s = needed_s[:, :, here]
        ready_s, free_s = np.zeros((num_tries, len(here))), np.zeros(num_tries)
        num_done = np.zeros((num_tries, len(here)), dtype=np.int64)
        for _ in range(num_steps * len(here)):
            who = ready_s.argmin(axis=1)
            step = num_done[every_try, who]
            free_s = np.maximum(free_s, ready_s[every_try, who]) + mine_s[step, every_try, who]
            num_done[every_try, who] = step + 1
            is_last = step + 1 == num_steps
            found[every_try[is_last], here[who[is_last]]] = free_s[is_last]
            ready_s[every_try, who] = np.where(is_last, np.inf, free_s + rest_s)
    return found


def last_of_some_s(ends_s: Floats, size: int, *, left_out: int = 0) -> float:
    """The mean end of the last but `left_out` of so many workers, whichever these are.

    Args:
        ends_s: of all workers, shape (tries, workers).
    """
    num_workers = ends_s.shape[1]
    among = math.comb(num_workers, size)
    # Of the sets of `size` workers, those in which the one at this place among all is the last but `left_out`.
    chances = [
        math.comb(place, size - 1 - left_out) * math.comb(num_workers - 1 - place, left_out) / among
        for place in range(num_workers)
    ]
    return float((np.sort(ends_s, axis=1) * chances).sum(axis=1).mean())


@final
class Cores:
    """The same step by step, where workers wait for each other in between."""

    def __init__(self, cores: Numbers) -> None:
        self._cores = cores
        self._free_s = np.zeros(int(cores.max()) + 1)

    def serve(self, ready_s: Floats, needed_s: Floats) -> Floats:
        """When each worker has what it needs, from when it is ready: a call for each step of all workers."""
        found = np.empty_like(ready_s)
        for rank in np.argsort(ready_s, kind="stable"):
            core = self._cores[rank]
            found[rank] = self._free_s[core] = max(self._free_s[core], ready_s[rank]) + needed_s[rank]
        return found
