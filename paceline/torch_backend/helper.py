"""A thread that works when it is woken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import final


@final
class Helper:
    """Starts its thread when it is first woken, and calls `work` in it once for every time it was woken.

    Args:
        name: of the thread.
        work: does what there is to do, which may be nothing by then.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name, self._work = name, work
        self._signals: SimpleQueue[bool] = SimpleQueue()  # true: there may be work; false: end
        self._thread: threading.Thread | None = None
        self.is_closed = False

    def wake(self) -> None:
        """There may be work. Nothing happens once this is closed."""
        if self.is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._signals.put(True)

    def close(self) -> None:
        """Join the thread; what it works on must not block for ever."""
        self.is_closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._signals.put(False)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while self._signals.get():
            self._work()
