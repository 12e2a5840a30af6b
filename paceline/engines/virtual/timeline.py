"""The core of the simulation: events in order of virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, final


@final
class Timeline:
    """Calls what was asked for at its time; what is due at the same time, in the order in which it was asked for.

    No randomness and no real clock: the same calls give the same run.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._num_asked = 0

    def at(self, time_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have `action(*arguments)` called at `time_s`, or now if that is past."""
        self._num_asked += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num_asked, action, arguments))

    @property
    def is_over(self) -> bool:
        """Nothing is left to happen."""
        return not self._events

    def turn(self) -> None:
        """Go on to the next event and let it happen; there must be one."""
        self.now_s, _, action, arguments = heapq.heappop(self._events)
        action(*arguments)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.turn()
