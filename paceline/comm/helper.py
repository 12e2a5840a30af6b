"""A thread that makes calls for others."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import final


@final
class Helper:
    """Makes the calls that it is given, one after another, in a thread that starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_closed = False

    def call(self, function: Callable[[], None]) -> None:
        """Have `function` called. Nothing happens once this is closed."""
        if self.is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(function)

    def close(self, *, joins: bool = True) -> None:
        """End the thread after the calls that it has; `joins`: wait for that, which none of them may keep for ever."""
        self.is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            if joins and thread is not threading.current_thread():
                thread.join()

    def _serve(self) -> None:
        while (function := self._calls.get()) is not None:
            function()
            del function  # and with it the tensors that it holds, before the next one comes
