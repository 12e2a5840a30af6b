"""The core of the simulation: events in order of virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, final


@final
class EventQueue:
    """Calls what was asked for at its time; what is due at the same time, in the order in which it was asked for.

    No randomness and no real clock: the same calls give the same run.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._num_turns = 0
        self._is_stopped = False

    def at(self, time_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have `action(*arguments)` called at `time_s`, or now if that is past."""
        self._num_turns += 1
        now_s = self.now_s
        heapq.heappush(self._events, (time_s if time_s > now_s else now_s, self._num_turns, 0, action, arguments))

    def next_turn(self) -> int:
        """The place, among what is due at the same time, of what would be asked for now."""
        self._num_turns += 1
        return self._num_turns

    def at_turn(self, time_s: float, turn: int, part: int, action: Callable[..., object], *arguments: Any) -> None:
        """As `at`, but as if it had been asked for at an earlier turn, as its `part`-th thing."""
        heapq.heappush(self._events, (max(time_s, self.now_s), turn, part, action, arguments))

    def run(self) -> None:
        """Until nothing is left to happen, or somebody has called `stop`."""
        events, pop = self._events, heapq.heappop
        self._is_stopped = False
        while events and not self._is_stopped:
            self.now_s, _, _, action, arguments = pop(events)
            action(*arguments)

    def stop(self) -> None:
        """What happens now is the last that `run` lets happen."""
        self._is_stopped = True
