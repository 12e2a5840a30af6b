"""Vector clocks by key range: how far each worker's pushes have come there.

Li et al., OSDI 2014, section 4.1: workers push ranges, so that keys share clocks, and a range is cut only where a
push ends.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, final


class RangeClock(NamedTuple):
    start: int
    stop: int
    clocks: Mapping[int, int]
    """By worker: how many of its pushes that covered this range count, up to the last one here."""


@final
class RangeClocks:
    """The clocks of these workers for the keys from `start` to `stop`, which begin at 0."""

    def __init__(self, start: int, stop: int, workers: Collection[int]) -> None:
        self._stop = stop
        self._starts = [start]
        self._clocks: list[Mapping[int, int]] = [dict.fromkeys(workers, 0)]

    def advance(self, start: int, stop: int, worker: int, clock: int) -> None:
        """The worker has come to this clock in the range; it never goes back."""
        if start >= stop:
            return
        first = self._cut(start)
        last = self._cut(stop)
        for place in range(first, last):
            clocks = self._clocks[place]
            self._clocks[place] = {**clocks, worker: max(clock, clocks[worker])}
        for place in range(min(last, len(self._starts) - 1), max(first, 1) - 1, -1):
            if self._clocks[place] == self._clocks[place - 1]:
                del self._starts[place], self._clocks[place]

    def within(self, start: int, stop: int) -> Iterator[RangeClock]:
        """The clocks of a range, piece by piece."""
        stops = [*self._starts[1:], self._stop]
        for place in range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)):
            low, high = max(start, self._starts[place]), min(stop, stops[place])
            if low < high:
                yield RangeClock(low, high, self._clocks[place])

    def slowest(self, start: int, stop: int, workers: Collection[int]) -> float:
        """The clock that all of these workers have come to everywhere in the range; infinite, if that is nobody."""
        clocks = (each.clocks[worker] for each in self.within(start, stop) for worker in workers)
        return min(clocks, default=float("inf"))

    def _cut(self, at: int) -> int:
        """Have a range begin here; returns its place."""
        place = bisect_left(self._starts, at)
        if at < self._stop and (place == len(self._starts) or self._starts[place] != at):
            self._starts.insert(place, at)
            self._clocks.insert(place, self._clocks[place - 1])
        return place
