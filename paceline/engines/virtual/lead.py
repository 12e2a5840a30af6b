"""What a process has done before the timeline came there, where others may keep its core from it."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import final

from paceline.engines.virtual.computing.cores import Thread
from paceline.engines.virtual.events import EventQueue


@final
class Lead:
    """A script is run ahead of the timeline, and only a core's queue tells when what it computes is done. So what it
    does after it has computed waits here, in its order, for the core to come there."""

    def __init__(self, timeline: EventQueue, thread: Thread) -> None:
        self._timeline, self._thread = timeline, thread
        self._steps: deque[tuple[Callable[[], object], bool]] = deque()
        """What comes next, and whether it takes time: then it calls `_go_on` itself."""
        self.is_under_way = False

    def compute(self, duration_s: float, *, from_s: float) -> None:
        """The core is to work so long, from `from_s` on if nothing else is under way."""
        if not self.is_under_way:
            self.is_under_way = True
            self._timeline.at(from_s, self._go_on)
        self._steps.append((partial(self._thread.run, duration_s, self._go_on), True))

    def rest(self, duration_s: float) -> None:
        """Let so much time pass, in which the core is not needed."""
        self._steps.append((lambda: self._timeline.at(self._timeline.now_s + duration_s, self._go_on), True))

    def act(self, action: Callable[..., object], *arguments: object) -> None:
        self._steps.append((lambda: self._timeline.at(self._timeline.now_s, action, *arguments), False))

    def _go_on(self) -> None:
        """Do what comes next, up to what takes time."""
        while self._steps:
            step, takes_time = self._steps.popleft()
            step()
            if takes_time:
                return
        self.is_under_way = False
