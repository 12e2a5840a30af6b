"""Where the time of a script's operations goes: moved while it waited, moved behind its computing, and waited for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import final

from paceline.comm.base import Timing


@final
class Ledger:
    """The running totals of one rank's process sets; threads that drive operations and those that wait book in it."""

    def __init__(self) -> None:
        self.timing = Timing()
        self._moving_s = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def moving(self, moved: Timing) -> Iterator[None]:
        """Operations are done inside, behind the script's computing unless it waits; `moved` counts their bytes."""
        began_s, before_bytes = perf_counter(), moved.moved_bytes
        yield
        with self._lock:
            took_s = perf_counter() - began_s
            self._moving_s += took_s
            self.timing.hidden_s += took_s
            self.timing.moved_bytes += moved.moved_bytes - before_bytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The script waits inside: what was moved meanwhile is not hidden, and the rest of the time is the others'."""
        began_s, moving_0_s = perf_counter(), self._moving_s
        try:
            yield
        finally:
            with self._lock:
                took_s = perf_counter() - began_s
                shown_s = min(took_s, self._moving_s - moving_0_s)
                self.timing.communication_s += shown_s
                self.timing.hidden_s -= shown_s
                self.timing.waiting_s += took_s - shown_s
