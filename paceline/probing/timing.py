"""How long something takes that is done again and again, with caches that are warm or hold other things."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import final

import torch

_NUM_WARMUP = 5
_TRIMMED = 0.1  # of the shortest times, and of the longest, that do not count
_CACHE_BYTES = 2**26  # more than most caches hold, that of all cores included


def median_s(action: Callable[[], object], count: int, *, before: Callable[[], object] | None = None) -> float:
    """After some times that warm up.

    Args:
        before: is done each time, and takes no time.
    """
    for _ in range(min(_NUM_WARMUP, count)):
        action()
    return statistics.median(_times_s(action, count, before))


def mean_s(action: Callable[[], object], count: int) -> float:
    """Without the extremes; nothing warms up, as another rank does it as often.

    The median of what takes either little or much is chance, and users wait for sums.
    """
    return trimmed_mean(_times_s(action, count))


def core_s(action: Callable[[], object], count: int) -> float:
    """Processor time of this process for each, with caches that hold other things."""
    emptier, began_s = CacheEmptier(), time.process_time()
    for _ in range(count):
        emptier()
        action()
    return (time.process_time() - began_s - emptier.processor_s) / count


def trimmed_mean(times_s: Sequence[float]) -> float:
    """Without the extremes."""
    num_trimmed = int(_TRIMMED * len(times_s))
    return statistics.fmean(sorted(times_s)[num_trimmed : len(times_s) - num_trimmed])


def _times_s(action: Callable[[], object], count: int, before: Callable[[], object] | None = None) -> list[float]:
    times_s = []
    for _ in range(count):
        if before is not None:
            before()
        began_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - began_s)
    return times_s


@final
class CacheEmptier:
    """Fills the caches with other things, as cores that hosts share find them when another host has been at work."""

    def __init__(self) -> None:
        self.processor_s = 0.0
        """What that took so far, of this thread: torch is to compute with no other."""
        self._scratch = torch.zeros(_CACHE_BYTES // 4)

    def __call__(self) -> None:
        began_s = time.thread_time()
        self._scratch.add_(1.0)
        self.processor_s += time.thread_time() - began_s
