"""How long something takes that is done again and again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

_NUM_WARMUP = 5
_TRIMMED = 0.1
"""Of the shortest times, and of the longest, that do not count."""


def median_s(action: Callable[[], object], count: int) -> float:
    """After some times that warm up."""
    for _ in range(min(_NUM_WARMUP, count)):
        action()
    return statistics.median(_times_s(action, count))


def mean_s(action: Callable[[], object], count: int) -> float:
    """Without the extremes; nothing warms up, as another rank does it as often.

    The median of what takes either little or much is chance, and users wait for sums.
    """
    times_s = sorted(_times_s(action, count))
    num_trimmed = int(_TRIMMED * count)
    return statistics.fmean(times_s[num_trimmed : count - num_trimmed])


def _times_s(action: Callable[[], object], count: int) -> list[float]:
    times_s = []
    for _ in range(count):
        began_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - began_s)
    return times_s
