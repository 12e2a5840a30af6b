"""A tracker in a thread of its own: whatever its service does, training neither waits for it nor fails with it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import final

from paceline.lab.trackers import Tracker

MAX_WAITING = 1000  # about a quarter of an hour of a run that is evaluated now and then
PATIENCE_S = 20.0
_NO_MORE = ", and it is told no more"


@final
class Delivery(Tracker):
    """Hands on what it is told, in order, as fast as the tracker takes it.

    The tracker is opened, told and closed by one thread. If it raises, or has not taken everything some time after the
    run's end, it is given up with a word on standard error. What comes while `MAX_WAITING` messages wait is left out,
    and so said at the end.

    Args:
        name: the tracker's, for messages.
        opened: makes the tracker.
    """

    def __init__(self, name: str, opened: Callable[[], Tracker]) -> None:
        self._name = name
        self._actions: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._num_left_out = 0
        self.is_given_up = False
        """Whether its service is not worth being told of another run."""
        # A daemon: a service that hangs does not keep the program from ending.
        self._thread = threading.Thread(target=self._deliver, args=(opened,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], *, step: int, time_s: float) -> None:
        """Returns at once."""
        if not self._thread.is_alive():
            return
        if self._actions.qsize() >= MAX_WAITING:
            self._num_left_out += 1
            return
        self._actions.put(lambda tracker: tracker.log(values, step=step, time_s=time_s))

    def close(self, *, is_finished: bool) -> None:
        """Returns when everything is told, or after `PATIENCE_S`."""
        self._actions.put(lambda tracker: tracker.close(is_finished=is_finished))
        self._actions.put(None)
        self._thread.join(PATIENCE_S)
        if self._num_left_out:
            self._say(f"is too slow: {self._num_left_out} messages of this run were left out")
        if self._thread.is_alive():
            self.is_given_up = True
            self._say(f"has not taken everything {PATIENCE_S:g} s after the run's end: the rest may be lost{_NO_MORE}")

    def _deliver(self, opened: Callable[[], Tracker]) -> None:
        try:
            tracker = opened()
            while (action := self._actions.get()) is not None:
                action(tracker)
        except Exception as error:  # a service's client may raise anything, and none of it is worth a training run
            self.is_given_up = True
            self._say(f"failed{_NO_MORE}: {type(error).__name__}: {error}")

    def _say(self, what: str) -> None:
        print(f"{self._name} {what}", file=sys.stderr)
