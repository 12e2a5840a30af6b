"""The core of the simulation: events in order of virtual time."""

import heapq
from collections.abc import Callable
from typing import Any, final


@final
class EventQueue:
    """Calls each action at its time. Actions of the same time are called in the order in which they were asked for.

    It draws no random numbers and reads no real clock, so the same calls give the same run.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._num_asked = self._num_meanwhile = 0
        self._is_stopped = False

    def at(self, time_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have `action(*arguments)` called at `time_s`, or now if that is past."""
        self._num_asked += 1
        now_s = self.now_s
        heapq.heappush(self._events, (time_s if time_s > now_s else now_s, self._num_asked, action, arguments))

    def meanwhile(self, time_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Like `at`, for an action that nobody waits for: `run` may return before its time has come."""
        self._num_meanwhile += 1
        self.at(time_s, self._call_meanwhile, action, arguments)

    def run(self) -> None:
        """Call actions until none is left or one of them calls `stop`."""
        events, pop = self._events, heapq.heappop
        self._is_stopped = False
        while len(events) > self._num_meanwhile and not self._is_stopped:
            self.now_s, _, action, arguments = pop(events)
            action(*arguments)

    def stop(self) -> None:
        """Let `run` return once the present action is over."""
        self._is_stopped = True

    def _call_meanwhile(self, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._num_meanwhile -= 1
        action(*arguments)
