"""How much of this machine other programs use, which no run is to be measured beside."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

_WINDOW_S, _NUM_WINDOWS = 0.2, 5
_QUIET = 0.1


@dataclass(frozen=True)
class Usage:
    at_s: float
    busy_s: float
    """Seconds for which the cores that this process may use have been busy."""
    own_s: Mapping[int, float]
    """Processor seconds of this process and of all that it started, by process id."""
    num_cores: int

    @classmethod
    def now(cls) -> "Usage":
        allowed = os.sched_getaffinity(0)
        every = psutil.cpu_times(percpu=True)
        cores = [times for core, times in enumerate(every) if core in allowed] or every
        busy_s = sum(sum(times[:8]) - times.idle - times.iowait for times in cores)  # guests' is in user's already
        own = psutil.Process()
        own_s = {}
        for process in [own, *own.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended
                own_s[process.pid] = sum(process.cpu_times()[:2])
        return cls(time.monotonic(), busy_s, own_s, max(1, len(cores)))


def describe() -> dict[str, float]:
    return {"average_1_min": os.getloadavg()[0], "used_by_others": used_by_others()}


def used_by_others() -> float:
    """The part of this process's cores that programs take which it did not start; 0 to 1.

    The least of some short windows: what an earlier run left behind is over within a second, another program is not.
    On a quiet machine the first window is enough.
    """
    least = 1.0
    for _ in range(_NUM_WINDOWS):
        before = Usage.now()
        time.sleep(_WINDOW_S)
        least = min(least, between(before, Usage.now()))
        if least < _QUIET:
            break
    return least


def between(before: Usage, after: Usage) -> float:
    """The part of the cores that others used. What an own process used that has ended since counts as theirs."""
    own_s = sum(used_s - before.own_s.get(pid, 0.0) for pid, used_s in after.own_s.items())
    others_s = after.busy_s - before.busy_s - own_s
    return min(1.0, max(0.0, others_s / ((after.at_s - before.at_s) * after.num_cores)))
