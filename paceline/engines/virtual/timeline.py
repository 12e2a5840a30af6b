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
        self._is_stopped = False

    def at(self, time_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have `action(*arguments)` called at `time_s`, or now if that is past."""
        self._num_asked += 1
        now_s = self.now_s
        heapq.heappush(self._events, (time_s if time_s > now_s else now_s, self._num_asked, action, arguments))

    def run(self) -> None:
        """Until nothing is left to happen, or somebody has called `stop`."""
        events, pop = self._events, heapq.heappop
        self._is_stopped = False
        while events and not self._is_stopped:
            self.now_s, _, action, arguments = pop(events)
            action(*arguments)

    def stop(self) -> None:
        """What happens now is the last that `run` lets happen."""
        self._is_stopped = True
